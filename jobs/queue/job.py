"""A job as the database stores it."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.errors import StateError
from jobs.machine.processes import ProcessId
from jobs.machine.residence import elsewhere
from jobs.queue.states import State
from jobs.queue.tables import HELD_BY_STAGE
from jobs.run.rundir import RunDir
from jobs.spec.rules.steps import total_steps
from jobs.spec.rules.strategy import world_size

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from jobs.run.rundir import RankStatus
    from jobs.spec.job_spec import JobSpec


Place = Literal["first", "up", "down", "last"]
LOCAL: Final = "local"
"""The backend of jobs that use this machine's CPU or GPUs."""
_MIN_GAP: Final = 1e-3  # minimum seconds between the queue times of two jobs


@dataclass(frozen=True)
class Job:
    """A row of the database. Times in Unix seconds; `gpus` are UUIDs, empty on CPU ranks.

    `wanted` is the request: None for CPU ranks, a count, or UUIDs; for another backend, its name.
    `total_steps` is 0 for a length in epochs, whose steps the ranks report (`Progress`). The queue
    is
    ordered by descending `priority`, then by `queued`; `held` jobs are skipped. `elsewhere` names
    the
    container or machine where an active job runs if it is not this one, according to `boot_id`, a
    `jobs.machine.residence`. `follows` has the jobs that must complete before it starts, each with
    its state; None: it was removed.
    """

    id: int
    name: str
    state: State
    reason: str
    ranks: int
    wanted: int | list[str] | None
    gpus: list[str]
    total_steps: int
    run_dir: RunDir
    run_id: str
    created: float
    queued: float
    started: float | None
    ended: float | None
    attempt: int
    stop_level: int
    priority: int
    held: bool
    shares: bool
    auto_resume: bool
    supervisor: ProcessId | None
    boot_id: str | None
    elsewhere: str = ""
    follows: tuple[tuple[int, State | None], ...] = ()

    @property
    def backend(self) -> str:
        """Return the name of the backend in `jobs.backends` that places and supervises it."""
        return backend_of(self.wanted)

    @property
    def here(self) -> bool:
        """Return whether this machine places and supervises it."""
        return self.backend == LOCAL

    @property
    def request(self) -> tuple[object, ...]:
        """Return the facts that placement uses."""
        return self.ranks, self.wanted, self.shares, self.held, self.blockers

    @property
    def blockers(self) -> tuple[tuple[int, State | None], ...]:
        """Return the jobs of `follows` that have not completed: it must not start before."""
        return tuple(each for each in self.follows if each[1] is not State.COMPLETED)

    @property
    def passed_over(self) -> bool:
        """Return whether it must not start yet, whatever is free."""
        return self.held or bool(self.blockers)

    @property
    def stuck(self) -> bool:
        """Return whether a job that must complete first will not, unless someone acts."""
        return any(state is None or state.ended for _, state in self.blockers)


@dataclass(frozen=True)
class Terms:
    """The part of a job's spec that the queue uses; see `Job`."""

    ranks: int
    wanted: int | list[str] | None
    total_steps: int
    priority: int = 0
    shares: bool = False
    auto_resume: bool = False
    sweep: str = ""

    @classmethod
    def of(cls, spec: JobSpec, wanted: int | list[str] | None) -> Terms:
        """Build the terms of a job; `wanted` is resolved to this machine's GPUs."""
        return cls(
            world_size(spec),
            wanted,
            total_steps(spec) or 0,
            spec.priority,
            spec.share_gpus,
            spec.auto_resume,
            spec.sweep or "",
        )

    def columns(self) -> dict[str, object]:
        """Return them as database columns; the sweep has a table of its own."""
        columns = vars(self) | {"wanted": json.dumps(self.wanted)}
        del columns["sweep"]
        return columns


@dataclass(frozen=True)
class NewJob:
    """A job to be queued.

    Attributes:
        name: For people; also part of the run directory's name.
        terms: What the queue goes by.
        run_id: Marks the job's processes in their environment.
        prepare: Fills the run directory before anyone can see the job; if it raises, there is no
            job.
        follows: Jobs that must complete before it starts.
    """

    name: str
    terms: Terms
    run_id: str
    prepare: Callable[[RunDir], None]
    follows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Change:
    """A state transition of a job."""

    t: float
    before: State | None
    after: State
    reason: str


_NAMED: Final = 2  # jobs that a reason names at most
_ENDINGS: Final = {
    None: "was removed",
    State.STOPPED: "was stopped",
    State.FAILED: "failed",
    State.LOST: "was lost",
}


def why_after(job: Job) -> str:
    """Say which jobs must complete first, and what to do if one will not; "" if none must.

    `after job 3, which is running`
    """
    if not job.blockers:
        return ""
    # Those that someone must act on come first.
    order = sorted(job.blockers, key=lambda each: each[1] is not None and not each[1].ended)
    named = [f"job {i}, which {_ENDINGS.get(state, f'is {state}')}" for i, state in order[:_NAMED]]
    if more := len(order) - len(named):
        named.append(f"{more} more")
    text = "after " + ", and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    if not job.stuck:
        return text
    first, state = order[0]
    resume = f"resume job {first}, or " if state is not None else ""
    return f"{text}: {resume}release this job to start it all the same"


def check_stages(job_id: int, earlier: Sequence[int], get: Callable[[int], Job]) -> None:
    """Check that a queued job can wait for others.

    Args:
        job_id: The job.
        earlier: Jobs that should complete before it.
        get: Reads a job.

    Raises:
        NotFoundError: There is no such job.
        StateError: One of them is the job or waits for it.
    """
    for first in earlier:
        ahead, seen = [get(first)], set[int]()
        while ahead:
            at = ahead.pop()
            if at.id == job_id:
                why = "itself" if first == job_id else f"job {first}, which waits for job {job_id}"
                raise StateError(f"job {job_id} cannot wait for {why}")
            seen.add(at.id)
            ahead += [get(i) for i, state in at.blockers if state is not None and i not in seen]


