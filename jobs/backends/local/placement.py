"""Which queued job starts now, and on what. Pure: no clock, no disk, no driver."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from jobs import units

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_NAMED: Final = 8  # jobs in the way that a reason names at most


@dataclass(frozen=True)
class Request:
    """A queued job.

    Attributes:
        job: Its id.
        gpus: GPU UUIDs, a count of any GPUs, or None for CPU ranks.
        shares: Whether it also takes GPUs that processes of others use.
    """

    job: int
    gpus: int | Sequence[str] | None
    shares: bool = False


@dataclass(frozen=True)
class Start:
    """The job may start on these GPUs (none for CPU ranks)."""

    job: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """The job waits; `reason` is the sentence shown to users."""

    job: int
    reason: str


def place(
    queue: Sequence[Request],
    claims: Mapping[str, int],
    devices: Sequence[str],
    running_on_cpu: Sequence[int] = (),
    cpu_slots: int = 1,
    foreign: Mapping[str, str] | None = None,
    indices: Mapping[str, int] | None = None,
) -> list[Start | Wait]:
    """Decide for each queued job, in order.

    A blocked job reserves what it waits for: GPUs by name, or every GPU that is free now and
    could count towards its number. A later job passes it only on GPUs that it cannot use, so it
    is never delayed by one and never starves.

    Args:
        queue: Queued jobs, the first to be served first.
        claims: GPU UUID → job that holds it.
        devices: UUIDs of the machine's GPUs, in index order.
        running_on_cpu: Jobs that run on CPU ranks now.
        cpu_slots: How many jobs may run on CPU ranks at once.
        foreign: GPU UUID → who uses it, for processes that are not ours.
        indices: GPU UUID → its number for people; by default its place in `devices`.

    Returns:
        One decision per queued job, in the same order.
    """
    board = _Board(claims, devices, foreign or {}, indices)
    on_cpu = list(running_on_cpu)
    decisions: list[Start | Wait] = []
    for request in queue:
        if request.gpus is None:
            if len(on_cpu) < cpu_slots:
                decisions.append(Start(request.job, ()))
                on_cpu.append(request.job)
            else:
                waits = f"waiting for {_jobs(on_cpu[:cpu_slots])} to free the CPU"
                decisions.append(Wait(request.job, waits))
        elif isinstance(request.gpus, int):
            decisions.append(board.any(request, request.gpus))
        else:
            decisions.append(board.named(request, request.gpus))
    return decisions


class _Board:
    """Who holds or waits for each GPU while decisions are made."""

    def __init__(
        self,
        claims: Mapping[str, int],
        devices: Sequence[str],
        foreign: Mapping[str, str],
        indices: Mapping[str, int] | None,
    ) -> None:
        self._index = indices or {uuid: position for position, uuid in enumerate(devices)}
        self._holder = dict(claims)
        self._reserved: dict[str, int] = {}  # GPU → waiting job that is to have it next
        self._lacks: dict[int, str] = {}  # that job → the GPUs it waits for, in words
        self._foreign = foreign
        # Kept up to date, so that a decision costs no look at every GPU; free ones in index order.
        self._free = dict.fromkeys(uuid for uuid in devices if uuid not in claims)
        self._undisturbed = dict.fromkeys(uuid for uuid in self._free if uuid not in foreign)
        self._waiting: dict[int, list[str]] = {}  # job → free GPUs reserved for it
        self._running: dict[int, list[str]] = {}  # job → GPUs that it holds
        # What reasons say of these, until they change: most queued jobs wait for the same.
        self._reserved_words: str | None = None
        self._held_words: str | None = None
        for uuid, job in claims.items():
            if uuid in self._index:
                self._running.setdefault(job, []).append(uuid)

    def any(self, request: Request, count: int) -> Start | Wait:
        usable = self._free if request.shares else self._undisturbed
        if len(usable) >= count:
            return self._start(request.job, list(islice(usable, count)))
        lacks, facts = units.gpus(count), [f"{len(usable)} available"]
        if self._reserved_words is None:
            self._reserved_words = self._reserved_for(self._waiting)
        if self._held_words is None:
            self._held_words = self._held_by(self._running)
        reserved, held = self._reserved_words, self._held_words
        self._reserve(request.job, list(usable), lacks)
        disturbed = next(iter(self._free), None)  # the remaining GPUs are used by others
        if disturbed is not None:
            facts.append(self._used_by_others(disturbed))
        facts += filter(None, (reserved, held))
        return Wait(request.job, f"waiting for {lacks} ({'; '.join(facts)})")

    def named(self, request: Request, uuids: Sequence[str]) -> Start | Wait:
        missing = [uuid for uuid in uuids if uuid not in self._index]
        held = [uuid for uuid in uuids if uuid in self._holder]
        kept = [uuid for uuid in uuids if uuid in self._reserved and uuid not in self._holder]
        others = [] if request.shares else [u for u in uuids if u in self._foreign]
        if not (missing or held or kept or others):
            return self._start(request.job, uuids)
        if missing:
            lacks = f"GPU {missing[0]}"
            reason = f"waiting for {lacks}, which this machine does not have"
        else:
            lacks = self._gpus([*held, *kept, *others])
            reason = self._why([self._holder[uuid] for uuid in held], held, kept, others)
        self._reserve(request.job, uuids, lacks)
        return Wait(request.job, reason)

    def _why(self, holders: list[int], held: list[str], kept: list[str], others: list[str]) -> str:
        waiting: dict[int, list[str]] = {}
        for uuid in kept:
            waiting.setdefault(self._reserved[uuid], []).append(uuid)
        facts = [self._reserved_for(waiting)] if kept else []
        facts += map(self._used_by_others, others[:1])
        if not held:
            return f"waiting: {'; '.join(facts)}"
        return "; ".join([f"waiting for {_jobs(holders)} on {self._gpus(held)}", *facts])

    def _start(self, job: int, gpus: Sequence[str]) -> Start:
        for uuid in gpus:
            self._holder[uuid] = job
            self._take(uuid)
        if len(self._running) <= _NAMED or job in self._running:
            self._held_words = None
        self._running[job] = list(gpus)
        return Start(job, tuple(gpus))

    def _reserve(self, job: int, gpus: Sequence[str], lacks: str) -> None:
        self._lacks[job] = lacks
        for uuid in gpus:
            if self._reserved.setdefault(uuid, job) == job and uuid not in self._holder:
                if len(self._waiting) < _NAMED or job in self._waiting:
                    self._reserved_words = None
                self._waiting.setdefault(job, []).append(uuid)
            self._take(uuid)

    def _take(self, uuid: str) -> None:
        self._free.pop(uuid, None)
        self._undisturbed.pop(uuid, None)

    def _reserved_for(self, waiting: Mapping[int, Sequence[str]]) -> str:
        """Say which free GPUs are reserved for which jobs, and why those jobs do not start."""
        return "; ".join(
            f"{self._gpus(gpus)} reserved for job {job}, which waits for {self._lacks[job]}"
            for job, gpus in islice(waiting.items(), _NAMED)
        )

    def _held_by(self, running: Mapping[int, Sequence[str]]) -> str:
        """Say which jobs hold which GPUs."""
        named = [
            f"job {job} on {self._gpus(gpus)}" for job, gpus in islice(running.items(), _NAMED)
        ]
        return ", ".join(named + ["…"] * (len(running) > _NAMED))

    def _gpus(self, uuids: Iterable[str]) -> str:
        """GPUs by their numbers: `GPU 6`, `GPUs 0-3,6`; nothing of what this machine lacks."""
        numbers = {self._index[uuid] for uuid in uuids if uuid in self._index}
        return f"GPU{'s' * (len(numbers) != 1)} {units.ranges(numbers)}"

    def _used_by_others(self, uuid: str) -> str:
        return f"GPU {self._index[uuid]} is used by {self._foreign[uuid]}"


def _jobs(ids: Sequence[int]) -> str:
    unique = sorted(set(ids))
    return ("job " if len(unique) == 1 else "jobs ") + ", ".join(map(str, unique))
