"""State directories that share the cache: each is recorded there when a job of it starts.

What their jobs read must not be cleared away, and a directory that cannot be read from here (of
another machine, container, user or version) may have such jobs.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.machine.residence import Standing, is_shared, read_residence, residence, standing_of
from jobs.paths import cache_home
from jobs.queue.job import job_of_row
from jobs.queue.tables import PERSON, ROWS, VERSION, opened
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from jobs.queue.job import Job
    from jobs.run.rundir import RunDir

_FOLDER: Final = "state_directories"


@dataclass(frozen=True)
class Neighbor:
    """Another state directory.

    Attributes:
        home: Its path where its jobs ran; None if its record is damaged.
        host: The name of that machine or container.
        jobs: Its jobs; None if they cannot be read from here.
        record: The file that says so.
    """

    home: Path | None
    host: str
    jobs: list[Job] | None
    record: Path

    @property
    def name(self) -> str:
        """Return its path, and its host if it is unknown here."""
        if self.home is None:
            return f"in {self.host}"
        return str(self.home) if self.jobs is not None else f"{self.home} of {self.host}"


def record_home(run_dir: RunDir) -> None:
    """Record in the cache that jobs of a run's state directory use it."""
    home = run_dir.root.resolve().parent.parent
    # Without a cache there is nothing to clear, and a job may have its own.
    with suppress(OSError):
        inode = home.stat().st_ino
        name = hashlib.sha256(f"{inode} {home}".encode(errors="surrogateescape")).hexdigest()[:16]
        facts = {"home": str(home), "inode": inode, "residence": str(residence())}
        file = cache_home() / _FOLDER / f"{name}.json"
        if read_json(file) != facts:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(file, json.dumps(facts) + "\n", durable=True)


def find_neighbors(home: Path) -> list[Neighbor]:
    """Return the state directories besides this one, and forget those that were deleted here."""
    others = []
    for file in sorted((cache_home() / _FOLDER).glob("*.json")):
        facts = read_json(file) or {}
        if not facts.keys() >= {"home", "inode", "residence"}:
            others.append(Neighbor(None, "a damaged record", None, file))
            continue
        there, inode = Path(str(facts["home"])), facts["inode"]
        recorded = str(facts["residence"])
        here = standing_of(recorded, cache_home()) is not Standing.ELSEWHERE
        with suppress(OSError):
            if there == home.resolve():
                # A volume has its path and inode in any container.
                if home.stat().st_ino == inode:
                    continue
                if here:  # it was deleted, and this one is in its place
                    file.unlink(missing_ok=True)
                    continue
        jobs = None
        if here or is_shared(there):
            try:
                seen = there.stat().st_ino == inode
            except FileNotFoundError:
                seen = False
                if here:  # it was in this machine, and is gone
                    file.unlink(missing_ok=True)
                    continue
            except OSError:
                seen = False
            jobs = _jobs_in(there) if seen else None
        host = read_residence(recorded).host or "a machine whose name is not known"
        others.append(Neighbor(there, host, jobs, file))
    return others


def _jobs_in(home: Path) -> list[Job] | None:
    """Read the jobs of a state directory, whose database is not changed; None if that fails."""
    try:
        with opened(home / "jobs.db", "ro", PERSON) as db:
            if db.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                return None
            return [job_of_row(row) for row in db.execute(f"{ROWS} ORDER BY id")]
    except (sqlite3.Error, OSError, ValueError, LookupError):
        return None
