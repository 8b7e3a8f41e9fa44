"""What a change did to files is undone unless the database took it, whatever ended the process.

A change of files and of rows is noted in a journal beside the database before the first file
changes. The next writer finds the journal and, holding the database's lock, either restores the
files or, if the change is in the history of its job, deletes the copies that were kept of them.
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
        job_id: The job that is changed.
        changes: In its history before the change.
    """

    home: Path
    job_id: int
    changes: int

    def keep(
        self,
        files: Iterable[Path],
        moves: Iterable[tuple[Path, Path]] = (),
        made: RunDir | None = None,
    ) -> None:
        """Keep what is needed to undo a change; nothing of it may have been done yet.

        To undo takes renames alone, which a full disk does not refuse.

        Args:
            files: Will be written or deleted; they may be missing.
            moves: Where directories are, and where they will be.
            made: A run directory that will be made.
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
            "made": str(made.root) if made is not None else None,
        }
        write_atomic(self.home / _JOURNAL, json.dumps(facts), durable=True)


def count_changes(db: sqlite3.Connection, job_id: int) -> int:
    """Count what the history of a job has."""
    row = db.execute("SELECT COUNT(*) FROM history WHERE job=?", (job_id,)).fetchone()
    return int(row[0])


def is_left(home: Path) -> bool:
    """Whether a change has not been settled."""
    return (home / _JOURNAL).exists()


def settle(home: Path, db: sqlite3.Connection) -> None:
    """Undo, or forget, the change that the journal is about; the caller has the write lock.

    What the disk refuses is tried again at the next write.
    """
    journal = home / _JOURNAL
    if not journal.exists():
        return
    with suppress(OSError):
        try:
            facts = json.loads(read_regular(journal, LARGEST_JSON))
            taken = count_changes(db, facts["job"]) != facts["changes"]
            _forget(facts) if taken else _undo(facts)
        except (KeyError, TypeError, ValueError):  # nobody's journal: whole, it has all of these
            pass
        journal.unlink(missing_ok=True)


def _undo(facts: dict[str, Any]) -> None:
    if facts["made"] is not None and not (made := RunDir(Path(facts["made"]))).has_run:
        shutil.rmtree(made.root, ignore_errors=True)  # what stays is set aside by the next submit
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
