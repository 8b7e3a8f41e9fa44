"""What a GPU is, which one a name means, and which ones strangers use. Pure.

`jobs.machine.devices`, where the driver is asked, offers all of this under its own name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

HIDDEN_USE: Final = 2**30  # bytes that no idle GPU holds by itself


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU. The pid is the driver's, which may be the host's.

    `user` and `command` are given only where this pid is known to be that process.
    `kind` is `compute` or `graphics`; `mig` is the UUID of the MIG instance it runs on.
    """

    pid: int
    memory: int | None
    kind: str = "compute"
    user: str | None = None
    command: str | None = None
    mig: str | None = None


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU that MIG presents as a device of its own."""

    uuid: str
    name: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_total: int | None = None
    memory_used: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One look at a GPU: bytes (a total of 0 is unknown), percent, degrees Celsius, watts, MHz.

    `throttle` says in words why the clock is held back, "" when it is not. `problem` says why the
    driver cannot reach the GPU, continuing "GPU 3 …"; what was known before is still there.
    `pcie_lanes` is what the link to the host has now and `pcie_lanes_limit` what it could have;
    `nvlinks` counts the links to other GPUs that are up.
    """

    index: int
    uuid: str
    name: str
    memory_total: int
    memory_used: int | None = None
    utilisation: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    processes: tuple[GpuProcess, ...] = field(default=())
    clock: int | None = None
    clock_limit: int | None = None
    memory_clock: int | None = None
    throttle: str | None = None
    pci: str | None = None
    mig_mode: bool = False
    mig: tuple[MigInstance, ...] = ()
    problem: str | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    pcie_lanes_limit: int | None = None
    nvlinks: int | None = None

    @property
    def unusable(self) -> str | None:
        """Why no job may have this GPU, continuing "GPU 3 …"; None when one may."""
        if self.problem is None and self.mig_mode:
            return (
                "is in MIG mode; jobs need whole GPUs, because ranks on MIG instances cannot "
                "exchange data"
            )
        return self.problem


def find(name: str, present: Sequence[Gpu]) -> tuple[Gpu, MigInstance | None] | None:
    """Find the GPU or MIG instance that a user or `CUDA_VISIBLE_DEVICES` calls by this name.

    Args:
        name: An index, the UUID or a beginning of it (`GPU-…`, `MIG-…`) that fits only one
            device, or `MIG-<UUID of the GPU>/<GPU instance>/<compute instance>`.
        present: The GPUs to choose from.
    """
    if name.isdecimal():
        chosen = [gpu for gpu in present if gpu.index == int(name)]
        return (chosen[0], None) if chosen else None
    if not name.startswith(("GPU-", "MIG-")):
        return None
    matches: list[tuple[Gpu, MigInstance | None]] = []
    for gpu in present:
        if gpu.uuid.startswith(name):
            matches.append((gpu, None))
        for part in gpu.mig:
            place = f"MIG-{gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"
            if part.uuid.startswith(name) or place == name:
                matches.append((gpu, part))
    return matches[0] if len(matches) == 1 else None


def visible(present: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Return the GPUs that a value of `CUDA_VISIBLE_DEVICES` shows, still in index order. Pure.

    As in CUDA, the first entry that names no device ends the list (`0,2,-1,1` shows 0 and 2). A
    GPU of which only some MIG instances are named is shown with these alone.
    """
    if setting is None:
        return list(present)
    whole: set[str] = set()
    parts: set[str] = set()
    for name in setting.split(","):
        match = find(name.strip(), present)
        if match is None:
            break
        gpu, part = match
        if part is None:
            whole.add(gpu.uuid)
        else:
            parts.add(part.uuid)
    shown = []
    for gpu in present:
        named = tuple(part for part in gpu.mig if part.uuid in parts)
        if gpu.uuid in whole or named:
            shown.append(gpu if gpu.uuid in whole else replace(gpu, mig=named))
    return shown


def foreign_users(
    present: Sequence[Gpu],
    ours: Collection[int],
    claimed: Collection[str] = (),
    *,
    brief: bool = False,
) -> dict[str, str]:
    """Find GPUs used by processes that are not ours, and by whom. Pure.

    Args:
        present: The GPUs as `gpus()` shows them.
        ours: The pids of the processes of our jobs.
        claimed: UUIDs of the GPUs that our jobs hold. These are never foreign: in a container the
            driver may give pids that nobody can match with ours.
        brief: Name only the process that holds most, without pid and memory.

    Returns:
        UUID → a line for people: user, command, pid and memory. What merely draws (a desktop) and
        holds little memory does not count; much memory that no visible process holds does.
    """
    lines = {}
    for gpu in present:
        if gpu.uuid in claimed:
            continue
        strangers = [
            process
            for process in gpu.processes
            if process.pid not in ours
            and (process.kind == "compute" or (process.memory or 0) >= HIDDEN_USE)
        ]
        if strangers:
            strangers.sort(key=lambda process: -(process.memory or 0))
            more = f" and {len(strangers) - 2} more" if len(strangers) > 2 else ""
            pairs = [_in_words(process) for process in strangers[:2]]
            full = "; ".join(f"{who} ({details})" for who, details in pairs) + more
            lines[gpu.uuid] = pairs[0][0] if brief else full
        elif (hidden := hidden_use(gpu)) >= HIDDEN_USE:
            lines[gpu.uuid] = "hidden processes" + ("" if brief else f" ({_held(hidden)})")
    return lines


def hidden_use(gpu: Gpu) -> int:
    """Bytes in use though the driver names no process, as in containers. Pure."""
    return 0 if gpu.processes else gpu.memory_used or 0


def _in_words(process: GpuProcess) -> tuple[str, str]:
    """Who it is, and the details."""
    pid, memory = f"pid {process.pid}", _held(process.memory)
    if process.command is None:
        who = pid if process.user is None else f"{process.user}: {pid}"
        return who, memory
    program, _, rest = process.command.partition(" ")
    command = f"{os.path.basename(program)} {rest}".strip()
    command = command if len(command) <= 60 else command[:59] + "…"
    return f"{process.user or 'someone'}: {command}", f"{pid}, {memory}"


def _held(memory: int | None) -> str:
    return "memory unknown" if memory is None else size(memory)


def still_held(
    present: Sequence[Gpu], uuids: Collection[str], pids: Collection[int]
) -> list[tuple[int, int]]:
    """`(GPU index, pid)` wherever one of these processes still holds memory on these GPUs. Pure."""
    return [
        (gpu.index, process.pid)
        for gpu in present
        if gpu.uuid in uuids
        for process in gpu.processes
        if process.pid in pids
    ]
