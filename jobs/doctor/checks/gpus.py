"""Check the GPUs: whether jobs can use them, and whether they are healthy."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import psutil

from jobs.doctor.checks.queue import claimed
from jobs.doctor.examine import Finding, fail, ok, warn
from jobs.doctor.processes import Outcome, all_reduce
from jobs.machine.gpu import find, foreign_users
from jobs.memory.calibration import record_rate
from jobs.spec.rules.strategy import world_size
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from jobs.doctor.checks.software import TorchFacts
    from jobs.doctor.examine import Patient
    from jobs.doctor.nvml import Board, Nvml
    from jobs.machine.gpu import Gpu


_LOWERED: Final = 0.95  # share of the default power limit below which someone must have lowered it
_NO_DRIVER: Final = (  # part of NVML's message, in lower case → advice
    ("mismatch", "the driver was updated while the system was running: reboot"),
    ("permission", "get access to /dev/nvidia* (often by group membership)"),
)


def check_gpus(patient: Patient) -> Iterator[Finding]:
    """List the GPUs and what keeps jobs from using them."""
    nvml = patient.nvml
    if nvml is None:
        return
    yield from judge_presence(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if nvml.gpus:
        yield from judge_use(nvml.gpus, claimed())
        yield from judge_health(nvml)


def chosen(patient: Patient) -> list[Gpu]:
    """Return the usable GPUs that the command line or the job names, or else all usable ones."""
    present = patient.nvml.gpus if patient.nvml is not None else ()
    configured = patient.spec.gpus if patient.spec is not None else None
    names = patient.gpus or (tuple(map(str, configured)) if isinstance(configured, list) else ())
    if names:
        matches = [match[0] for name in names if (match := find(name, present))]
        return [gpu for gpu in dict.fromkeys(matches) if gpu.unusable is None]
    return [gpu for gpu in present if gpu.unusable is None]


def check_names(patient: Patient) -> Iterator[Finding]:
    """Check that the devices named on the command line exist."""
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
    """Report GPUs that jobs cannot use, or not now. Pure; `claims`: UUID → id of our job."""
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
    """Report errors, heat and lowered limits. Pure."""
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


# -- topology -------------------------------------------------------------------------------
# How the GPUs are connected, and whether they can access each other's memory.


_WORDS: Final = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "a processor",
    "SYS": "the link between processors",
}
_MOST_NAMED: Final = 4  # pairs listed in a sentence


def check_topology(patient: Patient) -> Iterator[Finding]:
    """Check the links between the GPUs that jobs would use."""
    if patient.nvml is None:
        return
    gpus = chosen(patient)
    if len(gpus) > 1 and patient.nvml.paths:
        yield judge_paths(gpus, patient.nvml.paths)
    if len(gpus) > 1 and patient.torch is not None and patient.torch.devices is not None:
        yield judge_peers(gpus, patient.torch)


def judge_paths(gpus: Sequence[Gpu], paths: Mapping[tuple[str, str], str]) -> Finding:
    """Build the matrix of connections, like `nvidia-smi topo -m`. Pure."""
    path_of_pair = {
        (gpu.index, other.index): paths.get((gpu.uuid, other.uuid), "?")
        for gpu in gpus
        for other in gpus
        if gpu is not other
    }
    kinds = {"NVLink" if kind.startswith("NV") else kind for kind in path_of_pair.values()}
    slow = sorted({kind for kind in kinds if kind in ("SYS", "NODE")})
    far = [pair for pair, kind in path_of_pair.items() if kind in slow and pair[0] < pair[1]]
    facts = {"paths": [[*pair, kind] for pair, kind in path_of_pair.items() if pair[0] < pair[1]]}
    lines = tuple(matrix([gpu.index for gpu in gpus], path_of_pair)) if len(kinds) > 1 else ()
    if len(kinds) == 1:
        only = kinds.pop()
        links = sorted(set(path_of_pair.values()))
        words = f"NVLink ({', '.join(links)})" if only == "NVLink" else _WORDS.get(only, only)
        finding = ok("topology", f"between any two GPUs: {words}", **facts)
    elif "NVLink" in kinds and far:
        finding = warn(
            "topology",
            f"{_pairs(far)} are connected only by {_WORDS[slow[-1]]}",
            "use GPUs connected by NVLink; all ranks wait for the slowest pair",
            **facts,
        )
    else:
        words = "; ".join(sorted(_WORDS.get(kind, kind) for kind in kinds))
        finding = ok("topology", f"between two GPUs: {words}", **facts)
    return Finding(**vars(finding) | {"lines": lines})


def judge_peers(gpus: Sequence[Gpu], torch: TorchFacts) -> Finding:
    """Report whether data goes directly from GPU to GPU or through host memory. Pure."""
    index = {gpu.uuid: gpu.index for gpu in gpus}
    numbers = {n: index.get(device["uuid"]) for n, device in enumerate(torch.devices or ())}
    apart = [
        (first, second)
        for first_index, other in torch.apart
        if (first := numbers.get(first_index)) is not None
        and (second := numbers.get(other)) is not None
        if first < second
    ]
    if not apart:
        return ok("peer access", "every GPU can access every other GPU's memory", apart=[])
    return warn(
        "peer access",
        f"{_pairs(apart)} cannot access each other's memory",
        "data goes through host memory; on a server, check ACS and IOMMU in the BIOS",
        apart=[list(pair) for pair in apart],
    )


def matrix(indices: Sequence[int], kinds: Mapping[tuple[int, int], str]) -> Iterator[str]:
    """Yield the matrix: a line and a column per GPU. Pure."""
    width = max(4, *(len(kind) for kind in kinds.values()))
    yield "     " + " ".join(str(index).rjust(width) for index in indices)
    for row in indices:
        cells = (kinds.get((row, column), "·").rjust(width) for column in indices)
        yield f"{row:>4} " + " ".join(cells)


def connected_by_nvlink(gpus: Sequence[Gpu], paths: Mapping[tuple[str, str], str]) -> bool:
    """Return whether NVLinks connect every pair. Pure."""
    return len(gpus) > 1 and all(
        paths.get((gpu.uuid, other.uuid), "").startswith("NV")
        for gpu in gpus
        for other in gpus
        if gpu is not other
    )


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    named = ", ".join(f"{first}–{other}" for first, other in pairs[:_MOST_NAMED])
    more = f" and {len(pairs) - _MOST_NAMED} more pairs" if len(pairs) > _MOST_NAMED else ""
    return f"GPUs {named}{more}"


# -- all reduce -----------------------------------------------------------------------------
# Measure an all-reduce and judge its speed.


MEASURE: Final = 10.0  # seconds
LIMIT: Final = 150.0  # seconds, including imports and the driver's start
STILL: Final = 30.0  # seconds
_CPU_RANKS: Final = 2
_MOST_CPU_RANKS: Final = 8
# Bytes per second below which something is wrong on any hardware.
_LEAST_NVLINK: Final = 20e9
_LEAST_PCIE: Final = 2.5e9


def check_all_reduce(patient: Patient) -> Iterator[Finding]:
    """Measure an all-reduce on the chosen GPUs, or on CPU ranks if there are none."""
    if patient.quick or patient.nvml is None or patient.torch is None:
        return
    spec = patient.spec
    on_cpu = not patient.nvml.gpus or (spec is not None and spec.device == "cpu")
    if on_cpu and not patient.gpus:
        asked = world_size(spec) if spec is not None else _CPU_RANKS
        cores = psutil.cpu_count() or 1
        ranks = max(_CPU_RANKS, min(asked, cores, _MOST_CPU_RANKS))
        yield from judge(_measure(patient, [], ranks), [], nvlink=False, ranks=ranks)
        return
    if patient.torch.devices is None:  # already reported by `ask_torch`
        return
    gpus = free(patient)
    if not gpus:
        yield warn(
            "all-reduce",
            "skipped: every GPU is in use, or none of those named is usable",
            "name GPUs with --gpus to measure beside running jobs",
        )
        return
    outcome = _measure(patient, [gpu.uuid for gpu in gpus], len(gpus))
    record_link(outcome, gpus)
    nvlink = connected_by_nvlink(gpus, patient.nvml.paths)
    yield from judge(outcome, gpus, nvlink=nvlink, ranks=len(gpus))


def record_link(outcome: Outcome, gpus: Sequence[Gpu]) -> None:
    """Record the bus bandwidth between GPUs of one model, for later estimates."""
    names = {gpu.name for gpu in gpus}
    if len(gpus) > 1 and len(names) == 1 and outcome.sizes and outcome.sizes[-1].bus > 0:
        with suppress(OSError):  # a full disk, or another user's
            record_rate("link", names.pop(), round(outcome.sizes[-1].bus))


def free(patient: Patient) -> list[Gpu]:
    """Return the GPUs to measure: those that were named, or else as many idle ones as the job
    wants.
    """
    gpus = chosen(patient)
    if patient.gpus:
        return gpus
    claims = claimed()
    others = foreign_users(gpus, (), claims)
    unused = [gpu for gpu in gpus if gpu.uuid not in claims and gpu.uuid not in others]
    return unused if patient.spec is None else unused[: world_size(patient.spec)]


def judge(outcome: Outcome, gpus: Sequence[Gpu], *, nvlink: bool, ranks: int) -> Iterator[Finding]:
    """Judge the outcome. Pure; `nvlink`: whether NVLinks connect all of the GPUs."""
    where = f"GPU {', '.join(str(gpu.index) for gpu in gpus)}" if gpus else f"{ranks} CPU ranks"
    facts = {
        "gpus": [gpu.index for gpu in gpus],
        "ranks": ranks,
        "sizes": [asdict(measured) for measured in outcome.sizes],
    }
    if outcome.left:
        yield fail(
            "left over",
            f"processes {', '.join(map(str, outcome.left))} cannot be killed",
            "the driver holds them; only a reboot ends them",
        )
    if not outcome.sizes:
        more = f"; NCCL says: {outcome.warning}" if outcome.warning else ""
        yield fail(
            "all-reduce",
            f"{where}: {outcome.problem}{more}",
            _advice(outcome, gpus),
            **facts,
            silent=list(outcome.silent),
        )
        return
    small, large = outcome.sizes[0], outcome.sizes[-1]
    latency = f"{1e6 * small.seconds:.0f} µs for {size(small.bytes)}"
    if ranks == 1:
        finding = ok(
            "all-reduce", f"{where}: one rank starts, with no peer to exchange with", **facts
        )
    else:
        words = f"{where}: {large.bus / 1e9:.1f} GB/s bus, {latency}"
        if outcome.gathered is not None:
            words += f"; all-gather {outcome.gathered.bus / 1e9:.1f} GB/s"
        least = _LEAST_NVLINK if nvlink else _LEAST_PCIE
        finding = ok("all-reduce", words, **facts)
        if gpus and large.bus < least:
            finding = warn(
                "all-reduce",
                f"{words}; expected over {'NVLink' if nvlink else 'PCIe'}: {least / 1e9:g} or more",
                "check topology and peer access above, and whether others use the GPUs",
                **facts,
            )
    yield Finding(**vars(finding) | {"lines": tuple(_table(outcome)) if ranks > 1 else ()})


def _measure(patient: Patient, gpus: list[str], ranks: int) -> Outcome:
    return all_reduce(gpus, ranks, run_id=patient.run_id, seconds=MEASURE, limit=LIMIT, still=STILL)


def _advice(outcome: Outcome, gpus: Sequence[Gpu]) -> str:
    if outcome.silent and gpus:
        named = ",".join(str(gpu.index) for n, gpu in enumerate(gpus) if n in outcome.silent)
        return f"try again without GPU {named}, and with NCCL_P2P_DISABLE=1 to narrow it down"
    if outcome.silent:
        return "check the machine's load, and `dmesg` for killed processes"
    return (
        "run `fsdp-tui doctor` again with NCCL_DEBUG=INFO"
        if gpus
        else "check the results above; ranks need torch, gloo and a host name that resolves"
    )


def _table(outcome: Outcome) -> Iterator[str]:
    yield f"{'message':>9} {'time':>10} {'bus':>11}"
    for measured in outcome.sizes:
        micro = 1e6 * measured.seconds
        time = f"{micro:.0f} µs" if micro < 1e4 else f"{micro / 1e3:.0f} ms"
        yield f"{size(measured.bytes):>9} {time:>10} {measured.bus / 1e9:>6.2f} GB/s"
