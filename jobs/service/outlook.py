"""When each queued job starts and ends, and when all are done.

The queue is played in time: what runs ends when its time left is over, and `place` decides, as it
will then, who starts on what is free.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from jobs.backends.local.dispatch import cpu_slots
from jobs.backends.local.placement import Request, Start, place
from jobs.hub.wanted import noted
from jobs.machine.devices import foreign_users
from jobs.queue.eta import Costs, Counted, habits_of, phases_of, whole_time
from jobs.queue.states import State
from jobs.run.eventlog import read_end
from jobs.run.events import Start as Started
from jobs.spec.job_spec import JobSpec, key_facts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from jobs.machine.devices import Gpu
    from jobs.queue.eta import Habits, Left
    from jobs.queue.job_list import Progress
    from jobs.queue.store import Job, Store
    from jobs.run.eventlog import EventLog

_EVERY: Final = 3.0  # seconds between two looks into the future
_MOST: Final = 100  # queued jobs that are played; what comes later is not known
_LIKE: Final = 200  # of the newest jobs that were started, those that may be like a queued one
# Phases that leave nothing to do for the next run.
_CACHES: Final = ("encode", "latents", "sounds", "masks")
# Keys that may change the memory, and a pace by no more than a few percent or not at all.
_SAME_PACE: Final = frozenset(
    {
        *("checkpointing_steps", "checkpoints_total_limit", "resume_from_checkpoint", "cache_dir"),
        *("both_experts", "other_expert"),
        *("validation_steps", "validation_loss_steps", "validation_on_startup"),
        *("lora_rank", "prefetch_steps"),
    }
)
_OTHER_PACE: Final = frozenset({"validation_timesteps"})  # keys that change no memory, but a time


@dataclass(frozen=True)
class Expected:
    """What is expected of a job that has not ended; in seconds from now.

    Attributes:
        starts_in: When it starts; None if it runs, or that is not known.
        ends_in: When it is done; None if that is not known.
        at_least: Whether it may as well be later: something is not known.
        after: The job that it waits for, if nobody knows when that one ends.
    """

    starts_in: float | None = None
    ends_in: float | None = None
    at_least: bool = False
    after: int | None = None


@dataclass(frozen=True)
class Outlook:
    """What is expected of all jobs, as seen at one moment.

    Attributes:
        jobs: By their ids; a job of which nothing can be said is missing.
        all_done: Seconds until all that run or wait are done; None if nothing does, or nothing is
            known.
        at_least: Whether it may as well be later.
    """

    jobs: Mapping[int, Expected] = field(default_factory=dict)
    all_done: float | None = None
    at_least: bool = False


@dataclass(frozen=True)
class Takes:
    """How long a job takes once it has started, in seconds; at least, if something is unknown."""

    seconds: float
    at_least: bool = False


@dataclass(frozen=True)
class Machine:
    """Where jobs run; as the arguments of `place`."""

    devices: Sequence[str] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)
    indices: Mapping[str, int] = field(default_factory=dict)
    cpu_slots: int = 1


def foresee(
    queue: Sequence[Request],
    takes: Mapping[int, Takes],
    running: Mapping[int, Takes | None],
    claims: Mapping[str, int],
    on_cpu: Collection[int],
    machine: Machine,
    follows: Mapping[int, Collection[int]] | None = None,
) -> dict[int, Expected]:
    """Play the queue. Pure.

    Args:
        queue: Queued jobs that start when they can, the first to be served first.
        takes: How long each of them takes, as far as that is known.
        running: How long each running job still takes; None if that is not known.
        claims: GPU UUID → running job that holds it.
        on_cpu: Running jobs on CPU ranks.
        machine: Its devices.
        follows: Queued job → jobs that must end first, as if each of them will complete.

    Returns:
        What is expected of each job that is queued.
    """
    before = {job: set(earlier) for job, earlier in (follows or {}).items()}
    ends = [(left.seconds, job, left.at_least) for job, left in running.items() if left is not None]
    heapq.heapify(ends)
    held, slots = dict(claims), list(on_cpu)
    waiting, expected = list(queue), dict[int, Expected]()
    now, late = 0.0, False
    while True:
        free = [request for request in waiting if not before.get(request.job)]
        decisions = place(
            free,
            held,
            machine.devices,
            slots,
            machine.cpu_slots,
            machine.foreign,
            machine.indices or None,
        )
        for decision, request in zip(decisions, free, strict=True):
            if not isinstance(decision, Start):
                continue
            held |= dict.fromkeys(decision.gpus, decision.job)
            if request.gpus is None:
                slots.append(decision.job)
            time_of = takes.get(decision.job)
            if time_of is None:
                expected[decision.job] = Expected(now, None, late)
                continue
            lasts = late or time_of.at_least
            expected[decision.job] = Expected(now, now + time_of.seconds, lasts)
            heapq.heappush(ends, (now + time_of.seconds, decision.job, lasts))
        waiting = [request for request in waiting if request.job not in expected]
        if not (waiting and ends):
            break
        now, ended, uncertain = heapq.heappop(ends)
        late |= uncertain
        held = {uuid: job for uuid, job in held.items() if job != ended}
        slots = [job for job in slots if job != ended]
        for earlier in before.values():
            earlier.discard(ended)
    for request in waiting:  # behind jobs that end nobody knows when
        first = min(before.get(request.job, ()), default=None)
        if first is None:
            first = _in_the_way(request, held, slots, expected)
        expected[request.job] = Expected(after=first)
    return expected


def _in_the_way(
    request: Request, held: Mapping[str, int], slots: Sequence[int], expected: Collection[int]
) -> int | None:
    """Return which job a job waits for."""
    if request.gpus is None:
        return min(slots, default=None)
    gpus = held if isinstance(request.gpus, int) else request.gpus
    return min((held[uuid] for uuid in gpus if uuid in held), default=None)


class Forecast:
    """Looks into the future now and then, and remembers what it has read. Of one thread."""

    def __init__(self) -> None:
        self._newest = Outlook()
        self._of: tuple[object, ...] = ()
        self._at = float("-inf")
        self._costs: dict[tuple[int, int, float | None], Costs] = {}  # of jobs that have ended
        self._now: dict[int, Costs] = {}  # of those that run, in the present look

    def look(
        self,
        store: Store,
        jobs: Sequence[Job],
        far: Mapping[int, Progress],
        present: Sequence[Gpu],
        logs: Mapping[int, EventLog] | None = None,
    ) -> Outlook:
        """Return what is expected; the same object as before while it has not changed.

        Args:
            store: The jobs.
            jobs: All of them.
            far: How far those are that run.
            present: The machine's GPUs.
            logs: Whole event logs of jobs that are followed anyway.
        """
        open_jobs = [job for job in jobs if not job.state.ended]
        if not open_jobs:
            self._newest, self._of = Outlook(), ()
            return self._newest
        facts = tuple(
            (job.id, job.state, job.request, job.priority, job.queued) for job in open_jobs
        )
        if facts != self._of or time.monotonic() - self._at >= _EVERY:
            outlook = self._look(store, jobs, open_jobs, far, present, logs or {})
            if outlook != self._newest:
                self._newest = outlook
            self._of, self._at = facts, time.monotonic()
        return self._newest

    def _look(
        self,
        store: Store,
        jobs: Sequence[Job],
        open_jobs: Sequence[Job],
        far: Mapping[int, Progress],
        present: Sequence[Gpu],
        logs: Mapping[int, EventLog],
    ) -> Outlook:
        active = [job for job in open_jobs if job.state.active]
        self._now.clear()
        running = {job.id: _rest(far.get(job.id)) for job in active}
        new = [job for job in active if running[job.id] is None]
        for job, takes in self._takes(jobs, new, logs).items():
            running[job] = takes
        queued = sorted(
            (job for job in open_jobs if job.state is State.QUEUED),
            key=lambda job: (-job.priority, job.queued, job.id),
        )
        waits = {job.id for job in queued if job.held or job.stuck}
        ready = [job for job in queued if job.here and not (job.id in waits or noted(job.run_dir))]
        paused = store.paused
        ready = [] if paused else ready[:_MOST]
        expected = {
            job: Expected(None, left.seconds, left.at_least)
            for job, left in running.items()
            if left
        }
        if ready:
            gpus = [gpu for gpu in present if gpu.unusable is None]
            claims = store.claims()
            expected |= foresee(
                [Request(job.id, job.wanted, job.shares) for job in ready],
                self._takes(jobs, ready, logs),
                {job.id: running[job.id] for job in active if job.here},
                claims,
                [job.id for job in active if job.here and job.wanted is None],
                Machine(
                    [gpu.uuid for gpu in gpus],
                    foreign_users(gpus, (), claims),
                    {gpu.uuid: gpu.index for gpu in gpus},
                    cpu_slots(),
                ),
                {job.id: [earlier for earlier, _ in job.blockers] for job in ready},
            )
        expected = {job: _rounded(outcome) for job, outcome in expected.items()}
        ends = [outcome.ends_in for outcome in expected.values() if outcome.ends_in is not None]
        to_end = len(active) + sum(not (paused or job.id in waits) for job in queued)
        at_least = len(ends) < to_end or any(outcome.at_least for outcome in expected.values())
        return Outlook(expected, max(ends, default=None), at_least)

    # -- how long a queued job takes -----------------------------------------------------------

    def _takes(
        self, jobs: Sequence[Job], asked: Sequence[Job], logs: Mapping[int, EventLog]
    ) -> dict[int, Takes]:
        """Return durations of jobs without a step yet, taken from similar jobs that ran before."""
        if not asked:
            return {}
        began = [job for job in jobs if job.started is not None]
        began.sort(key=lambda job: (not job.state.active, -(job.started or 0.0)))
        like: dict[str, list[Job]] = {}
        for job in began[:_LIKE]:
            like.setdefault(recipe_of(job), []).append(job)
        takes = {}
        for job in asked:
            itself = [job] if job.started is not None else []
            for peer in [*itself, *like.get(recipe_of(job), [])]:
                if left := self._like(job, peer, logs.get(peer.id)):
                    spent = time.time() - (job.started or 0.0) if job.state.active else 0.0
                    takes[job.id] = Takes(max(0.0, left.seconds - spent), bool(left.unknown))
                    break
        return takes

    def _like(self, job: Job, peer: Job, log: EventLog | None) -> Left | None:
        """Return how long a job takes if it is as fast as another one; None if nobody knows."""
        habits, others = habits_of(job.run_dir), habits_of(peer.run_dir)
        if habits is None or others is None:
            return None
        steps = job.total_steps
        if habits.epochs == others.epochs and (habits.rhythm.epochs or not steps):
            ranks = Counted.read(peer.run_dir)
            steps, habits = steps or ranks.total_steps or 0, habits.counted(ranks)
        newest = job.run_dir.latest_checkpoint() if job.attempt else None
        costs = self._costs_of(peer, log) if steps else Costs()
        return whole_time(habits, costs, steps, newest[0] if newest else 0)

    def _costs_of(self, job: Job, log: EventLog | None) -> Costs:
        key = job.id, job.attempt, job.ended
        kept = self._now.get(job.id) if job.state.active else self._costs.get(key)
        if kept is not None:
            return kept
        if log is None or log.behind:
            phases = phases_of(job.run_dir)
            costs = Costs.of(read_end(job.run_dir.events), phases)
        else:
            phases, costs = log, Costs.of(log)
        costs = replace(costs, start=_launch(job, phases))
        if job.state.active:
            self._now[job.id] = costs
        else:
            self._costs[key] = costs
        return costs


def _rest(progress: Progress | None) -> Takes | None:
    if progress is None or progress.eta is None:
        return None
    return Takes(progress.eta, bool(progress.eta_unknown))


def _launch(job: Job, phases: EventLog) -> float:
    """Seconds from a job's start to its first step, less what it has left in caches."""
    try:
        begun = float(phases.notes[Started.kind]["t"])
    except (LookupError, TypeError, ValueError):
        return 0.0
    cached = sum(phases.usual_seconds(phase) or 0.0 for phase in _CACHES)
    return max(0.0, begun - (job.started or begun) - cached)


def recipe_of(job: Job) -> str:
    """Return a text that is the same for jobs that train at the same pace on the same devices.

    It has all keys that may change how long something takes, and what the job runs on.
    """
    habits = habits_of(job.run_dir)
    if habits is None:
        return f"job {job.id}"  # like no other
    where = job.backend if not job.here else "cpu" if job.wanted is None else "gpu"
    return _recipe(habits, where, job.ranks)


@lru_cache(maxsize=1024)
def _recipe(habits: Habits, where: str, ranks: int) -> str:
    values = {key: habits.values[key] for key in _PACED if key in habits.values}
    text = json.dumps([where, ranks, values], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


_PACED: Final = (
    frozenset(key for key in JobSpec.model_fields if key_facts(key).memory) - _SAME_PACE
) | _OTHER_PACE
"""Keys that may change how long a step, or what follows one, takes."""


def _rounded(outcome: Expected) -> Expected:
    """Round, so that what is shown and sent changes as seldom as people look."""
    return replace(outcome, starts_in=_round(outcome.starts_in), ends_in=_round(outcome.ends_in))


def _round(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    grain = 1 if seconds < 60 else 5 if seconds < 600 else 60
    return float(round(seconds / grain) * grain)
