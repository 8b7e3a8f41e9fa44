"""State and temporary memory of each optimizer, from the shapes of what a rank trains.

Formulas, since running one on the shards of a new number of ranks would take longer than a person
waits for. `tests/engine/memory/test_memory.py` runs the real ones beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from engine.memory.tracing.live import BLOCK, rounded
from engine.train.gradients import BUCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.spec.keys.training import TrainingKeys

_QUANTISED_FROM: Final = 4096  # numbers; torchao keeps smaller tensors in fp32
_QUANTISED_BLOCK: Final = 256  # numbers that share a scale
_CODES: Final = 1024  # bytes of the table of an 8-bit state


@dataclass(frozen=True)
class Trained:
    """What a rank trains of a parameter; all in fp32.

    Attributes:
        numel: Numbers of it here.
        shape: Of the whole parameter.
    """

    numel: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of a tensor like it."""
        return rounded(4 * self.numel)


def state_bytes(spec: TrainingKeys, trained: Sequence[Trained]) -> int:
    """Bytes that the optimizer keeps once it has made a step."""
    return sum(_STATES[spec.optimizer](parameter) for parameter in trained)


def temporary_bytes(spec: TrainingKeys, trained: Sequence[Trained], *, on_cuda: bool) -> int:
    """Return the most that a step allocates on top."""
    sizes = [parameter.size for parameter in trained]
    if not sizes:
        return 0
    most = max(sizes)
    match spec.optimizer:
        case "sgd":
            # Foreach decays all weights at once.
            return 0 if not spec.weight_decay else sum(sizes) if on_cuda else most
        case "lion":
            return 2 * most
        case "adamw_schedule_free":
            # A bucket's denominators are there until the next one's are made.
            return min(sum(sizes), 2 * max(most, 4 * BUCKET))
        case "prodigy":
            return min(sum(sizes), max(most, 4 * BUCKET))
        case "adafactor":
            # The last parameter's update is there until the next one's is made.
            return max(max((a + 2 * b for a, b in pairwise(sizes)), default=0), 2 * most)
        case "came":
            # Likewise two of the last one's.
            return max(max((2 * a + 2 * b for a, b in pairwise(sizes)), default=0), 3 * most)
        case "adamw_8bit":
            return 0 if on_cuda else 6 * most  # compiled into one kernel, or step by step
    return 0  # fused AdamW needs nothing


def _adamw(parameter: Trained) -> int:
    return 2 * parameter.size + BLOCK  # fused, the number of steps is a tensor on the device


def _adafactor(parameter: Trained) -> int:
    return parameter.size if len(parameter.shape) < 2 else _rows_and_columns(parameter)


def _came(parameter: Trained) -> int:
    means = parameter.size if len(parameter.shape) < 2 else 2 * _rows_and_columns(parameter)
    return parameter.size + means + BLOCK  # and the length of the weight, a number


def _rows_and_columns(parameter: Trained) -> int:
    """Bytes of a mean for each row and each column."""
    rows, columns = parameter.numel // parameter.shape[-1], parameter.numel // parameter.shape[-2]
    return rounded(4 * rows) + rounded(4 * columns)


def _adamw_8bit(parameter: Trained) -> int:
    if parameter.numel < _QUANTISED_FROM or parameter.numel % _QUANTISED_BLOCK:
        return 2 * parameter.size
    scales = rounded(4 * (parameter.numel // _QUANTISED_BLOCK))
    return 2 * (rounded(parameter.numel) + scales + _CODES)


_STATES: Final[dict[str, Callable[[Trained], int]]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adamw_schedule_free": lambda parameter: 2 * parameter.size,
    "sgd": lambda parameter: 0,
    "lion": lambda parameter: parameter.size,
    "prodigy": lambda parameter: 4 * parameter.size,
    "adafactor": _adafactor,
    "came": _came,
}
