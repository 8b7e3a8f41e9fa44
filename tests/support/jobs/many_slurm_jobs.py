"""Very many jobs that Slurm has, written past the queue, and what `squeue` says of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from jobs.backends.slurm.commands import Listed
from jobs.backends.slurm.records import Submission, submission_file
from jobs.run.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.queue.store import Store


def many_slurm_jobs(store: Store, count: int) -> list[Listed]:
    """Jobs 1, 2, … with the same numbers in Slurm, where all of them wait."""
    rows, listed = [], []
    for number in range(1, count + 1):
        run_dir = RunDir(store.home / "runs" / f"{number}-j")
        run_dir.root.mkdir(parents=True)
        record = Submission(f"fsdp-tui-{number}-00000000-0", 0, str(number))
        submission_file(run_dir).write_text(json.dumps(asdict(record)))
        listed.append(Listed(record.id, record.name, "PENDING", "Priority"))
        rows.append(
            {
                "id": number,
                "name": "j",
                "state": "queued",
                "reason": "",
                "ranks": 4,
                "wanted": json.dumps(["slurm"]),
                "total_steps": 100,
                "run_dir": str(run_dir.root),
                "run_id": f"{number:032}",
                "created": float(number),
                "queued": float(number),
            }
        )
    with closing(sqlite3.connect(store.path)) as db, db:
        names, marks = ", ".join(rows[0]), ", ".join(f":{name}" for name in rows[0])
        db.executemany(f"INSERT INTO jobs ({names}) VALUES ({marks})", rows)
    return listed


def as_squeue(listed: Iterable[Listed]) -> str:
    """As `squeue` prints it, column by column."""
    lines = []
    for one in listed:
        columns = (one.id, one.name, one.state, one.reason, one.restarts, one.starts, one.nodes)
        lines.append("".join(f"{column}\x1f" for column in columns))
    return "\n".join(lines) + "\n"
