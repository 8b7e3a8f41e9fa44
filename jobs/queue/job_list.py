"""All jobs, for callers that poll: rows are read only when the database has changed."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store


class JobList:
    """Reads through its own connection, which stays open. Use it from one thread at a time.

    Reading the rows of 5,000 jobs every second would take 2 % of a core.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._version: int | None = None
        self._jobs: list[Job] = []
        self.paused = False  # the queue, at the last look

    def look(self) -> list[Job]:
        """Return every job, newest first; the same list object while nothing was written.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        version = self._read_version()
        if version is None or version != self._version:
            self._version = None
            self._jobs = self._store.all()  # what is written from here on makes another version
            self.paused = self._store.paused
            self._version = version
        return self._jobs

    def close(self) -> None:
        """Close the connection; the next `look` opens it again."""
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        self._db = self._file = self._version = None

    def _read_version(self) -> int | None:
        """Return SQLite's `data_version`, which changes when others write; None on errors."""
        try:
            stat = os.stat(self._store.path)
            if self._db is None or self._file != (stat.st_dev, stat.st_ino):
                self.close()
                uri = f"{self._store.path.absolute().as_uri()}?mode=ro"
                self._db = sqlite3.connect(uri, uri=True, check_same_thread=False)
                self._file = stat.st_dev, stat.st_ino
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            return int(version)
        except (OSError, sqlite3.Error):
            self.close()
            return None
