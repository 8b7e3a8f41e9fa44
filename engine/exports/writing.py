"""One export from its first tensor to its name: written aside, read back, renamed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from engine.exports.lora import LoraOutput
from engine.exports.model import ModelOutput
from engine.exports.single_file import SingleFileOutput
from jobs.errors import UserError
from jobs.run.export_places import FACTS_FILE, export_facts
from jobs.run.rundir import sync, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    import torch

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact


# -- place ----------------------------------------------------------------------------------
# An export is complete or absent: written aside, and renamed when it has been read back.


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


# -- writing --------------------------------------------------------------------------------


_SPARE_BYTES: Final = 16 * 2**20  # of headers, JSON and the file system's own
_HINT: Final = (
    "free some space; `fsdp-tui export ID` exports the newest checkpoint without training again"
)


@dataclass(frozen=True)
class Exported:
    """A complete export.

    Attributes:
        path: Its directory.
        warnings: What the person should know of it.
    """

    path: Path
    warnings: tuple[str, ...]


class Writing:
    """An export in the making; as a context manager, nothing is left of one that failed.

    Args:
        recipe: What is exported.
        facts: Name → dtype and shape of what will come.
        target: Where to; what is there stays until the new one is complete.
        progress: Called with how much is done, of `total`.

    Attributes:
        total: How much there is to do: tensors to take, and what is checked at the end.

    Raises:
        UserError: It cannot be written, or what was trained does not fit.
    """

    def __init__(
        self,
        recipe: Recipe,
        facts: Mapping[str, Fact],
        target: Path,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._recipe = recipe
        self._target = target
        self._progress = progress
        self._done = 0
        with ExitStack() as opened, _in_words(target):
            self._aside = opened.enter_context(aside_of(target))
            self._output = _output_of(recipe)(recipe, facts, self._aside)
            opened.callback(self._output.abandon)
            self.total = len(facts) + self._output.pieces
            self._check_room(self._output.bytes)
            self._opened = opened.pop_all()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor.

        Raises:
            UserError: It cannot be written, or is not fit to be exported.
        """
        with _in_words(self._target):
            self._output.add(name, tensor)
        self._advance()

    def finish(self) -> Exported:
        """Complete it, prove it, and give it its name.

        Raises:
            UserError: It cannot be written.
            DamagedError: What was written is not what was trained.
        """
        recipe, spec = self._recipe, self._recipe.spec
        with _in_words(self._target):
            self._output.finish(self._advance)
            facts = {
                "schema": 1,
                "job": spec.name,
                "step": recipe.step,
                "ema": recipe.ema,
                "model_type": spec.model_type,
                "model_family": spec.model_family,
                "dtype": recipe.dtype,
                "single_file": recipe.single_file,
            }
            install(self._aside, self._target, facts)
        return Exported(self._target, tuple(self._output.warnings))

    def __enter__(self) -> Self:
        """Return the export itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave nothing open, and nothing aside."""
        self._opened.close()

    def _advance(self) -> None:
        self._done += 1
        self._progress(self._done, self.total)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._target.parent).free
        if needed + _SPARE_BYTES > free:
            raise UserError(
                f"the export to {self._target} takes {needed / 1e9:.2f} GB, and "
                f"{free / 1e9:.2f} GB are free",
                _HINT,
            )


def _output_of(recipe: Recipe) -> type[LoraOutput | ModelOutput | SingleFileOutput]:
    """Return what writes an export."""
    if recipe.single_file:
        return SingleFileOutput
    return LoraOutput if recipe.spec.model_type == "lora" else ModelOutput


@contextmanager
def _in_words(target: Path) -> Iterator[None]:
    """Within, what the system says of files becomes a sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"cannot write the export to {target} ({error.strerror or error})",
            _HINT if full else None,
        ) from error
