"""The all-reduce: on which devices, and what its speed means."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import psutil

from jobs.doctor.checks.gpus import chosen
from jobs.doctor.checks.keeper import claimed
from jobs.doctor.checks.topology import connected_by_nvlink
from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.doctor.ranks import Outcome, all_reduce
from jobs.machine.gpu import foreign_users
from jobs.spec.rules.strategy import world_size
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs.doctor.patient import Patient
    from jobs.machine.gpu import Gpu

MEASURE: Final = 10.0  # seconds
LIMIT: Final = 150.0  # seconds, imports and the driver's start included
STILL: Final = 30.0  # seconds
_CPU_RANKS: Final = 2
_MOST_CPU_RANKS: Final = 8
# Below these something is wrong, whatever the hardware; bytes a second.
_LEAST_NVLINK: Final = 20e9
_LEAST_PCIE: Final = 2.5e9


def check_all_reduce(patient: Patient) -> Iterator[Finding]:
    """Measure on the chosen GPUs; on CPU ranks where there are none."""
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
    if patient.torch.devices is None:  # which has been said
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
    nvlink = connected_by_nvlink(gpus, patient.nvml.paths)
    yield from judge(outcome, gpus, nvlink=nvlink, ranks=len(gpus))


def free(patient: Patient) -> list[Gpu]:
    """Return the GPUs to measure.

    Those that were named, else as many of the unused as the job wants.
    """
    gpus = chosen(patient)
    if patient.gpus:
        return gpus
    claims = claimed()
    others = foreign_users(gpus, (), claims)
    unused = [gpu for gpu in gpus if gpu.uuid not in claims and gpu.uuid not in others]
    return unused if patient.spec is None else unused[: world_size(patient.spec)]


def judge(outcome: Outcome, gpus: Sequence[Gpu], *, nvlink: bool, ranks: int) -> Iterator[Finding]:
    """Judge the outcome. Pure; `nvlink` is whether NVLinks connect all of the GPUs."""
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
