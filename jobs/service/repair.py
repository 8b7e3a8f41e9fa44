"""Rebuild a damaged jobs database.

Uses the rows that can still be read and the run directories, which hold everything about a job.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.backends import backend
from jobs.backends.local.ranks import beats
from jobs.errors import UserError
from jobs.machine import file_lock, processes
from jobs.machine.processes import ProcessId
from jobs.machine.residence import elsewhere, is_shared, residence
from jobs.preflight.check_job import check_devices
from jobs.queue.job import LOCAL, Terms, backend_of
from jobs.queue.states import State
from jobs.queue.tables import (
    TABLES,
    VERSION,
    choose_journal,
    insert,
    is_locked,
    journal_of,
    leave_wal,
    trouble,
)
from jobs.run.eventlog import EventLog
from jobs.run.rundir import RunDir, read_json
from jobs.run.why_failed import why_failed
from jobs.spec.file.load import load_spec
from jobs.spec.rules.strategy import world_size
from jobs.supervise.median import sweep_in

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = dict[str, Any]

_RUN: Final = re.compile(r"([1-9]\d{0,17})-(.+)")
_TABLES: Final = ("jobs", "history", "settings", "claims")
_SIDES: Final = ("", "-wal", "-shm")
_HELD: Final = "restored by doctor --repair; release it to run"
# the second name is that of version 0.1
_SUPERVISORS: Final = frozenset({b"jobs.backends.local", b"jobs.supervise"})
_LOCK_TIMEOUT: Final = 5.0  # seconds to wait for the queue lock


@dataclass(frozen=True)
class Repaired:
    """The result of a repair.

    Attributes:
        kept: Path of the old database; None if it was intact and nothing was done.
        read: Jobs whose rows could still be read.
        restored: Jobs that were rebuilt from their run directories.
    """

    kept: Path | None
    read: tuple[int, ...] = ()
    restored: tuple[int, ...] = ()


def repair(home: Path) -> Repaired:
    """Replace a damaged database of a state directory, keeping the old file.

    Raises:
        UserError: Another process holds the queue.
        OSError: A file cannot be written.
    """
    path = home / "jobs.db"
    with open(home / "dispatch.lock", "a") as lock:
        if not file_lock.acquire(lock, _LOCK_TIMEOUT):
            raise UserError("another process holds the queue; try again")
        if path.exists() and _is_intact(path):
            _fix_journal(path)
            return Repaired(None)
        rows = {name: list(_readable(path, name)) for name in (*_TABLES, "stages")}
        readable = {row["id"] for row in rows["jobs"]}
        restored = [row for run in _runs(home) if (row := _of_run(*run))["id"] not in readable]
        new = path.with_name("jobs.db.new")
        new.unlink(missing_ok=True)
        _write(new, rows, restored)
        kept = path.with_name(f"jobs.db.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        for side in _SIDES:
            with suppress(FileNotFoundError):
                os.replace(f"{path}{side}", f"{kept}{side}")
        os.replace(new, path)
    return Repaired(kept, tuple(sorted(readable)), tuple(row["id"] for row in restored))


def _fix_journal(path: Path) -> None:
    """Switch from WAL to a rollback journal if machines share the file and none is using it."""
    if is_shared(path.parent) and journal_of(path) == "wal":
        with closing(sqlite3.connect(path, timeout=_LOCK_TIMEOUT, isolation_level=None)) as db:
            leave_wal(db)


def _is_intact(path: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            whole = db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            return bool(whole and (version > VERSION or tables.issuperset(_TABLES)))
    except sqlite3.Error as error:
        if is_locked(error):
            raise trouble(error, path) from None
        return False


def _readable(path: Path, table: str) -> Iterator[Row]:
    """Yield the readable rows of a table, reading from both ends."""
    seen: set[int] = set()
    for order in ("", " DESC"):
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                db.row_factory = sqlite3.Row
                for row in db.execute(
                    f"SELECT rowid AS row_, * FROM {table} ORDER BY rowid{order}"
                ):
                    if row["row_"] not in seen and _is_usable(table, row):
                        seen.add(row["row_"])
                        yield {name: row[name] for name in row.keys() if name != "row_"}  # noqa: SIM118
        except (sqlite3.Error, UnicodeDecodeError):
            continue


def _is_usable(table: str, row: sqlite3.Row) -> bool:
    """Return whether a row of `jobs` is usable; a damaged page may contain anything."""
    if table != "jobs":
        return True
    try:
        State(row["state"])
        json.loads(row["wanted"])
        json.loads(row["gpus"])
        return bool(row["name"] and row["run_id"] and Path(row["run_dir"]).is_dir())
    except (ValueError, TypeError):
        return False


def _runs(home: Path) -> Iterator[tuple[int, str, RunDir]]:
    for path in sorted((home / "runs").glob("*")):
        if (match := _RUN.fullmatch(path.name)) and path.is_dir():
            yield int(match[1]), match[2], RunDir(path)


def _of_run(job_id: int, name: str, run_dir: RunDir) -> Row:
    """Build a row of `jobs` from a run directory."""
    record = read_json(run_dir.launch_file) or {}
    run_id = record.get("run_id")
    run_id = run_id if isinstance(run_id, str) and run_id else uuid.uuid4().hex
    lives = str(record.get("residence") or "")
    away = bool(elsewhere(lives, run_dir.root.parent.parent)) and beats(run_dir)
    alive = away or (bool(record) and bool(processes.with_run_id(run_id)))
    state, reason = _state_of(run_dir, launched=bool(record), alive=alive)
    gpus = record.get("gpus") if alive else []
    created = _changed(run_dir.job_file) or _changed(run_dir.root) or time.time()
    supervisor = _supervisor_of(job_id, run_dir) if alive and not away else None
    attempt, started = record.get("attempt"), record.get("started")
    row = {
        "id": job_id,
        "name": name,
        "state": str(state),
        "reason": reason,
        "run_id": run_id,
        "gpus": json.dumps(gpus if isinstance(gpus, list) else []),
        "run_dir": str(run_dir.root),
        "created": created,
        "queued": created,
        "started": started if isinstance(started, float) else None,
        "ended": (_changed(run_dir.events) or created) if state.ended else None,
        "attempt": attempt if isinstance(attempt, int) else 0,
        "held": state is State.QUEUED,
        "supervisor_pid": supervisor and supervisor.pid,
        "supervisor_started": supervisor and supervisor.started,
        "boot_id": (lives if away else str(residence())) if alive else None,
    }
    terms = _terms(run_dir)
    owner = backend(backend_of(json.loads(str(terms["wanted"]))))
    return row | terms | dict(owner.restore(run_dir))


def _state_of(run_dir: RunDir, *, launched: bool, alive: bool) -> tuple[State, str]:
    """Derive the state of a job from its processes and its ranks' last events."""
    if alive:
        return State.RUNNING, "all ranks are up"
    if not launched:
        return State.QUEUED, _HELD
    end, newest = EventLog(run_dir.events).read_all().end_reason, run_dir.latest_checkpoint()
    where = f"step {newest[0]}" if newest else "no checkpoint"
    if end == "completed":
        return State.COMPLETED, f"trained {newest[0] if newest else 0} steps"
    if end == "stopped":
        return State.STOPPED, f"stopped; {where}"
    if run_dir.rank_errors():
        return State.FAILED, why_failed(run_dir, None)
    return State.LOST, f"how it ended was lost with the database; {where}"


