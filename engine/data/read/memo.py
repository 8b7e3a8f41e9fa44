"""Facts about files, kept from one run to the next.

Decoding and hashing a dataset takes minutes where asking for sizes and times takes a second. As
`git` does with its index, what was seen of a file that changed only just now is not kept: a second
change within the clock's resolution would go unseen.
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
_SETTLED: Final = 2.0  # seconds; a file that changed less than this ago may change again unseen


class Memo:
    """Facts about the files of a folder.

    Args:
        directory: Where memos are kept.
        root: The folder, of which there is one memo.
        version: Of the facts' meaning; facts of another version are forgotten.
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
        """Return the facts about a file, or None when it is new or has changed."""
        entry = self._kept.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] != stamp:
            return None
        self._now[name] = entry
        return entry[1]

    def put(self, name: str, stamp: str, facts: Any) -> None:
        """Keep the facts, which must be JSON values; an empty stamp is not kept."""
        if stamp:
            self._now[name] = [stamp, facts]

    def save_sometimes(self) -> None:
        """Write the facts so far unless that was done recently, in case of an interruption."""
        if time.monotonic() - self._saved >= _SAVE_EVERY:
            # Entries not read yet are still valid; a copy, since other threads may add entries.
            self._write(self._kept | self._now.copy())

    def save(self) -> None:
        """Write the facts that were read or added; files that are gone are forgotten."""
        if self._now != self._kept:
            self._write(self._now)

    def _write(self, files: dict[str, Any]) -> None:
        self._saved = time.monotonic()
        with suppress(OSError):  # a full disk: the next look takes longer, and that is all
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps({"version": self._version, "files": files}))


def stamp_of(path: Path) -> str:
    """Return a stamp that changes with the file; empty while the file is too new to be trusted.

    Raises:
        OSError: There is no such file.
    """
    status = os.stat(path)
    if time.time() - max(status.st_mtime, status.st_ctime) < _SETTLED:
        return ""
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
