"""Which queued job starts now, and on what. Pure: no clock, no disk, no driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Request:
    """A queued job. `wanted`: GPU UUIDs, a count of any GPUs, or None for CPU ranks."""

    job: int
    wanted: int | Sequence[str] | None


@dataclass(frozen=True)
class Start:
    """The job may start on these GPUs (none for CPU ranks)."""

    job: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """The job waits, and why, for people."""

    job: int
    reason: str


def place(
    queue: Sequence[Request],
    claims: Mapping[str, int],
    devices: Sequence[str],
    running_on_cpu: Sequence[int] = (),
    cpu_slots: int = 1,
    foreign: Mapping[str, str] | None = None,
) -> list[Start | Wait]:
    """Decide for each queued job, in order. Nobody overtakes a job for GPUs it waits for.

    Args:
        queue: Queued jobs, the first to be served first.
        claims: GPU UUID → job that holds it.
        devices: UUIDs of the machine's GPUs, in index order.
        running_on_cpu: Jobs that run on CPU ranks now.
        cpu_slots: How many jobs may run on CPU ranks at once.
        foreign: GPU UUID → who uses it, for processes that are not ours; such a GPU is used
            only by a job that names it, never for a count of any.

    Returns:
        One decision per queued job, in the same order.
    """
    holder = dict(claims)
    index = {uuid: position for position, uuid in enumerate(devices)}
    others = foreign or {}
    reserved: dict[str, int] = {}  # GPU → waiting job that is to have it next
    on_cpu = list(running_on_cpu)
    decisions: list[Start | Wait] = []
    for request in queue:
        decision: Start | Wait
        if request.wanted is None:
            if len(on_cpu) < cpu_slots:
                decision = Start(request.job, ())
                on_cpu.append(request.job)
            else:
                decision = Wait(request.job, f"waits for {_jobs(on_cpu)} to leave the CPU")
        elif isinstance(request.wanted, int):
            free = [
                uuid
                for uuid in devices
                if uuid not in holder and uuid not in reserved and uuid not in others
            ]
            if len(free) >= request.wanted:
                decision = Start(request.job, tuple(free[: request.wanted]))
            else:
                reserved |= dict.fromkeys(free, request.job)
                decision = Wait(
                    request.job, f"waits for {request.wanted} free GPUs; {len(free)} now"
                )
        else:
            decision = _named(request.job, request.wanted, holder, reserved, index)
            if isinstance(decision, Wait):
                reserved |= {uuid: request.job for uuid in request.wanted if uuid not in reserved}
        if isinstance(decision, Start):
            holder |= dict.fromkeys(decision.gpus, request.job)
        decisions.append(decision)
    return decisions


def _named(
    job: int,
    wanted: Sequence[str],
    holder: Mapping[str, int],
    reserved: Mapping[str, int],
    index: Mapping[str, int],
) -> Start | Wait:
    missing = [uuid for uuid in wanted if uuid not in index]
    if missing:
        return Wait(job, f"waits for GPU {missing[0]}, which this machine does not show")
    busy = [uuid for uuid in wanted if uuid in holder or uuid in reserved]
    if not busy:
        return Start(job, tuple(wanted))
    blockers = [holder.get(uuid, reserved.get(uuid, 0)) for uuid in busy]
    where = ", ".join(str(index[uuid]) for uuid in busy)
    return Wait(job, f"waits for {_jobs(blockers)} on GPU {where}")


def _jobs(ids: Sequence[int]) -> str:
    unique = sorted(set(ids))
    return ("job " if len(unique) == 1 else "jobs ") + ", ".join(map(str, unique))
