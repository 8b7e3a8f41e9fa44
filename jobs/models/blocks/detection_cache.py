"""What was found out about models' blocks: one small file that many processes share."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from jobs.machine import file_lock
from jobs.paths import cache_home
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA: Final = 1  # of an entry; others are forgotten

_MOST: Final = 200  # entries of some 10 KB; the oldest go
_PATIENCE: Final = 10.0  # seconds to wait for another writer, which takes milliseconds


def cache_file() -> Path:
    return cache_home() / "blocks.json"


def lock_file() -> Path:
    return cache_home() / "blocks.json.lock"


def recall(key: str) -> dict[str, Any] | None:
    """Read what is cached under a key, or None; a damaged file counts as empty."""
    entry = _entries().get(key)
    value = entry.get("found") if isinstance(entry, dict) else None
    return value if isinstance(value, dict) else None


def remember(key: str, answer: dict[str, Any]) -> None:
    """Keep JSON values under a key. That there is no room for them is no failure: it is a cache."""
    with suppress(OSError):
        cache_home().mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone():
            entries = _entries()
            entries.pop(key, None)
            entries[key] = {"t": round(time.time()), "found": answer}
            kept = dict(list(entries.items())[-_MOST:])
            write_atomic(cache_file(), json.dumps({"schema": SCHEMA, "entries": kept}))


def _entries() -> dict[str, Any]:
    """All of them, the oldest first."""
    data = read_json(cache_file()) or {}
    entries = data.get("entries")
    return entries if data.get("schema") == SCHEMA and isinstance(entries, dict) else {}


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock. Continue without it after a long wait: at worst another entry is lost.

    The holder may have been stopped, and some file systems have no locks.
    """
    with open(lock_file(), "w") as lock:
        with suppress(OSError):
            file_lock.take(lock, _PATIENCE)
        yield
