"""What can be plotted of a run. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Final, get_args

from jobs.run.eventlog import EventLog
from jobs.run.judging import TITLES, Score
from tui.text.format import duration, number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from jobs.queue.store import Job
    from jobs.run.events import Step


@dataclass(frozen=True, eq=False)
class Run:
    """The measurements of a run so far; a new object when there are more."""

    job: int
    name: str
    root: Path
    steps: Sequence[Step]
    validations: Sequence[tuple[int, float]] = ()
    scores: Sequence[tuple[int, Mapping[str, float]]] = ()

    @property
    def begun(self) -> float:
        """Return when its first step ended, in Unix seconds."""
        return self.steps[0].t if self.steps else 0.0

    def between_steps(self, name: str) -> Sequence[tuple[int, float]]:
        """Return step and value of a measure that is not measured in steps."""
        if name == VALIDATION.name:
            return self.validations
        return [(step, scores[name]) for step, scores in self.scores if name in scores]

    def time_of(self, step: int) -> float:
        """Return the seconds from the first step to this one."""
        at = min(bisect_left(self.steps, step, key=lambda entry: entry.step), len(self.steps) - 1)
        return self.steps[at].t - self.begun if self.steps else 0.0


@dataclass(frozen=True)
class Measure:
    """A quantity measured at steps.

    Attributes:
        name: Its name in files and cache keys.
        title: Its displayed name.
        value: Its value at a step; None for quantities measured between steps.
        smooth: Whether an average is useful.
        text: Formats a value.
    """

    name: str
    title: str
    value: Callable[[Step], float | None] | None
    smooth: bool = True
    text: Callable[[float | None], str] = number


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} GiB"


MEASURES: Final = (
    Measure("loss", "loss", lambda step: step.loss),
    Measure("lr", "learning rate", lambda step: step.lr, smooth=False),
    Measure("grad_norm", "gradient norm", lambda step: step.grad_norm),
    Measure("seconds", "s/step", lambda step: step.seconds),
    Measure("images_per_second", "images/s", lambda step: step.images_per_second),
    Measure("validation", "validation loss", None, smooth=False),
    Measure(
        "memory",
        "memory",
        lambda step: step.peak_bytes / 2**30 if step.peak_bytes else None,
        smooth=False,
        text=_gib,
    ),
    Measure("base_loss", "loss to the base", lambda step: step.base_loss),
    *(Measure(name, TITLES[name], None, smooth=False) for name in get_args(Score)),
)
LOSS: Final = MEASURES[0]
VALIDATION: Final = MEASURES[5]
COMMON: Final = 7
"""How many measures have a tab even without values; few jobs have the others."""


@dataclass(frozen=True, eq=False)
class Series:
    """Values of one measure of one run: `xs` steps or seconds, ascending."""

    xs: Sequence[float]
    ys: Sequence[float]
    steps: Sequence[int]

    def at(self, x: float) -> int | None:
        """Return the index of the value nearest to a place on the axis."""
        return nearest(self.xs, x) if self.xs else None


def nearest(places: Sequence[float], x: float) -> int:
    """Return the index of the place nearest to `x`; `places` is ascending and not empty."""
    right = bisect_left(places, x)
    if right == len(places):
        return right - 1
    return right - 1 if right and x - places[right - 1] <= places[right] - x else right


def series_of(run: Run, measure: Measure, *, by_time: bool) -> Series:
    """Return the finite values of a measure.

    Args:
        run: The run.
        measure: The measure.
        by_time: Use seconds since the run's first step in place of steps.
    """
    if measure.value is None:
        measured = run.between_steps(measure.name)
        kept = [(step, value) for step, value in measured if math.isfinite(value)]
        steps, ys = [step for step, _ in kept], [value for _, value in kept]
        xs: Sequence[float] = [run.time_of(step) for step in steps] if by_time else steps
        return Series(_ascending(xs), ys, steps)
    kept_steps = [
        (step, value)
        for step in run.steps
        if (value := measure.value(step)) is not None and math.isfinite(value)
    ]
    steps, begun = [step.step for step, _ in kept_steps], run.begun
    xs = [step.t - begun for step, _ in kept_steps] if by_time else steps
    return Series(_ascending(xs), [value for _, value in kept_steps], steps)


def _ascending(xs: Sequence[float]) -> Sequence[float]:
    """Raise times after a clock that was set back, so that they never decrease."""
    highest = -math.inf
    mended = [highest := max(highest, x) for x in xs]
    return xs if mended == xs else mended


def place(x: float, *, by_time: bool) -> str:
    """Format a place on the axis."""
    return duration(x) if by_time else f"{round(x)}"


# -- reading --------------------------------------------------------------------------------
# Read events of runs as they arrive, in a thread. Independent of widgets.


_EVERY: Final = 2.0  # seconds; a plot is the most expensive thing on a screen
_PIECE: Final = 1 << 20  # bytes after which the screen's thread gets a turn


class Reading:
    """Follows the event logs of some jobs until closed.

    Args:
        resting: Whether nobody can see the curves; called in the thread.
    """

    def __init__(self, resting: Callable[[], bool] = lambda: False) -> None:
        self._resting = resting
        self._jobs: Sequence[Job] = ()
        self._logs: dict[int, EventLog] = {}
        self._closed = Event()
        self._wake = Event()

    def follow(self, jobs: Sequence[Job]) -> None:
        """Follow these jobs from now on."""
        self._jobs = tuple(jobs)
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake.set()

    def run(self, post: Callable[[list[Run]], None]) -> None:
        """Post the runs whenever they change, until closed."""
        posted: Sequence[Job] | None = None
        while not self._closed.is_set():
            jobs = self._jobs
            if not self._resting() and (self._read(jobs) or jobs != posted):
                posted = jobs
                if jobs:
                    post([self._run_of(job) for job in jobs])
            self._wake.wait(_EVERY)
            self._wake.clear()

    def _read(self, jobs: Sequence[Job]) -> bool:
        """Read new events; return whether there were any."""
        self._logs = {
            job.id: self._logs.get(job.id) or EventLog(job.run_dir.events) for job in jobs
        }
        changed = False
        for log in self._logs.values():
            while not self._closed.is_set() and log.poll(_PIECE):
                changed = True
        return changed

    def _run_of(self, job: Job) -> Run:
        log = self._logs[job.id]
        measured = tuple(log.validations), tuple(log.scores)
        return Run(job.id, job.name, job.run_dir.root, tuple(log.steps), *measured)
