"""The state that the dashboard shows at one moment, as immutable values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jobs.queue.states import State
from jobs.run.judging import UNMEASURED, Measurements
from jobs.run.rundir import PHASES
from jobs.service import Progress
from jobs.service.outlook import Outlook

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu, Host
    from jobs.queue.store import Job
    from jobs.run.eventlog import Phase
    from jobs.run.events import Step
    from jobs.run.rundir import RankStatus

_SAID_EVERY = 1.0  # seconds between two reports of a rank
FIRST_STEP = "computing the first step"
LATE_AFTER = 10.0  # seconds without a heartbeat after which a rank is late


@dataclass(frozen=True)
class JobView:
    """A job, its progress and its devices. `ranks` and `phase` are set only while it is active.

    `strategy` says how its ranks share the work and `strategy_reason` why, once they have started.
    `sweep` is its sweep, `differs` its values of the keys in which the sweep's jobs differ, and
    `judged` the best of what its checkpoints are judged by; they are read only for jobs of a sweep.
    """

    job: Job
    progress: Progress = field(default_factory=Progress)
    where: str = ""
    phase: Phase | None = None
    ranks: tuple[RankStatus, ...] = ()
    strategy: str = ""
    strategy_reason: str = ""
    sweep: str = ""
    differs: Mapping[str, Any] = field(default_factory=dict)
    judged: Measurements = UNMEASURED

    @property
    def total_steps(self) -> int | None:
        """Return the number of steps; None until its ranks have counted its epochs."""
        return self.job.total_steps or self.progress.total_steps

    @property
    def doing(self) -> str | None:
        """Describe rank 0's activity other than steps; None while it trains."""
        if self.phase is not None and not self.phase.finished:
            if self.phase.name != "train":
                return PHASES.get(self.phase.name, self.phase.name)
            return FIRST_STEP  # a step event would have replaced the phase
        if self.job.state is State.STARTING and not self.ranks:
            return "starting the ranks"
        if self.job.state.active and self.ranks:
            name = self.ranks[0].phase
            return None if name == "train" else PHASES.get(name, name)
        return None

    @property
    def doing_since(self) -> float | None:
        """Return when it began that, in Unix seconds; None if unknown."""
        if self.phase is not None:
            return (self.phase.t if self.phase.finished else self.phase.since) or None
        if self.job.state is State.STARTING and not self.ranks:
            return self.job.started
        return None


@dataclass(frozen=True)
class Curve:
    """The steps of the selected job; a new tuple only if something was added.

    `validation` is the newest validation loss.
    """

    job: int
    steps: tuple[Step, ...] = ()
    validation: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of everything at one moment. `problem` says what could not be read, in one line.

    `busy`: recent utilization of each GPU (by UUID) in percent, the oldest first.
    `filled`: the same for its memory. `paused`: no queued job is started.
    `outlook`: when jobs start and end; the same object while that does not change.
    """

    t: float
    jobs: tuple[JobView, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    host: Host | None = None
    curve: Curve | None = None
    problem: str = ""
    busy: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    filled: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    paused: bool = False
    outlook: Outlook = field(default_factory=Outlook)

    def find(self, job_id: int | None) -> JobView | None:
        return next((view for view in self.jobs if view.job.id == job_id), None)

    @property
    def our_pids(self) -> set[int]:
        """Return the pids of our ranks."""
        return {rank.pid for view in self.jobs for rank in view.ranks}

    @property
    def claims(self) -> dict[str, int]:
        """Return the jobs that hold GPUs, by UUID."""
        active = (view.job for view in self.jobs if view.job.state.active)
        return {uuid: job.id for job in active for uuid in job.gpus}

    @cached_property
    def _in_state(self) -> Mapping[State, int]:
        return Counter(view.job.state for view in self.jobs)

    def count(self, *states: State) -> int:
        return sum(self._in_state[state] for state in states)


def is_late(rank: RankStatus, now: float) -> bool:
    """Return whether a rank's last heartbeat is too old."""
    return now - rank.heartbeat > LATE_AFTER


def in_step(
    ranks: Sequence[RankStatus], progress: Progress, now: float, *, training: bool = False
) -> tuple[RankStatus, ...]:
    """Return ranks with their steps aligned to the newest event, so that all displays agree.

    A rank reports its step about once a second, events arrive after each step. If the reported
    step can have become the event's by now, use that; a rank that lags keeps its own.

    Args:
        ranks: Their reports.
        progress: Progress by the events.
        now: Unix seconds.
        training: Whether the newest event is a step: a rank's earlier activity is over then.
    """
    pace = progress.seconds_per_step
    if not progress.step or not pace:
        return tuple(ranks)
    shown = []
    for rank in ranks:
        since = max(0.0, now - rank.heartbeat) + _SAID_EVERY
        apart = abs(progress.step - rank.step)
        if rank.step and 0 < apart <= since / pace + 1 and since < LATE_AFTER:
            phase = "train" if training and rank.step < progress.step else rank.phase
            rank = replace(rank, step=progress.step, phase=phase)
        shown.append(rank)
    return tuple(shown)


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs: active ones, the queue in its order, then ended ones, the newest first."""

    def key(job: Job) -> tuple[float, ...]:
        if job.state.active:
            return 0, job.id
        if job.state is State.QUEUED:
            return 1, -job.priority, job.queued, job.id
        return 2, -(job.ended or job.created)

    return sorted(jobs, key=key)
