"""The tables of the jobs database; `jobs.queue.store` reads and writes them."""

from __future__ import annotations

import fcntl
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

VERSION: Final = 2
# Seconds that a locked database is waited for: by who answers a person, and by who serves nobody.
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
"""


@contextmanager
def opened(path: Path, mode: str, patience: float) -> Iterator[sqlite3.Connection]:
    """A connection, closed in the end; a lock is waited for this many seconds."""
    # Never created here: an empty file in the place of a deleted one would have no tables.
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with closing(sqlite3.connect(uri, uri=True, timeout=patience, isolation_level=None)) as db:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA foreign_keys=ON")
        db.execute("PRAGMA synchronous=NORMAL")
        # The log is written from its beginning again each time, in space it has already.
        db.execute("PRAGMA wal_autocheckpoint=1")
        yield db


# Our statements are right, so that one in error means that its tables are missing.
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def create_tables(db: sqlite3.Connection, lock: Path) -> None:
    """Make an empty database one of jobs.

    Args:
        db: A connection, outside of any transaction.
        lock: A file beside it. One process creates at a time: of two that switch to WAL at once
            SQLite lets neither wait for the other, whatever the timeout, and one gets "database is
            locked".
    """
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} COMMIT;")
        db.execute(f"PRAGMA user_version={VERSION}")


def insert(db: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int:
    """Add a row; returns its number."""
    marks = ",".join("?" * len(row))
    words = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"
    return int(db.execute(words, [*row.values()]).lastrowid or 0)


def update(db: sqlite3.Connection, job_id: int, row: Mapping[str, object]) -> None:
    """Change columns of a job."""
    words = ", ".join(f"{column}=?" for column in row)
    db.execute(f"UPDATE jobs SET {words} WHERE id=?", [*row.values(), job_id])


def trouble(error: Exception, path: Path | None = None) -> str:
    """What SQLite complains of, as a sentence that says what to do."""
    database, details = f"the jobs database{f' {path}' if path else ''}", str(error)
    if is_locked(error):
        return f"{database} is locked by another process ({details}); try again in a moment"
    if _code(error) == sqlite3.SQLITE_FULL:
        return f"{database} cannot be written: the disk is full"
    if _code(error) in _DAMAGED:
        return f"{database} is damaged ({details}); `fsdp-tui doctor --repair` rebuilds it"
    return f"cannot use {database} ({details})"


def is_locked(error: Exception) -> bool:
    """Whether SQLite complains that another process has the database."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: Exception) -> int:
    """SQLite's primary result code; 0 of what is not SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0)
    return int(code) & 0xFF