def backend_of(wanted: int | list[str] | None) -> str:
    """Return the backend of a job with this request.

    The name of a backend is lower case without a hyphen; that of a GPU begins with `GPU-` or
    `MIG-`.
    """
    name = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else ""
    return name if name.isidentifier() and name.islower() else LOCAL


def moved(job: Job, queue: Sequence[Job], to: Place) -> dict[int, float]:
    """Return the new `queued` values, by job, when a job moves among those of its priority.

    Raises:
        StateError: It cannot go further up or down.
    """
    peers = [peer for peer in queue if peer.priority == job.priority]
    at = [peer.id for peer in peers].index(job.id)
    order = [peer.id for peer in peers if peer.id != job.id]
    goal = {"first": 0, "up": at - 1, "down": at + 1, "last": len(order)}[to]
    if not 0 <= goal <= len(order):
        raise StateError(
            f"job {job.id} is already the {'first' if goal < 0 else 'last'} of priority "
            f"{job.priority}",
            "change its priority to move it further",
        )
    order.insert(goal, job.id)
    places: dict[int, float] = {}
    last = -math.inf
    for job_id, peer in zip(order, peers, strict=True):
        places[job_id] = last = max(peer.queued, last + _MIN_GAP)
    return places


def job_of_row(row: sqlite3.Row) -> Job:
    """Convert a row of the `jobs` table to a `Job`; an unchanged row returns the same object."""
    values, key = tuple(row), (row["run_dir"], row["id"])
    cached = _latest.get(key)
    if cached is None or cached[0] != values:
        cached = _latest[key] = (values, _job(tuple(row.keys()), values))
    return cached[1]


# Cache parsed rows: polling a thousand ended jobs every second would otherwise take a twentieth of
# a core. One entry per job, for its latest row. A cache of fixed size would evict every entry just
# before it is used again if there are more jobs.
_latest: dict[tuple[str, int], tuple[tuple[Any, ...], Job]] = {}


def _job(columns: tuple[str, ...], row: tuple[Any, ...]) -> Job:
    values: dict[str, Any] = dict(zip(columns, row, strict=True))
    pid, started = values.pop("supervisor_pid"), values.pop("supervisor_started")
    state, run_dir = State(values["state"]), RunDir(Path(values["run_dir"]))
    pairs = [pair.split(":") for pair in (values["follows"] or "").split(",") if pair]
    follows = tuple(sorted((int(i), State(word) if word else None) for i, word in pairs))
    there = ""
    wanted = json.loads(values["wanted"])
    if state.active and backend_of(wanted) == LOCAL:
        there = elsewhere(values["boot_id"], run_dir.root.parent.parent)
    if there:
        values["reason"] = f"runs in another container or machine ({there})"
    return Job(
        **values
        | {
            "state": state,
            "elsewhere": there,
            "wanted": wanted,
            "gpus": json.loads(values["gpus"]),
            # Where rows of its stage were lost with a damaged database, it waits for a person.
            "held": bool(values["held"]) and not (follows and values["held"] == HELD_BY_STAGE),
            "follows": follows,
            "shares": bool(values["shares"]),
            "auto_resume": bool(values["auto_resume"]),
            "run_dir": run_dir,
            "supervisor": ProcessId(pid, started) if pid is not None else None,
        }
    )


# -- clocks ---------------------------------------------------------------------------------
# Convert times that ranks on other machines write to this machine's clock.
#
# The clocks of machines differ by seconds or hours. A heartbeat from another machine is therefore
# only compared with the previous one: when it changes, it has just happened.


_HERE: Final = socket.gethostname()


@dataclass
class Clocks:
    """Track when the status of each rank has changed.

    Args:
        here: The name of this machine, whose ranks use the same clock.
    """

    here: str = _HERE
    _seen: dict[int, dict[int, tuple[RankStatus, RankStatus]]] = field(default_factory=dict)

    def of(self, job: Job, now: float) -> Sequence[RankStatus]:
        """Return a job's latest rank statuses.

        Times are on this machine's clock; `now` is in Unix seconds.
        """
        statuses = job.run_dir.rank_statuses()
        return self.translate(job.id, statuses, now) if not job.here else statuses

    def translate(
        self, job: int, statuses: Sequence[RankStatus], now: float
    ) -> Sequence[RankStatus]:
        """Translate the times of ranks that may be on other machines to this machine's clock.

        Args:
            job: The job's id.
            statuses: The latest statuses of its ranks.
            now: Unix seconds on this machine.
        """
        before = self._seen.get(job, {})
        after = {s.rank: (s, self._here(s, before.get(s.rank), now)) for s in statuses}
        self._seen[job] = after
        return [after[status.rank][1] for status in statuses]

    def forget(self, jobs: set[int]) -> None:
        """Drop all but these jobs."""
        self._seen = {job: seen for job, seen in self._seen.items() if job in jobs}

    def _here(
        self, status: RankStatus, before: tuple[RankStatus, RankStatus] | None, now: float
    ) -> RankStatus:
        if status.host == self.here:
            return status
        if before is None or before[0].pid != status.pid:
            return replace(status, heartbeat=now, progressed=now)
        earlier, ours = before
        return replace(
            status,
            heartbeat=now if status.heartbeat != earlier.heartbeat else ours.heartbeat,
            progressed=now if status.progressed != earlier.progressed else ours.progressed,
        )
