"""How long a run still takes, from its own events and its keys."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import yaml

from jobs.run.eventlog import read_phases
from jobs.run.rundir import read_json
from jobs.spec.rules.steps import AFTER, Rhythm
from jobs.untrusted.files import LARGEST_TEXT, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.run.eventlog import EventLog, Phase
    from jobs.run.rundir import RunDir

TRAIN: Final = "train"
"""What steps themselves are called among the parts of a time."""
_BEHIND: Final = "copy"  # the part of a save that training waits for, where it is written behind it
_SMALL: Final = ("save", "export")  # of a LoRA, these take no time to speak of
_KEPT: Final = 64  # event streams whose phases are remembered
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Costs:
    """How long a run takes for what it does again and again, in seconds.

    Attributes:
        step: From a step to the next.
        phases: Each of what follows steps (`jobs.spec.rules.steps.AFTER`), as far as it is known.
        last_save: A save that is waited for; None if there was none.
        start: From the launch of the ranks to the first step, without what caches save the next
            run.
    """

    step: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    last_save: float | None = None
    start: float = 0.0

    @classmethod
    def of(cls, log: EventLog, earlier: EventLog | None = None) -> Costs:
        """Return the costs of a run.

        Args:
            log: Its events, of which there may be only the newest.
            earlier: Its phases, from `read_phases`.
        """

        def usual(phase: str) -> float | None:
            seconds = log.usual_seconds(phase)
            return earlier.usual_seconds(phase) if seconds is None and earlier else seconds

        phases = {what: usual(what) for what in AFTER}
        last_save = usual("checkpoint") or phases["save"]
        if (copying := usual(_BEHIND)) is not None:
            phases["save"] = copying
        if phases["export"] is None:
            phases["export"] = last_save  # about as much is written
        usual_phases = {what: seconds for what, seconds in phases.items() if seconds is not None}
        return cls(log.step_to_step(), usual_phases, last_save)

    def lacks(self, rhythm: Rhythm) -> bool:
        """Whether it is not known how long something takes that a job does."""
        return any(what not in self.phases for what in rhythm.every)


@dataclass(frozen=True)
class Left:
    """What is left of a run.

    Attributes:
        parts: Seconds by what takes them: `train` for steps, or what follows steps.
        unknown: What is still to come, of which nobody knows how long it takes.
    """

    parts: Mapping[str, float]
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the sum; at least, if something is unknown."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Counted:
    """What rank 0 has counted in a job's data; None until then.

    Attributes:
        total_steps: Of the job.
        steps_per_epoch: Rarely a whole number.
    """

    total_steps: int | None = None
    steps_per_epoch: float | None = None

    @classmethod
    def read(cls, run_dir: RunDir) -> Counted:
        """Read the status of rank 0."""
        status = read_json(run_dir.rank_file(0)) or {}
        total, epoch = status.get("total_steps"), status.get("steps_per_epoch")
        return cls(
            total if isinstance(total, int) and total > 0 else None,
            epoch if isinstance(epoch, float | int) and 0 < epoch < inf else None,
        )


@dataclass(frozen=True, eq=False)
class Habits:
    """What a job file says about when a job does what; the same object while it says the same.

    Attributes:
        rhythm: What follows which steps.
        small: Whether saves and exports are small, as those of a LoRA.
        values: All keys.
    """

    rhythm: Rhythm
    small: bool
    values: Mapping[str, Any]

    def counted(self, ranks: Counted) -> Habits:
        """Return the same with epochs in steps, as far as its ranks have counted them."""
        if not self.rhythm.epochs:
            return self
        return replace(self, rhythm=self.rhythm.counted(ranks.steps_per_epoch))

    @property
    def epochs(self) -> object:
        """What the length of a job follows from that is not given in steps."""
        keys = ("num_train_epochs", "global_batch_size", "train_batch_size")
        return [self.values.get(key) for key in keys]


def habits_of(run_dir: RunDir) -> Habits | None:
    """Read when a job does what; None if its file cannot be read."""
    try:
        stat = run_dir.job_file.stat()
        return _habits(run_dir.job_file, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _habits(path: Path, changed: int, size: int) -> Habits | None:
    """Read the keys as they stand there: they were checked when they were written.

    Checking them again would take ten times longer, and there may be a long queue.
    """
    try:
        values = yaml.load(read_regular(path, LARGEST_TEXT), _LOADER)
        keys = SimpleNamespace(**(_defaults() | values))
        rhythm = Rhythm.of(keys)
        if not all(isinstance(every, int) and every >= 0 for every in rhythm.every.values()):
            return None
        return Habits(rhythm, keys.model_type == "lora", values)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return None


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    # Imported here: a supervisor reads the job of its own, and has no use for it else.
    from jobs.spec.job_spec import JobSpec

    return {name: field.default for name, field in JobSpec.model_fields.items()}


def time_left(
    log: EventLog, habits: Habits | None, costs: Costs, steps: int, now: float
) -> Left | None:
    """Return what is left of a run; None before its first step.

    Args:
        log: Its events, at least those since its newest step.
        habits: When it does what; None counts nothing but steps.
        costs: What it has taken for them.
        steps: How many it trains.
        now: Unix seconds.
    """
    if log.last is None or costs.step is None:
        return None
    done = log.last.step
    parts = {TRAIN: costs.step * max(0, steps - done)}
    unknown: list[str] = []
    if habits is None:
        return Left(parts)
    phases = dict(costs.phases)
    current, rest = _current(log.phase, now)
    if current is not None and rest is not None and log.phase is not None and log.phase.since:
        # The first of its kind says for the next ones how long they take.
        phases.setdefault(current, max(0.0, now - log.phase.since) + rest)
    unknown.extend(habits.rhythm.epochs if done < steps else ())
    last = {"save": costs.last_save if costs.last_save is not None else phases.get("save")}
    for what, count in habits.rhythm.count(done, steps).items():
        _add(parts, unknown, what, phases.get(what), count - 1, habits)
        _add(parts, unknown, what, last.get(what, phases.get(what)), 1, habits)
    for what in _still_after(log.phase, habits.rhythm.after(done, steps)):
        seconds = phases.get(what) if done < steps else last.get(what, phases.get(what))
        if what == current and log.phase is not None:
            if rest is None and seconds is not None:
                rest = max(0.0, seconds - max(0.0, now - (log.phase.since or now)))
            seconds = rest
        _add(parts, unknown, what, seconds, 1, habits)
    return Left(parts, tuple(dict.fromkeys(unknown)))


def whole_time(habits: Habits, costs: Costs, steps: int, done: int = 0) -> Left | None:
    """Return what a job takes from its launch, after `done` steps; None if that is not known."""
    if costs.step is None:
        return None
    parts = {TRAIN: costs.step * max(0, steps - done) + costs.start}
    unknown = list(habits.rhythm.epochs)
    for what, count in habits.rhythm.count(done, steps).items():
        count += done == 0 and what in habits.rhythm.after(0, steps)
        seconds = costs.phases.get(what)
        _add(parts, unknown, what, seconds, count - 1, habits)
        last = costs.last_save if what == "save" and costs.last_save is not None else seconds
        _add(parts, unknown, what, last, 1, habits)
    return Left(parts, tuple(dict.fromkeys(unknown)))


def _add(
    parts: dict[str, float],
    unknown: list[str],
    what: str,
    seconds: float | None,
    count: int,
    habits: Habits,
) -> None:
    if seconds is not None and count:
        parts[what] = parts.get(what, 0.0) + count * seconds
    elif count and not (habits.small and what in _SMALL):
        unknown.append(what)


def _current(phase: Phase | None, now: float) -> tuple[str | None, float | None]:
    """Return what runs now, and its own word on how long it still takes."""
    if phase is None or phase.finished:
        return None, None
    left = phase.seconds_left
    rest = None if left is None else max(0.0, left - max(0.0, now - phase.t))
    return _name(phase), rest


def _name(phase: Phase) -> str:
    return "save" if phase.name == _BEHIND else phase.name


def _still_after(phase: Phase | None, due: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is not over yet of what follows the present step."""
    if phase is None:
        return due  # the step has just ended
    if phase.name == TRAIN and phase.finished:
        return due[-1:]  # the export
    if _name(phase) not in due:
        return ()  # something else, which comes after
    return due[due.index(_name(phase)) + phase.finished :]


# -- phases of long ago ---------------------------------------------------------------------


_phases: OrderedDict[Path, EventLog] = OrderedDict()


def phases_of(run_dir: RunDir) -> EventLog:
    """Return a run's phases; of a run that was asked for before, only what is new is read."""
    log = _phases.pop(run_dir.events, None)
    log = _phases[run_dir.events] = read_phases(run_dir.events, log)
    if len(_phases) > _KEPT:
        _phases.popitem(last=False)
    return log
