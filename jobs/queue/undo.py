"""Undo a change's file operations unless the database committed it, even if the process died.

A change of files and rows is recorded in a journal next to the database before the first file
changes. The next writer finds the journal and, holding the database's lock, either restores the
files or, if the job's history contains the change, deletes the backups.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import RunDir, write_atomic
from jobs.untrusted.files import LARGEST_JSON, read_regular

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

_JOURNAL: Final = "jobs.undo"


@dataclass(frozen=True)
class Undo:
    """The files of one change, inside a write transaction.

    Attributes:
        home: The state directory.
        job_id: The changed job.
        changes: Length of its history before the change.
    """

    home: Path
    job_id: int
    changes: int

    def keep(
        self,
        files: Iterable[Path],
        moves: Iterable[tuple[Path, Path]] = (),
        made: Iterable[RunDir] = (),
    ) -> None:
        """Save what is needed to undo a change; call this before any part of the change.

        Undoing only renames files, which works on a full disk.

        Args:
            files: Files that will be written or deleted; they may be missing.
            moves: Old and new paths of directories that will be moved.
            made: Run directories that will be created.
        """
        back: list[tuple[str | None, str]] = []
        for path in files:
            copy = None
            if path.exists():
                copy = str(path.with_name(f".{path.name}.before"))
                write_atomic(Path(copy), path.read_text(encoding="utf-8"), durable=True)
            back.append((copy, str(path)))
        facts = {
            "job": self.job_id,
            "changes": self.changes,
            "files": back,
            "moves": [(str(before), str(now)) for before, now in moves],
            "made": [str(run_dir.root) for run_dir in made],
        }
        write_atomic(self.home / _JOURNAL, json.dumps(facts), durable=True)


def count_changes(db: sqlite3.Connection, job_id: int) -> int:
    """Return the length of a job's history."""
    row = db.execute("SELECT COUNT(*) FROM history WHERE job=?", (job_id,)).fetchone()
    return int(row[0])


def is_left(home: Path) -> bool:
    """Return whether there is an unsettled change."""
    return (home / _JOURNAL).exists()


def settle(home: Path, db: sqlite3.Connection) -> None:
    """Undo or forget the change in the journal; the caller has the write lock.

    Operations that the disk refuses are retried at the next write.
    """
    journal = home / _JOURNAL
    if not journal.exists():
        return
    with suppress(OSError):
        try:
            facts = json.loads(read_regular(journal, LARGEST_JSON))
            taken = count_changes(db, facts["job"]) != facts["changes"]
            _forget(facts) if taken else _undo(facts)
        # a malformed journal is not ours; ours is written atomically
        except (KeyError, TypeError, ValueError):
            pass
        journal.unlink(missing_ok=True)


def _undo(facts: dict[str, Any]) -> None:
    made = facts["made"] or []
    for path in [made] if isinstance(made, str) else made:  # an earlier version names one
        if not (run_dir := RunDir(Path(path))).has_run:
            # anything left is set aside by the next submit
            shutil.rmtree(run_dir.root, ignore_errors=True)
    for before, now in reversed(facts["moves"]):
        if os.path.lexists(now) and not os.path.lexists(before):
            os.rename(now, before)
    for copy, path in facts["files"]:
        if copy is None:
            Path(path).unlink(missing_ok=True)
        elif Path(copy).exists():
            os.replace(copy, path)


def _forget(facts: dict[str, Any]) -> None:
    for copy, _ in facts["files"]:
        if copy is not None:
            Path(copy).unlink(missing_ok=True)
