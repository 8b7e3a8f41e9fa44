"""An export is complete or absent: written aside, and renamed when it has been read back."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from jobs.run.export_places import FACTS_FILE, export_facts
from jobs.run.rundir import sync, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ASIDE: Final = ".tmp"
_OLD: Final = ".old"
_HERE: Final = -100  # AT_FDCWD of Linux: paths are as they are for any call
_EXCHANGE: Final = 2  # RENAME_EXCHANGE


@contextmanager
def aside_of(target: Path) -> Iterator[Path]:
    """Create an empty directory beside `target`, removed at the end unless it was renamed.

    Those of exports that were killed are removed; those of others that are being written now are
    known by their locks.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _tidy(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}{_ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    lock = os.open(aside, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def install(aside: Path, target: Path, facts: dict[str, Any]) -> None:
    """Give a complete export its name; what was there before goes only then.

    Args:
        aside: The export.
        target: Its place; what is there is an export, or empty.
        facts: What is written beside it, for whoever wants to know what it is.
    """
    files = {
        str(path.relative_to(aside)): path.stat().st_size
        for path in sorted(aside.rglob("*"))
        if path.is_file()
    }
    text = json.dumps(facts | {"files": files}, indent=1) + "\n"
    write_atomic(aside / FACTS_FILE, text, durable=True)
    for directory in [*(path for path in aside.rglob("*") if path.is_dir()), aside]:
        sync(directory)
    if target.exists():
        _keep_other_step(target, facts)
    if not (target.exists() and _exchange(aside, target)):
        _replace(aside, target)
    with suppress(OSError):  # it has its name, and nobody is to think that it has not
        sync(target.parent)


def _exchange(aside: Path, target: Path) -> bool:
    """Swap two directories at once; False where the file system cannot."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    made, there = os.fsencode(aside), os.fsencode(target)
    return libc.renameat2(_HERE, made, _HERE, there, _EXCHANGE) == 0


def _replace(aside: Path, target: Path) -> None:
    """Rename an export; what is there is out of the way for a moment, and `_tidy` puts it back."""
    old = _old_of(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
    try:
        os.replace(aside, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _keep_other_step(target: Path, facts: dict[str, Any]) -> None:
    """Move an export of another step out of the way, to a name that says which it is."""
    before = export_facts(target)
    if before is None or before.get("step") == facts["step"]:
        return
    kept = target.with_name(f"{target.name}-step-{before.get('step')}")
    if not kept.exists():
        os.replace(target, kept)


def _tidy(target: Path) -> None:
    """Undo what a killed export left: its directory, or the old one not yet replaced."""
    if _old_of(target).exists() and not target.exists():
        os.replace(_old_of(target), target)
    for aside in target.parent.glob(f".{target.name}.*{_ASIDE}"):
        with suppress(OSError):
            lock = os.open(aside, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(aside, ignore_errors=True)
            finally:
                os.close(lock)


def _old_of(target: Path) -> Path:
    return target.with_name(f".{target.name}{_OLD}")
