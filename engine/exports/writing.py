"""One export from its first tensor to its name: written aside, read back, renamed."""

from __future__ import annotations

import errno
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from engine.exports.lora import LoraOutput
from engine.exports.model import ModelOutput
from engine.exports.place import aside_of, install
from engine.exports.single_file import SingleFileOutput
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    import torch

    from engine.exports.recipe import Recipe
    from engine.exports.source import Fact

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
