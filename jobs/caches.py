"""What is kept below the cache directory so that it need not be made again: sizes, and clearing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.store import Store


@dataclass(frozen=True)
class Cache:
    """One kind of cached things.

    Attributes:
        name: What it is called on the command line: detection, latents, text, tables.
        title: What is in it, in a few words.
        path: Its file or directory, which need not exist.
        bytes: Its size.
        files: How many files.
    """

    name: str
    title: str
    path: Path
    bytes: int
    files: int


@dataclass(frozen=True)
class Cleared:
    """What clearing freed."""

    names: tuple[str, ...]
    bytes: int
    files: int


def list_caches(store: Store) -> list[Cache]:
    """All caches, those of jobs with a `cache_dir` of their own too."""
    raise NotImplementedError


def clear(store: Store, names: list[str], *, force: bool = False) -> Cleared:
    """Delete what is in these caches.

    Raises:
        UserError: There is no such cache, or a job that has not ended may be using one.
    """
    raise NotImplementedError
