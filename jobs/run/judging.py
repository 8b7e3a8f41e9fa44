"""What tells a good checkpoint from a bad one: its validation loss, or a score of its samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Score = Literal["clip_t", "clip_i", "dino_i"]
Criterion = Literal["validation_loss", "clip_t", "clip_i", "dino_i"]
LOSS: Final = "validation_loss"
TITLES: Final[Mapping[str, str]] = {
    LOSS: "validation loss",
    "clip_t": "CLIP-T",
    "clip_i": "CLIP-I",
    "dino_i": "DINO-I",
}
"""Criterion → its name in words. Of the loss the lowest is the best, of a score the highest."""


@dataclass(frozen=True)
class Measurements:
    """What a run has measured of its criterion.

    Attributes:
        values: Step and value, by step.
        by: The criterion.
    """

    values: Sequence[tuple[int, float]] = ()
    by: str = LOSS

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def title(self) -> str:
        """Return the criterion in words."""
        return TITLES.get(self.by, self.by)

    @property
    def column(self) -> str:
        """Return the criterion as the heading of a column."""
        return "val" if self.by == LOSS else self.title

    @property
    def extreme(self) -> str:
        """Return which of its values is the best: `lowest` or `highest`."""
        return "lowest" if self.by == LOSS else "highest"

    def cost(self, value: float) -> float:
        """Return a value's cost: the lower, the better."""
        return value if self.by == LOSS else -value

    def best(self) -> tuple[int, float] | None:
        """Return step and value of the best one, the earliest of equals; None without any."""
        finite = ((self.cost(value), step, value) for step, value in self.values)
        best = min((each for each in finite if math.isfinite(each[0])), default=None)
        return best and (best[1], best[2])

    def lowest_cost(self) -> float:
        """Return the cost of the best one; infinite if nothing was measured."""
        best = self.best()
        return self.cost(best[1]) if best else math.inf

    def only_best(self) -> Measurements:
        """Return the best measurement alone, which is all that jobs are compared by."""
        best = self.best()
        return Measurements((best,) if best else (), self.by)


UNMEASURED: Final = Measurements()


class Judged(NamedTuple):
    """A checkpoint and the newest value measured at its step or before.

    Attributes:
        cost: The value, negated if more is better.
        apart: Steps from that measurement to the checkpoint.
        step: Of the checkpoint.
        by: The criterion.
    """

    cost: float
    apart: int
    step: int
    by: str = LOSS

    def __str__(self) -> str:
        """Return the step, its value, and where that was measured."""
        at = f", measured at step {self.measured}" if self.apart else ""
        return f"step {self.step}: {TITLES.get(self.by, self.by)} {self.value:.5g}{at}"

    @property
    def value(self) -> float:
        """Return the measured value."""
        return self.cost if self.by == LOSS else -self.cost

    @property
    def measured(self) -> int:
        """Return the step at which its value was measured."""
        return self.step - self.apart

    def to_dict(self) -> dict[str, Any]:
        """For scripts; the loss has its own names, as it had before there were scores."""
        names = ("loss", "loss_step") if self.by == LOSS else ("score", "score_step")
        facts = {"step": self.step, names[0]: self.value, names[1]: self.measured}
        return facts if self.by == LOSS else facts | {"by": self.by}


def judge(steps: Iterable[int], measured: Measurements) -> list[Judged]:
    """Order checkpoints by what was measured, the best one first. Pure.

    Of equal ones the one nearest to the measurement comes first, which is the one that was
    measured. Those saved before the first measurement, and those whose value is not finite, are
    skipped.

    Args:
        steps: Of the checkpoints.
        measured: The run's measurements.
    """
    judged = []
    for step in steps:
        at = bisect_right(measured.values, step, key=lambda each: each[0]) - 1
        if at >= 0 and math.isfinite(measured.values[at][1]):
            there, value = measured.values[at]
            judged.append(Judged(measured.cost(value), step - there, step, measured.by))
    return sorted(judged)


def winner(jobs: Mapping[int, Measurements]) -> int | None:
    """Return the best job by what its checkpoints are judged by; None if nothing was measured.

    Jobs that are judged by something else than the first one are skipped.
    """
    best = {job: (measured, low) for job, measured in jobs.items() if (low := measured.best())}
    by = next((measured.by for measured, _ in best.values()), LOSS)
    alike = [(m.cost(low[1]), job) for job, (m, low) in best.items() if m.by == by]
    return min(alike)[1] if alike else None
