"""Which queued job starts now, and on what. Pure: no clock, no disk, no driver."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Request:
    """A queued job.

    Attributes:
        job: Its id.
        wanted: GPU UUIDs, a count of any GPUs, or None for CPU ranks.
        shares: Whether it also takes GPUs that processes of others use.
    """

    job: int
    wanted: int | Sequence[str] | None
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
        indices: GPU UUID → its number for people; its place in `devices` when left out.

    Returns:
        One decision per queued job, in the same order.
    """
    board = _Board(claims, devices, foreign or {}, indices)
    on_cpu = list(running_on_cpu)
    decisions: list[Start | Wait] = []
    for request in queue:
        if request.wanted is None:
            if len(on_cpu) < cpu_slots:
                decisions.append(Start(request.job, ()))
                on_cpu.append(request.job)
            else:
                waits = f"waiting for {_jobs(on_cpu[:cpu_slots])} to free the CPU"
                decisions.append(Wait(request.job, waits))
        elif isinstance(request.wanted, int):
            decisions.append(board.any(request, request.wanted))
        else:
            decisions.append(board.named(request, request.wanted))
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
        self._foreign = foreign
        # In index order. Kept up to date, so that a decision costs no look at every GPU.
        self._free = dict.fromkeys(uuid for uuid in devices if uuid not in claims)
        self._undisturbed = dict.fromkeys(uuid for uuid in self._free if uuid not in foreign)

    def any(self, request: Request, count: int) -> Start | Wait:
        usable = self._free if request.shares else self._undisturbed
        if len(usable) >= count:
            return self._start(request.job, list(islice(usable, count)))
        free = f"{len(usable)} available"
        self._reserve(request.job, list(usable))
        disturbed = next(iter(self._free), None)  # what is left is used by others
        if disturbed is not None:
            free += f"; {self._used_by_others(disturbed)}"
        return Wait(request.job, f"waiting for {count} GPU{'s' * (count != 1)} ({free})")

    def named(self, request: Request, uuids: Sequence[str]) -> Start | Wait:
        missing = [uuid for uuid in uuids if uuid not in self._index]
        busy = [uuid for uuid in uuids if uuid in self._holder or uuid in self._reserved]
        others = [] if request.shares else [u for u in uuids if u in self._foreign]
        if not (missing or busy or others):
            return self._start(request.job, uuids)
        if missing:
            reason = f"waiting for GPU {missing[0]}, which this machine does not have"
        elif busy:
            blockers = [self._holder.get(u) or self._reserved[u] for u in busy]
            where = ", ".join(str(self._index[uuid]) for uuid in busy)
            reason = f"waiting for {_jobs(blockers)} on GPU {where}"
        else:
            reason = f"waiting: {self._used_by_others(others[0])}"
        self._reserve(request.job, uuids)
        return Wait(request.job, reason)

    def _start(self, job: int, gpus: Sequence[str]) -> Start:
        for uuid in gpus:
            self._holder[uuid] = job
            self._take(uuid)
        return Start(job, tuple(gpus))

    def _reserve(self, job: int, gpus: Sequence[str]) -> None:
        for uuid in gpus:
            self._reserved.setdefault(uuid, job)
            self._take(uuid)

    def _take(self, uuid: str) -> None:
        self._free.pop(uuid, None)
        self._undisturbed.pop(uuid, None)

    def _used_by_others(self, uuid: str) -> str:
        return f"GPU {self._index[uuid]} is used by {self._foreign[uuid]}"


def _jobs(ids: Sequence[int]) -> str:
    unique = sorted(set(ids))
    return ("job " if len(unique) == 1 else "jobs ") + ", ".join(map(str, unique))
