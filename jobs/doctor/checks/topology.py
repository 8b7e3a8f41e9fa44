"""How the GPUs are connected, and whether they can reach each other's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.doctor.checks.gpus import chosen
from jobs.doctor.finding import Finding, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jobs.doctor.checks.torch_build import TorchFacts
    from jobs.doctor.patient import Patient
    from jobs.machine.gpu import Gpu

_WORDS: Final = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "a processor",
    "SYS": "the link between processors",
}
_MOST_NAMED: Final = 4  # pairs in a sentence


def check_topology(patient: Patient) -> Iterator[Finding]:
    """Check the links between the GPUs that jobs would have."""
    if patient.nvml is None:
        return
    gpus = chosen(patient)
    if len(gpus) > 1 and patient.nvml.paths:
        yield judge_paths(gpus, patient.nvml.paths)
    if len(gpus) > 1 and patient.torch is not None and patient.torch.devices is not None:
        yield judge_peers(gpus, patient.torch)


def judge_paths(gpus: Sequence[Gpu], paths: Mapping[tuple[str, str], str]) -> Finding:
    """Return the matrix of connections, as `nvidia-smi topo -m` has it. Pure."""
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
    """Whether data goes from GPU to GPU, or through host memory. Pure."""
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
    """Yield a line for each GPU, a column for each GPU. Pure."""
    width = max(4, *(len(kind) for kind in kinds.values()))
    yield "     " + " ".join(str(index).rjust(width) for index in indices)
    for row in indices:
        cells = (kinds.get((row, column), "·").rjust(width) for column in indices)
        yield f"{row:>4} " + " ".join(cells)


def connected_by_nvlink(gpus: Sequence[Gpu], paths: Mapping[tuple[str, str], str]) -> bool:
    """Whether there are NVLinks between any two of them. Pure."""
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
