"""What the dashboard shows at one moment, as immutable values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jobs.queue.states import State
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

_SAID_EVERY = 1.0  # seconds between two words of a rank
FIRST_STEP = "computing the first step"
LATE_AFTER = 10.0  # seconds without a heartbeat after which a rank is called late


@dataclass(frozen=True)
class JobView:
    """A job, how far it is, and where. `ranks` and `phase` only while it is active.

    `strategy` says how its ranks share the work, `strategy_reason` why, once they have started.
    `sweep` is the group it belongs to, `differs` what it has of the keys in which the jobs of the
    group differ, and `lowest` its lowest validation loss; they are read of jobs of a sweep alone.
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
    lowest: float | None = None

    @property
    def total_steps(self) -> int | None:
        """How many steps it trains; None until its ranks have counted its epochs."""
        return self.job.total_steps or self.progress.total_steps

    @property
    def doing(self) -> str | None:
        """What rank 0 is doing other than steps, for people; None while it trains."""
        if self.phase is not None and not self.phase.finished:
            if self.phase.name != "train":
                return PHASES.get(self.phase.name, self.phase.name)
            return FIRST_STEP  # an event of a step would have taken the phase's place
        if self.job.state is State.STARTING and not self.ranks:
            return "starting the ranks"
        if self.job.state.active and self.ranks:
            name = self.ranks[0].phase
            return None if name == "train" else PHASES.get(name, name)
        return None

    @property
    def doing_since(self) -> float | None:
        """When it began that, in Unix seconds; None where that is not known."""
        if self.phase is not None:
            return (self.phase.t if self.phase.finished else self.phase.since) or None
        if self.job.state is State.STARTING and not self.ranks:
            return self.job.started
        return None


@dataclass(frozen=True)
class Curve:
    """The steps of the selected job; a new tuple only when something was added.

    `validation` is the newest loss on what is held out.
    """

    job: int
    steps: tuple[Step, ...] = ()
    validation: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """One look at everything. `problem` says what could not be read, in one line.

    `busy` has what part of its time each GPU (by UUID) computed lately, in percent, oldest first;
    `filled` what part of its memory was in use. `paused`: no queued job is started.
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
        """The processes of our ranks."""
        return {rank.pid for view in self.jobs for rank in view.ranks}

    @property
    def claims(self) -> dict[str, int]:
        """GPU, by UUID → the job of ours that holds it."""
        active = (view.job for view in self.jobs if view.job.state.active)
        return {uuid: job.id for job in active for uuid in job.gpus}

    @cached_property
    def _in_state(self) -> Mapping[State, int]:
        return Counter(view.job.state for view in self.jobs)

    def count(self, *states: State) -> int:
        return sum(self._in_state[state] for state in states)


def is_late(rank: RankStatus, now: float) -> bool:
    """Whether a rank has not been heard of for too long."""
    return now - rank.heartbeat > LATE_AFTER


def in_step(
    ranks: Sequence[RankStatus], progress: Progress, now: float, *, training: bool = False
) -> tuple[RankStatus, ...]:
    """Ranks at the step that the events tell, so that one step is named everywhere.

    A rank says its own about once a second, the events after each step. Where what it said then
    can be that step by now, it is; a rank that does not keep up stays where it was.

    Args:
        ranks: What they said.
        progress: What the events tell.
        now: In Unix seconds.
        training: Whether the newest event is a step: what a rank did before it is over.
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
    """Active jobs first, then the queue as it will be served, then ended ones, newest first."""

    def key(job: Job) -> tuple[float, ...]:
        if job.state.active:
            return 0, job.id
        if job.state is State.QUEUED:
            return 1, -job.priority, job.queued, job.id
        return 2, -(job.ended or job.created)

    return sorted(jobs, key=key)
