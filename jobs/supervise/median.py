"""Stop a job of a sweep that does worse than most: the median rule, on the files of the sweep.

A job reports whenever it measures what its checkpoints are judged by, or every N steps if it
measures nothing. At each report its best value so far is compared with the median of what the other
jobs had at the same step, as Optuna's `MedianPruner` does; a study of that library would need its
own storage beside the queue. Jobs of a sweep know each other by the `sweep` of their job files, so
that this needs no database and works wherever a supervisor runs.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from jobs.run.eventlog import STEP_LINE, EventLog
from jobs.run.judging import LOSS, TITLES
from jobs.run.rundir import RunDir, read_json, write_atomic
from jobs.spec.families import compares_losses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from jobs.run.events import Step
    from jobs.supervise.port import Attempt

LEAST_OTHERS: Final = 2  # that have come as far, before any job is stopped
_EVERY: Final = 2.0  # seconds between looks
_SMOOTHED: Final = 50  # steps that a training loss is a mean of
_PIECE: Final = 1 << 20  # bytes of events
_MARK: Final = "worse_than_median.json"  # in the run directory of a job that was stopped

Values = list[tuple[int, float]]


def sweep_in(run_dir: RunDir) -> str:
    """Return the sweep that a job file names; "" for none, or where it cannot be read."""
    try:
        return run_dir.job_value("sweep")
    except (OSError, ValueError):
        return ""


def mark_of(run_dir: RunDir) -> Path:
    """Return the path of the note that a job was stopped by the rule; a new try begins without."""
    return run_dir.root / _MARK


def worse_than(own: Sequence[float], others: Iterable[float]) -> float | None:
    """Return the median of the others if the best own value is worse; else None. Pure.

    Args:
        own: What the job has reported so far, of which lower is better; at least one value.
        others: What other jobs reported at this step.
    """
    reported = [value for value in others if math.isfinite(value)]
    if len(reported) < LEAST_OTHERS:
        return None
    middle = median(reported)
    finite = [value for value in own if math.isfinite(value)]
    return middle if not finite or min(finite) > middle else None


class Reports:
    """What one job reports, by step, as its events grow.

    Args:
        run_dir: The job's.
        every: Steps between two means of its training loss; 0: what checkpoints are judged by.
        by: What that is. Reported is its cost, of which less is better.
    """

    def __init__(self, run_dir: RunDir, every: int, by: str = LOSS) -> None:
        self._log = EventLog(run_dir.events, passed_over=None if every else STEP_LINE)
        self._every = every
        self._by = by
        self._means: Values = []

    def read(self) -> Values:
        """Read on; return all reports so far, by step."""
        if not self._every:
            measured = self._log.read_all().measured(self._by)
            return [(step, measured.cost(value)) for step, value in measured.values]
        before = list(self._log.steps)
        while self._log.poll(_PIECE):
            steps = self._log.steps
            kept = next(
                (n for n, (old, new) in enumerate(zip(before, steps, strict=False)) if old != new),
                min(len(before), len(steps)),
            )
            for place in range(kept, len(steps)):
                self._take(steps[max(0, place + 1 - _SMOOTHED) : place + 1])
            del steps[:-_SMOOTHED]  # a run of weeks would fill the memory
            before = list(steps)
        return self._means

    def _take(self, window: Sequence[Step]) -> None:
        step = window[-1].step
        if step % self._every == 0:
            while self._means and self._means[-1][0] >= step:  # trained again
                self._means.pop()
            self._means.append((step, fmean(each.loss for each in window)))


@dataclass
class MedianRule:
    """Watches one attempt of a job of a sweep.

    Attributes:
        run_dir: The job's.
        sweep: Its sweep.
        flavour: What it trains; jobs for other noise levels are not compared with it.
        after: Steps before which nothing is judged.
        attempt: Where in the events it begins; tells one attempt from another.
        every: As of `Reports`.
        by: As of `Reports`.
        decided: Why the job is to be stopped; "" if it is not.
    """

    run_dir: RunDir
    sweep: str
    flavour: str
    after: int
    attempt: int
    every: int
    by: str = LOSS
    decided: str = ""
    _judged: int = 0
    _looked: float = -math.inf
    _reports: dict[Path, Reports] = field(default_factory=dict)
    _compared: dict[Path, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, run_dir: RunDir, attempt: Attempt) -> MedianRule | None:
        """Return the rule of an attempt; None for a job that was stopped by it and is resumed."""
        spec, offset = attempt.spec, attempt.events_offset
        if spec.stop_worse_than_median_after is None or not spec.sweep:
            return None
        mark = read_json(mark_of(run_dir))
        if mark is not None and mark.get("attempt") != offset:
            return None
        after = spec.stop_worse_than_median_after
        by = spec.checkpoints_best_by
        every = 0 if spec.validation_fraction or by != LOSS else after
        decided = str(mark["reason"]) if mark is not None else ""
        flavour = spec.model_flavour or ""
        return cls(run_dir, spec.sweep, flavour, after, offset, every, by, decided)

    def look(self) -> str:
        """Judge what was reported since the last look; return why the job is to be stopped, or "".

        Raises:
            OSError: The decision cannot be written down; it is made again at the next look.
        """
        if self.decided or time.monotonic() - self._looked < _EVERY:
            return self.decided
        self._looked = time.monotonic()
        own = self._of(self.run_dir)
        for number, (step, _) in enumerate(own):
            if step >= self.after and step > self._judged and not self.decided:
                self._judge(step, [value for _, value in own[: number + 1]])
        return self.decided

    def _judge(self, step: int, own: Sequence[float]) -> None:
        others = self._others(step)
        middle = worse_than(own, others)
        if middle is not None:
            best = min(filter(math.isfinite, own), default=math.nan)
            what = "training loss" if self.every else TITLES[self.by]
            sign, side = (1, "above") if self.by == LOSS else (-1, "below")
            reason = (
                f"best {what} {sign * best:.4g} is {side} the median {sign * middle:.4g} of "
                f"{len(others)} others at step {step}"
            )
            facts = {"reason": reason, "attempt": self.attempt, "step": step}
            write_atomic(mark_of(self.run_dir), json.dumps(facts) + "\n", durable=True)
            self.decided = reason
        self._judged = step

    def _others(self, step: int) -> list[float]:
        """Return what the other jobs had at a step that they have reached.

        Those that the rule stopped do not count: with them, what is worse than most would change.
        """
        values = []
        for root in sorted(self.run_dir.root.parent.iterdir()):
            if root not in self._compared:
                self._compared[root] = self._compares(RunDir(root))
            if not self._compared[root]:
                continue
            if mark_of(RunDir(root)).exists():
                continue
            reports = self._of(RunDir(root))
            place = bisect_right(reports, step, key=lambda report: report[0]) - 1
            if place >= 0 and reports[-1][0] >= step:
                values.append(reports[place][1])
        return values

    def _compares(self, run_dir: RunDir) -> bool:
        if run_dir.root == self.run_dir.root or sweep_in(run_dir) != self.sweep:
            return False
        return compares_losses({run_dir.job_value("model_flavour"), self.flavour})

    def _of(self, run_dir: RunDir) -> Values:
        reports = self._reports.setdefault(run_dir.root, Reports(run_dir, self.every, self.by))
        return reports.read()
