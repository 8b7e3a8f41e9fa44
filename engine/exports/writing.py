"""Write one export: to a temporary directory, read back, then renamed into place."""

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

    import torch

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact


# -- place ----------------------------------------------------------------------------------
# An export is either complete or absent: it is written to a temporary directory, and renamed once
# it has been read back.


_ASIDE: Final = ".tmp"
_OLD: Final = ".old"
_HERE: Final = -100  # AT_FDCWD on Linux: resolve paths as usual
_EXCHANGE: Final = 2  # RENAME_EXCHANGE


@contextmanager
def aside_of(target: Path) -> Iterator[Path]:
    """Create an empty directory next to `target`, and remove it at the end unless it was renamed.

    Leftovers of killed exports are removed. A lock on each directory protects exports in progress.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _tidy(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}{_ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    lock = os.open(aside, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def install(aside: Path, target: Path, facts: dict[str, Any]) -> None:
    """Rename a complete export into place, replacing an older one only now.

    Args:
        aside: The export.
        target: Its destination: absent, empty, or an older export.
        facts: Written to a file in the export, to identify it.
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
    with suppress(OSError):  # the rename is done, so do not report a failure
        sync(target.parent)


def _exchange(aside: Path, target: Path) -> bool:
    """Swap two directories atomically; return False if the file system cannot."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    made, there = os.fsencode(aside), os.fsencode(target)
    return libc.renameat2(_HERE, made, _HERE, there, _EXCHANGE) == 0


def _replace(aside: Path, target: Path) -> None:
    """Rename an export. The old one is briefly moved aside; `_tidy` restores it after a crash."""
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
    """Rename an export of another step, so that its name includes the step."""
    before = export_facts(target)
    if before is None or before.get("step") == facts["step"]:
        return
    kept = target.with_name(f"{target.name}-step-{before.get('step')}")
    if not kept.exists():
        os.replace(target, kept)


def _tidy(target: Path) -> None:
    """Clean up after a killed export: remove its directory, or restore the old export."""
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


_SPARE_BYTES: Final = 16 * 2**20  # for headers, JSON and file system overhead
_HINT: Final = (
    "free some space; `fsdp-tui export ID` exports the newest checkpoint without training again"
)


@dataclass(frozen=True)
class Exported:
    """A complete export.

    Attributes:
        path: Its directory.
        warnings: Messages for the user about it.
    """

    path: Path
    warnings: tuple[str, ...]


class Writing:
    """An export in progress. As a context manager, it removes all files of a failed export.

    Args:
        recipe: Describes the export.
        facts: Dtype and shape of each tensor that will be added, by name.
        target: The destination, whose old content stays until the new export is complete.
        progress: Called with the amount done and `total`.
        other: The same for the model's other expert, if the export has both.

    Attributes:
        total: Amount of work: tensors to add, and pieces to check at the end.

    Raises:
        UserError: It cannot be written, or the trained weights do not fit the base model.
    """

    def __init__(
        self,
        recipe: Recipe,
        facts: Mapping[str, Fact],
        target: Path,
        progress: Callable[[int, int], None] = lambda done, total: None,
        other: tuple[Recipe, Mapping[str, Fact]] | None = None,
    ) -> None:
        self._recipe = recipe
        self._other = other[0] if other is not None else None
        self._target = target
        self._progress = progress
        self._done = 0
        self._outputs: list[LoraOutput | ModelOutput | SingleFileOutput] = []
        self.total = 0
        with ExitStack() as opened, _as_user_errors(target):
            self._aside = opened.enter_context(aside_of(target))
            for each, tensors in filter(None, [(recipe, facts), other]):
                output = _output_of(each)(each, tensors, self._aside)
                opened.callback(output.abandon)
                self._outputs.append(output)
                self.total += len(tensors) + output.pieces
            self._check_room(sum(output.bytes for output in self._outputs))
            self._opened = opened.pop_all()

    def add(self, name: str, tensor: torch.Tensor, *, of_other: bool = False) -> None:
        """Add one tensor, of the export's own expert or of the other one.

        Raises:
            UserError: It cannot be written or exported.
        """
        with _as_user_errors(self._target):
            self._outputs[of_other].add(name, tensor)
        self._advance()

    def finish(self) -> Exported:
        """Complete the export, verify it, and rename it into place.

        Raises:
            UserError: It cannot be written.
            DamagedError: The written files differ from the trained weights.
        """
        recipe, spec = self._recipe, self._recipe.spec
        with _as_user_errors(self._target):
            for output in self._outputs:  # the first one adds what none of them trains
                output.finish(self._advance)
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
            if (other := self._other) is not None:
                facts["other_expert"] = {"job": other.spec.name, "step": other.step}
            install(self._aside, self._target, facts)
        warnings = (warning for output in self._outputs for warning in output.warnings)
        return Exported(self._target, tuple(dict.fromkeys(warnings)))

    def __enter__(self) -> Self:
        """Return the export itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all files and remove the temporary directory."""
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
    """Return the class that writes an export."""
    if recipe.single_file:
        return SingleFileOutput
    return LoraOutput if recipe.spec.model_type == "lora" else ModelOutput


@contextmanager
def _as_user_errors(target: Path) -> Iterator[None]:
    """Turn an `OSError` into a `UserError` about the export."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"cannot write the export to {target} ({error.strerror or error})",
            _HINT if full else None,
        ) from error
