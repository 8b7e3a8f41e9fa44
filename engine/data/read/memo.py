"""Cache facts about files between runs.

Decoding and hashing a dataset takes minutes, while reading sizes and times takes a second. Like the
index of `git`, the memo does not keep facts about a file that changed a moment ago, since a second
change within the clock's resolution would go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

_SAVE_EVERY: Final = 30.0  # seconds
_SETTLED: Final = 2.0  # seconds; a file that changed more recently may change again unnoticed


class Memo:
    """Facts about the files of a folder.

    Args:
        directory: Where memos are stored.
        root: The folder; each folder has its own memo.
        version: Version of the facts' meaning; facts of another version are discarded.
    """

    def __init__(self, directory: Path, root: str, version: int) -> None:
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:24]
        self._path = directory / f"{name}.json"
        self._version = version
        kept = read_json(self._path) or {}
        valid = kept.get("version") == version and isinstance(kept.get("files"), dict)
        self._kept: dict[str, Any] = kept["files"] if valid else {}
        self._now: dict[str, Any] = {}
        self._saved = time.monotonic()

    def get(self, name: str, stamp: str) -> Any:
        """Return the facts about a file, or None if it is new or has changed."""
        entry = self._kept.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != stamp:
            return None
        self._now[name] = entry
        return entry[1]

    def put(self, name: str, stamp: str, facts: Any) -> None:
        """Store the facts, which must be JSON values; nothing is stored for an empty stamp."""
        if stamp:
            self._now[name] = [stamp, facts]

    def save_sometimes(self) -> None:
        """Write the facts collected so far now and then, in case of interruption."""
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            # Entries not read yet are still valid. Copy the dict, since other threads may add
            # entries.
            self._write(self._kept | self._now.copy())

    def save(self) -> None:
        """Write the facts that were read or added, and drop those of deleted files."""
        if self._now != self._kept:
            self._write(self._now)

    def _write(self, files: dict[str, Any]) -> None:
        self._saved = time.monotonic()
        with suppress(OSError):  # if the disk is full, the next run just takes longer
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps({"version": self._version, "files": files}))


def stamp_of(path: Path) -> str:
    """Return a stamp that changes with the file; empty if the file is too new to be trusted.

    Raises:
        OSError: The file does not exist.
    """
    status = os.stat(path)
    if time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED:
        return ""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
