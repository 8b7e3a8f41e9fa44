"""Define GPUs, resolve their names, and find those in use by others. Pure.

`jobs.machine.devices`, which queries the driver, re-exports all of this.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

HIDDEN_USE: Final = 2**30  # bytes; more than any idle GPU uses by itself


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU. The pid is the driver's, which may be the host's.

    `user` and `command` are set only if this pid is known to be that process. `kind` is `compute`
    or `graphics`; `mig` is the UUID of its MIG instance.
    """

    pid: int
    memory: int | None
    kind: str = "compute"
    user: str | None = None
    command: str | None = None
    mig: str | None = None


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU that MIG presents as a separate device."""

    uuid: str
    name: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_total: int | None = None
    memory_used: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A snapshot of a GPU: bytes (a total of 0 is unknown), percent, degrees Celsius, watts, MHz.

    `throttle` says in words why the clock is reduced, "" if it is not. `problem` says why the
    driver cannot reach the GPU, continuing "GPU 3 …"; the other fields then have their last known
    values. `pcie_lanes` is the current width of the link to the host and `pcie_lanes_limit` its
    maximum; `nvlinks` counts the active links to other GPUs.
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
        """Return why no job may use this GPU, continuing "GPU 3 …"; None if one may."""
        if self.problem is None and self.mig_mode:
            return (
                "is in MIG mode; jobs need whole GPUs, because ranks on MIG instances cannot "
                "exchange data"
            )
        return self.problem


def find(name: str, present: Sequence[Gpu]) -> tuple[Gpu, MigInstance | None] | None:
    """Find the GPU or MIG instance with a name given by a user or `CUDA_VISIBLE_DEVICES`.

    Args:
        name: An index, a unique prefix of the UUID (`GPU-…`, `MIG-…`), or `MIG-<UUID of the
            GPU>/<GPU instance>/<compute instance>`.
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
    """Return the GPUs that a value of `CUDA_VISIBLE_DEVICES` exposes, in index order. Pure.

    As in CUDA, the first invalid entry ends the list (`0,2,-1,1` exposes 0 and 2). If only some MIG
    instances of a GPU are named, it has only these.
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
    """Find GPUs used by processes that are not ours. Pure.

    Args:
        present: The GPUs as returned by `gpus()`.
        ours: Pids of our jobs' processes.
        claimed: UUIDs of the GPUs that our jobs hold. These are never foreign, because in a
            container the driver may report pids that cannot be matched with ours.
        brief: Name only the process with the most memory, without pid and memory.

    Returns:
        UUID → a line for users: user, command, pid and memory. A process that only draws (a
            desktop) and uses little memory does not count; much memory without a visible process
            does.
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
    """Return the bytes in use if the driver lists no process, as in containers. Pure."""
    return 0 if gpu.processes else gpu.memory_used or 0


def _in_words(process: GpuProcess) -> tuple[str, str]:
    """Return the name of a process, and details."""
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
    """Return `(GPU index, pid)` for every one of these processes with memory on these GPUs.

    Pure.
    """
    return [
        (gpu.index, process.pid)
        for gpu in present
        if gpu.uuid in uuids
        for process in gpu.processes
        if process.pid in pids
    ]
