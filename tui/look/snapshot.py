"""What the dashboard shows at one moment, as immutable values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from jobs.queue.states import State
from jobs.run.rundir import PHASES
from jobs.service import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu, Host
    from jobs.queue.store import Job
    from jobs.run.eventlog import Phase, StepRecord
    from jobs.run.rundir import RankStatus

LATE_AFTER = 10.0  # seconds without a heartbeat after which a rank is called late


@dataclass(frozen=True)
class JobView:
    """A job, how far it is, and where. `ranks` and `phase` only while it is active.

    `strategy` says how its ranks share the work and why, once they have started.
    """

    job: Job
    progress: Progress = field(default_factory=Progress)
    where: str = ""
    phase: Phase | None = None
    ranks: tuple[RankStatus, ...] = ()
    strategy: str = ""

    @property
    def doing(self) -> str | None:
        """What rank 0 is doing other than steps, for people; None while it trains."""
        if self.phase is not None and not self.phase.finished and self.phase.name != "train":
            return PHASES.get(self.phase.name, self.phase.name)
        if self.job.state is State.STARTING and not self.ranks:
            return "starting the ranks"
        if self.job.state.active and self.ranks:
            name = self.ranks[0].phase
            return None if name == "train" else PHASES.get(name, name)
        return None


@dataclass(frozen=True)
class Curve:
    """The steps of the selected job; a new tuple only when something was added.

    `validation` is the newest loss on what is held out.
    """

    job: int
    steps: tuple[StepRecord, ...] = ()
    validation: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """One look at everything. `problem` says what could not be read, in one line.

    `busy` has what part of its time each GPU (by UUID) computed lately, in percent, oldest first.
    `paused`: no queued job is started.
    """

    t: float
    jobs: tuple[JobView, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    host: Host | None = None
    curve: Curve | None = None
    problem: str = ""
    busy: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    paused: bool = False

    def find(self, job_id: int | None) -> JobView | None:
        return next((view for view in self.jobs if view.job.id == job_id), None)

    @cached_property
    def _in_state(self) -> Mapping[State, int]:
        return Counter(view.job.state for view in self.jobs)

    def count(self, *states: State) -> int:
        return sum(self._in_state[state] for state in states)


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Active jobs first, then the queue as it will be served, then ended ones, newest first."""

    def key(job: Job) -> tuple[float, ...]:
        if job.state.active:
            return 0, job.id
        if job.state is State.QUEUED:
            return 1, -job.priority, job.queued, job.id
        return 2, -(job.ended or job.created)

    return sorted(jobs, key=key)
