"""The GPUs: whether jobs can have them, and whether they are well."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Final

from jobs.doctor.checks.keeper import claimed
from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.machine.gpu import find, foreign_users
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from jobs.doctor.nvml import Board, Nvml
    from jobs.doctor.patient import Patient
    from jobs.machine.gpu import Gpu

_LOWERED: Final = 0.95  # of the usual power limit; below it someone has lowered it
_NO_DRIVER: Final = (  # part of NVML's words, in lower case → what to do
    ("mismatch", "the driver was updated while the system was running: reboot"),
    ("permission", "get access to /dev/nvidia* (often by group membership)"),
)


def check_gpus(patient: Patient) -> Iterator[Finding]:
    """List the GPUs, and what keeps jobs from them."""
    nvml = patient.nvml
    if nvml is None:
        return
    yield from judge_presence(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if nvml.gpus:
        yield from judge_use(nvml.gpus, claimed())
        yield from judge_health(nvml)


def chosen(patient: Patient) -> list[Gpu]:
    """The usable GPUs among those that were named here or in the job, else all usable ones."""
    present = patient.nvml.gpus if patient.nvml is not None else ()
    configured = patient.spec.gpus if patient.spec is not None else None
    names = patient.gpus or (tuple(map(str, configured)) if isinstance(configured, list) else ())
    if names:
        matches = [match[0] for name in names if (match := find(name, present))]
        return [gpu for gpu in dict.fromkeys(matches) if gpu.unusable is None]
    return [gpu for gpu in present if gpu.unusable is None]


def check_names(patient: Patient) -> Iterator[Finding]:
    """Whether the devices that were named on the command line exist."""
    nvml = patient.nvml
    for name in patient.gpus if nvml is not None else ():
        assert nvml is not None
        match = find(name, nvml.gpus)
        if match is None:
            have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in nvml.gpus) or "none"
            yield fail("--gpus", f"no GPU {name} on this machine", f"choose from: {have}")
        elif match[0].unusable is not None:
            yield fail("--gpus", f"GPU {match[0].index} {match[0].unusable}", "choose another")


def judge_presence(nvml: Nvml, setting: str | None) -> Iterator[Finding]:
    """Report the GPUs. Pure; `setting` is CUDA_VISIBLE_DEVICES."""
    if nvml.on_the_bus and not nvml.installed:
        yield warn(
            "GPUs",
            f"{nvml.on_the_bus} on the PCI bus, but no NVIDIA driver",
            "install it, or start the container with --gpus all; without it, jobs run on CPU ranks",
        )
        return
    if nvml.on_the_bus and nvml.problem is not None:
        advice = next(
            (what for words, what in _NO_DRIVER if words in nvml.problem.lower()),
            "load the NVIDIA driver: `nvidia-smi` must work",
        )
        yield fail(
            "GPUs",
            f"{nvml.on_the_bus} on the PCI bus, but the driver does not answer ({nvml.problem})",
            advice,
        )
        return
    if not nvml.gpus:
        if nvml.counted:
            yield warn(
                "GPUs",
                f"CUDA_VISIBLE_DEVICES={setting!r} hides all {nvml.counted}",
                "unset CUDA_VISIBLE_DEVICES, or name GPUs in it",
            )
        else:
            yield ok("GPUs", "none on this machine; jobs run on CPU ranks", gpus=[])
        return
    kinds = Counter(_kind(gpu, nvml.boards.get(gpu.uuid)) for gpu in nvml.gpus)
    facts = [
        {"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory": gpu.memory_total}
        for gpu in nvml.gpus
    ]
    words = "; ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if len(nvml.gpus) < nvml.counted:
        words += f"; CUDA_VISIBLE_DEVICES hides {nvml.counted - len(nvml.gpus)} more"
    if len(kinds) > 1:
        yield warn(
            "GPUs",
            words,
            "give a job GPUs of one model: all wait for the slowest, and the smallest limits "
            "memory",
            gpus=facts,
        )
    else:
        yield ok("GPUs", words, gpus=facts)


def judge_use(gpus: Sequence[Gpu], claims: dict[str, int]) -> Iterator[Finding]:
    """Report GPUs that jobs cannot have, or not now. Pure; `claims` maps UUIDs to jobs of ours."""
    for gpu in gpus:
        if gpu.unusable is not None and gpu.problem is not None:
            yield fail(
                f"GPU {gpu.index}",
                gpu.unusable,
                "see `dmesg` for Xid errors; use other GPUs until it is fixed",
            )
        elif gpu.unusable is not None:
            yield warn(
                f"GPU {gpu.index}",
                gpu.unusable,
                f"sudo nvidia-smi -i {gpu.index} -mig 0 turns MIG off",
            )
    others = foreign_users(gpus, (), claims)
    for gpu in gpus:
        if gpu.uuid in others:
            yield warn(
                f"GPU {gpu.index}",
                f"is used by others: {others[gpu.uuid]}",
                "jobs wait for it unless they set share_gpus: true",
            )
    held = [gpu for gpu in gpus if gpu.uuid in claims]
    if held:
        jobs = ", ".join(f"GPU {gpu.index} (job {claims[gpu.uuid]})" for gpu in held)
        yield ok("in use", f"by your jobs: {jobs}")


def judge_health(nvml: Nvml) -> Iterator[Finding]:
    """Errors, heat and limits. Pure."""
    sick = []
    for gpu in nvml.gpus:
        board = nvml.boards.get(gpu.uuid)
        if board is not None:
            sick += list(_judge_board(gpu, board))
    yield from sick
    off = [
        gpu.index for gpu in nvml.gpus if (b := nvml.boards.get(gpu.uuid)) and b.persistent is False
    ]
    if off:
        yield warn(
            "persistence",
            f"off on GPU {_indices(off)}: the driver reloads for every job",
            "sudo nvidia-smi -pm 1, or start nvidia-persistenced",
        )
    asked = [board for board in nvml.boards.values() if board.errors is not None]
    if not sick and asked:
        yield ok("health", "no memory errors, overheating or lowered limits")


def _judge_board(gpu: Gpu, board: Board) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    if board.remapping == "failed":
        yield fail(name, "has bad memory and no spare rows left", "replace it")
    elif board.remapping == "pending":
        yield warn(
            name,
            "has bad memory that is remapped at the next reset",
            f"when it is idle: sudo nvidia-smi -i {gpu.index} -r, or reboot",
        )
    if board.errors:
        yield fail(
            name,
            f"had {board.errors} uncorrectable memory errors",
            "reboot; if they come back, replace the GPU",
        )
    if gpu.power_limit and board.usual_limit and gpu.power_limit < _LOWERED * board.usual_limit:
        yield warn(
            name,
            f"is limited to {gpu.power_limit:.0f} W instead of {board.usual_limit:.0f} W",
            f"sudo nvidia-smi -i {gpu.index} -pl {board.usual_limit:.0f}, if allowed",
        )
    slowed = [word for word in (gpu.throttle or "").split(", ") if word not in ("", "power limit")]
    if slowed:
        yield warn(
            name,
            f"is slowed down ({', '.join(slowed)})",
            "check its cooling and power supply; the other ranks wait for it",
        )
    if board.links_up < board.links and board.links_up:
        yield warn(
            name,
            f"{board.links_up} of its {board.links} NVLinks work",
            "see `nvidia-smi nvlink -e`; reset the GPU or reboot",
        )


def _kind(gpu: Gpu, board: Board | None) -> str:
    memory = f", {size(gpu.memory_total)}" if gpu.memory_total else ""
    capability = board.capability if board is not None else None
    digits = f", compute {capability[0]}.{capability[1]}" if capability else ""
    return f"{gpu.name}{memory}{digits}"


def _indices(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers))
