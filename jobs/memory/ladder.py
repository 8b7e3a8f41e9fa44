"""What to change when a job does not fit, the cheapest change first: the way up the ladder. Pure.

Each rung (`jobs.memory.rungs`) is tried on top of those below it. One that does not apply, cannot
run or does not help is skipped, and tried again after another one has helped. One that does more
than is needed gives way to a milder one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from jobs.memory.rungs import LADDER, LOOSER
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.no_effect import find_inapplicable
from jobs.spec.rules.strategy import checkpoints_activations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.memory.fit import Fit
    from jobs.memory.rungs import Changes, Rung
    from jobs.spec.job_spec import JobSpec

_HELPS: Final = 0.995  # of what was needed: a change that saves less is not worth its words


@dataclass(frozen=True)
class Step:
    """A rung that was taken.

    Attributes:
        rung: Which.
        changes: What it changed.
        before: What was needed before it.
        after: What is needed with it, and with all below it.
        spec: The job with all of them.
    """

    rung: Rung
    changes: Changes
    before: Fit
    after: Fit
    spec: JobSpec

    @property
    def cost(self) -> str:
        """How much slower or faster a step is, estimated, and what else it costs."""
        slower = self.rung.slower
        pace = ""
        if slower > 1.75:
            pace = f"an estimated {slower:.0f} times slower"
        elif slower > 1.0:
            pace = f"an estimated {slower - 1:.0%} slower".replace("%", " %")
        elif slower < 1.0:
            pace = "faster"
        return "; ".join(filter(None, [pace, self.rung.costs]))


def climb(
    spec: JobSpec, fit: Callable[[JobSpec], Fit | None], *, enough: Callable[[Fit], bool]
) -> Iterator[Step]:
    """Yield the steps from a job that does not fit to one that does, or to the end of the ladder.

    Args:
        spec: The job, its strategy and ranks settled.
        fit: How a job fits; None where that is unknown.
        enough: Whether no more is needed.
    """
    now = fit(spec)
    while now is not None and not enough(now):
        step = _next(spec, now, fit)
        if step is None:
            return
        if step.rung.milder and enough(step.after):
            tried = (_take(rung, spec, now, fit) for rung in step.rung.milder)
            step = next((step for step in tried if step is not None and enough(step.after)), step)
        yield step
        spec, now = step.spec, step.after


def loosen(
    spec: JobSpec, fit: Callable[[JobSpec], Fit | None], *, enough: Callable[[Fit], bool]
) -> Step | None:
    """Make a fitting job faster so that it still fits, by recomputing fewer blocks, or none.

    Args:
        spec: As of `climb`.
        fit: As of `climb`.
        enough: As of `climb`.

    Returns:
        The fastest; None where the job does not fit, or recomputes no more than it must.
    """
    now = fit(spec) if checkpoints_activations(spec) else None
    if now is None or not enough(now):
        return None
    tried = (_take(rung, spec, now, fit) for rung in LOOSER)
    return next((step for step in tried if step is not None and enough(step.after)), None)


def _next(spec: JobSpec, now: Fit, fit: Callable[[JobSpec], Fit | None]) -> Step | None:
    tried = (_take(rung, spec, now, fit) for rung in LADDER)
    helps = (step for step in tried if step is not None and step.after.high < now.high * _HELPS)
    return next(helps, None)


def _take(rung: Rung, spec: JobSpec, now: Fit, fit: Callable[[JobSpec], Fit | None]) -> Step | None:
    """Return the step of a rung; None if it has no effect, or the job cannot run."""
    changes = rung.change(spec)
    changed = changes and _with(spec, changes)
    if not changes or not changed:
        return None
    after = fit(changed)
    new = {key: value for key, value in changes.items() if value != getattr(spec, key)}
    return None if after is None else Step(rung, new, now, after, changed)


def _with(spec: JobSpec, changes: Changes) -> JobSpec | None:
    """Return the job with changes; None if one of them has no effect, or the job cannot run."""
    try:
        changed = type(spec).model_validate(spec.to_dict() | changes)
    except ValidationError:
        return None
    before = {(conflict.key, conflict.message) for conflict in find_conflicts(spec)}
    if any((conflict.key, conflict.message) not in before for conflict in find_conflicts(changed)):
        return None
    idle = find_inapplicable(changed)
    means = [key for key in changes if changes[key] is not None and key not in idle]
    return changed if means else None
