"""The tables of the jobs database; `jobs.queue.store` reads and writes them."""

from __future__ import annotations

import fcntl
import sqlite3
from contextlib import closing, contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.machine.file_lock import holders
from jobs.machine.procfs import is_suspended
from jobs.machine.residence import is_shared
from jobs.paths import state_home

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

VERSION: Final = 4
# Seconds to wait for a locked database: in processes that answer a user, and in services.
PERSON: Final = 4.0
SERVICE: Final = 30.0
TABLES: Final = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    ranks INTEGER NOT NULL,
    wanted TEXT NOT NULL,
    gpus TEXT NOT NULL DEFAULT '[]',
    total_steps INTEGER NOT NULL,
    run_dir TEXT NOT NULL,
    run_id TEXT NOT NULL,
    created REAL NOT NULL,
    queued REAL NOT NULL,
    started REAL,
    ended REAL,
    attempt INTEGER NOT NULL DEFAULT 0,
    stop_level INTEGER NOT NULL DEFAULT 0,
    priority INTEGER NOT NULL DEFAULT 0,
    held INTEGER NOT NULL DEFAULT 0,
    shares INTEGER NOT NULL DEFAULT 0,
    auto_resume INTEGER NOT NULL DEFAULT 0,
    supervisor_pid INTEGER,
    supervisor_started REAL,
    boot_id TEXT
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, queued);
CREATE TABLE IF NOT EXISTS history (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    t REAL NOT NULL,
    before TEXT,
    after TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS history_by_job ON history (job, t);
CREATE TABLE IF NOT EXISTS settings (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS claims (
    device TEXT PRIMARY KEY,
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE
);
CREATE TABLE IF NOT EXISTS summaries (
    job INTEGER PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    ended REAL,
    progress TEXT NOT NULL,
    report TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS sweeps (
    job INTEGER PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    name TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS stages (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    follows INTEGER NOT NULL,
    PRIMARY KEY (job, follows)
);
"""
ROWS: Final = """
SELECT jobs.*, (
    SELECT group_concat(follows || ':' || coalesce(earlier.state, ''))
    FROM stages LEFT JOIN jobs AS earlier ON earlier.id = follows WHERE stages.job = jobs.id
) AS follows FROM jobs
"""
"""Jobs as `jobs.queue.job.job_of_row` reads them: with those that must complete first."""
# Values of `held`. A job of a later stage counts as held for processes of version 3, which
# ignore stages: a supervisor that outlives an upgrade would start it when its own job fails.
NOT_HELD: Final = 0
HELD: Final = 1
HELD_BY_STAGE: Final = 2


@contextmanager
def opened(path: Path, mode: str, patience: float) -> Iterator[sqlite3.Connection]:
    """Open a connection, closed at the end; waits up to `patience` seconds for a lock."""
    # Never create the file: an empty file instead of a deleted database would have no tables.
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)) as db:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA foreign_keys=ON")
        db.execute("PRAGMA synchronous=NORMAL")
        # Checkpoint after every commit, so that the log is overwritten from its start and never
        # grows.
        db.execute("PRAGMA wal_autocheckpoint=1")
        yield db


# Our statements are valid SQL, so an SQL error means that tables are missing.
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def create_tables(db: sqlite3.Connection, lock: Path) -> None:
    """Create the tables in an empty database.

    Args:
        db: A connection, outside of any transaction.
        lock: A file next to the database. Only one process creates at a time: if two switch to WAL
            at once, SQLite ignores the timeout and one gets "database is locked".
    """
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        choose_journal(db, lock.parent)
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} COMMIT;")
        db.execute(f"PRAGMA user_version={VERSION}")


def choose_journal(db: sqlite3.Connection, folder: Path) -> None:
    """Use WAL, which allows concurrent readers and a writer, if only one machine has the file.

    WAL needs memory shared by all processes. Across machines there is none, and some mounts lack it
    even on one machine (`disk I/O error`); a rollback journal is used there.
    """
    wal = not is_shared(folder) and _can_share_memory(folder)
    db.execute(f"PRAGMA journal_mode={'WAL' if wal else 'TRUNCATE'}")


def _can_share_memory(folder: Path) -> bool:
    """Probe with a temporary database, because a database is unusable after this failure."""
    with TemporaryDirectory(prefix=".fsdp-tui-", dir=folder) as place:
        try:
            with closing(sqlite3.connect(f"{place}/probe.db", isolation_level=None)) as db:
                db.execute("PRAGMA synchronous=OFF")
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("CREATE TABLE probe (x)")
        except sqlite3.OperationalError as error:
            return _code(error) != sqlite3.SQLITE_IOERR
    return True


def leave_wal(db: sqlite3.Connection) -> None:
    """Switch a database to a rollback journal, even on a mount without shared memory.

    A process with exclusive access needs no shared memory.
    """
    db.execute("PRAGMA locking_mode=EXCLUSIVE")
    db.execute("PRAGMA journal_mode=TRUNCATE")
    db.execute("PRAGMA locking_mode=NORMAL")
    db.execute("PRAGMA user_version").fetchone()


def journal_of(path: Path) -> str:
    """Return the journal mode of a database file: `wal` or `rollback`.

    Reads the header without opening the file in SQLite.
    """
    with path.open("rb") as file:
        return "wal" if file.read(20)[18:] == b"\x02\x02" else "rollback"


def leave_wal_where_it_fails(path: Path, error: sqlite3.Error) -> bool:
    """Switch a database from another machine to a journal that its mount supports.

    Returns:
        Whether this was the cause of the error, and is fixed.
    """
    if _code(error) != sqlite3.SQLITE_IOERR or not path.exists() or journal_of(path) != "wal":
        return False
    with closing(sqlite3.connect(path, timeout=PERSON, isolation_level=None)) as db:
        leave_wal(db)
    return journal_of(path) != "wal"


def insert(db: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int:
    """Add a row; return its id."""
    marks = ",".join("?" * len(row))
    words = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"
    return int(db.execute(words, [*row.values()]).lastrowid or 0)


def update(db: sqlite3.Connection, job_id: int, row: Mapping[str, object]) -> None:
    """Update columns of a job."""
    words = ", ".join(f"{column}=?" for column in row)
    db.execute(f"UPDATE jobs SET {words} WHERE id=?", [*row.values(), job_id])


def trouble(error: Exception, path: Path | None = None) -> UserError:
    """Convert an SQLite error to one that tells the user what to do.

    Args:
        error: The error from SQLite or the file system.
        path: The database to name; None for the state directory's.
    """
    database, details = f"the jobs database{f' {path}' if path else ''}", str(error)
    if is_locked(error):
        pid = _suspended_holder(path or state_home() / "jobs.db")
        if pid:
            return UserError(
                f"{database} is locked by process {pid}, which is suspended",
                f"`kill -CONT {pid}` resumes it",
            )
        return UserError(
            f"{database} is locked by another process ({details})", "try again in a moment"
        )
    if _code(error) == sqlite3.SQLITE_FULL:
        return UserError(f"{database} cannot be written: the disk is full")
    if _code(error) in _DAMAGED:
        return UserError(
            f"{database} is damaged ({details})", "`fsdp-tui doctor --repair` rebuilds it"
        )
    return UserError(f"cannot use {database} ({details})")


def _suspended_holder(path: Path) -> int | None:
    """Return a suspended process that blocks transactions; it keeps its locks until it resumes.

    In WAL mode a writer locks the shared memory, and the last process to close the database locks
    its file; readers block nobody. With a rollback journal, readers also keep a writer from
    committing.
    """
    # Do not open the database here: closing it again would drop all of this process's locks.
    memory = path.with_name(f"{path.name}-shm")
    pids = [*holders(memory), *holders(path, shared=not memory.exists())]
    return next(filter(is_suspended, pids), None)


def is_locked(error: Exception) -> bool:
    """Return whether an error means that another process has locked the database.

    SQLite reports "locking protocol" if another process delays the start of a transaction for long.
    """
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _code(error: Exception) -> int:
    """Return SQLite's primary result code; 0 for other errors."""
    code = getattr(error, "sqlite_errorcode", 0)
    return int(code) & 0xFF