def _terms(run_dir: RunDir) -> Row:
    """Return the columns that the queue uses; one CPU rank if the job file cannot be read."""
    try:
        spec = load_spec(run_dir.job_file)
    except UserError:
        return Terms(1, None, 0).columns()
    gpus: int | list[str] | None
    try:
        gpus = check_devices(spec) if spec.launcher == LOCAL else [spec.launcher]
    except UserError:  # a GPU that is currently missing
        gpus = world_size(spec)
    return Terms.of(spec, gpus).columns()


def _supervisor_of(job_id: int, run_dir: RunDir) -> ProcessId | None:
    """Return the live supervisor of a job, whose working directory is the run directory."""
    for name in os.listdir("/proc"):
        with suppress(OSError):
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
            ours = bool(_SUPERVISORS & {*words}) and str(job_id).encode() in words
            if ours and os.path.samefile(f"/proc/{name}/cwd", run_dir.root):
                return ProcessId.of(int(name))
    return None


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _write(path: Path, rows: dict[str, list[Row]], restored: list[Row]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        choose_journal(db, path.parent)
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} COMMIT;")
        db.execute("BEGIN IMMEDIATE")
        jobs = [*rows["jobs"], *restored]
        for row in jobs:
            _insert(db, "jobs", row)
        for row in restored:
            reason = f"restored: {row['reason']}"
            change = {"job": row["id"], "t": time.time(), "after": row["state"], "reason": reason}
            _insert(db, "history", change)
            if row["state"] == State.RUNNING:
                for device in json.loads(row["gpus"]):
                    _insert(db, "claims", {"device": device, "job": row["id"]})
        ids = {row["id"] for row in jobs}
        for table in ("history", "claims", "stages"):
            for row in rows[table]:
                if row.get("job") in ids:
                    _insert(db, table, row)
        for row in jobs:
            if sweep := sweep_in(RunDir(Path(row["run_dir"]))):
                _insert(db, "sweeps", {"job": row["id"], "name": sweep})
        for row in rows["settings"]:
            _insert(db, "settings", row)
        db.execute("COMMIT")
        db.execute(f"PRAGMA user_version={VERSION}")


def _insert(db: sqlite3.Connection, table: str, row: Row) -> None:
    with suppress(sqlite3.IntegrityError):  # a row of a damaged page
        insert(db, table, row)
