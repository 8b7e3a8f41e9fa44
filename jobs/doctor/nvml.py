"""What the driver says of GPUs beyond `jobs.machine.devices`: health and connections."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.machine import devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs.doctor.examine import Finding, Patient
    from jobs.machine.gpu import Gpu

PCI: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"  # the PCI class of what can be a GPU
_ANCESTORS: Final = {  # NVML's number for what two GPUs have in common → nvidia-smi's word
    0: "PIX",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}


@dataclass(frozen=True)
class Board:
    """What the driver says of a GPU's health; None is what it does not say.

    Attributes:
        uuid: The GPU's.
        capability: Compute capability, `(9, 0)`.
        persistent: Whether the driver stays loaded while nobody uses it.
        usual_limit: Watts that it may take as it was made.
        errors: Memory errors since the driver was loaded that could not be corrected.
        remapping: `pending` when a reset would put a spare in the place of bad memory, `failed`
            when there is no spare left, "" when all is well.
        links: NVLinks that it has.
        links_up: Those of them that work.
    """

    uuid: str
    capability: tuple[int, int] | None = None
    persistent: bool | None = None
    usual_limit: float | None = None
    errors: int | None = None
    remapping: str | None = None
    links: int = 0
    links_up: int = 0


@dataclass(frozen=True)
class Nvml:
    """One look.

    Attributes:
        on_the_bus: NVIDIA GPUs in this machine, whether or not anyone may use them.
        counted: Those of them that the driver shows.
        driver: Its version.
        cuda: The newest CUDA it can run.
        installed: Whether there is a driver at all.
        problem: Why it does not answer; None when it does.
        gpus: Those that CUDA_VISIBLE_DEVICES leaves to jobs.
        boards: UUID → more of each.
        paths: `(one, other)` UUIDs → how they are connected: NV18, PIX, PXB, PHB, NODE or SYS.
    """

    on_the_bus: int = 0
    counted: int = 0
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    installed: bool = True
    problem: str | None = None
    gpus: tuple[Gpu, ...] = ()
    boards: dict[str, Board] = field(default_factory=dict)
    paths: dict[tuple[str, str], str] = field(default_factory=dict)


def ask_driver(patient: Patient) -> Iterator[Finding]:
    """Ask the driver; `jobs.doctor.checks.gpus` judges the answers."""
    patient.nvml = read_driver()
    yield from ()


def read_driver(pci: Path = PCI) -> Nvml:
    """Ask NVML; takes tens of milliseconds, or for ever when the driver hangs."""
    import pynvml

    on_the_bus = count_on_bus(pci)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return Nvml(on_the_bus, problem=str(error), installed=not missing)
    try:
        gpus = tuple(devices.gpus())
        handles = {gpu.uuid: handle for gpu in gpus if (handle := _handle(pynvml, gpu.uuid))}
        version = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        boards = {uuid: _board(pynvml, uuid, handle) for uuid, handle in handles.items()}
        return Nvml(
            on_the_bus=on_the_bus,
            counted=_ask(pynvml.nvmlDeviceGetCount) or 0,
            driver=_ask(pynvml.nvmlSystemGetDriverVersion),
            cuda=(version // 1000, version % 1000 // 10) if version else None,
            gpus=gpus,
            boards=boards,
            paths=dict(_paths(pynvml, handles, boards)),
        )
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def count_on_bus(pci: Path = PCI) -> int:
    """NVIDIA GPUs that the kernel sees on the PCI bus, with or without a driver."""
    count = 0
    for device in pci.glob("*"):
        with suppress(OSError):
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
            count += vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)
    return count


def _ask(function: Any, *arguments: Any) -> Any:
    """Return the driver's answer; None where it has none."""
    import pynvml

    try:
        answer = function(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def _handle(nvml: Any, uuid: str) -> Any:
    return _ask(nvml.nvmlDeviceGetHandleByUUID, uuid)


def _board(nvml: Any, uuid: str, handle: Any) -> Board:
    capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    persistence = _ask(nvml.nvmlDeviceGetPersistenceMode, handle)
    limit = _ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    links = [
        state
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if (state := _ask(nvml.nvmlDeviceGetNvLinkState, handle, link)) is not None
    ]
    return Board(
        uuid=uuid,
        capability=tuple(capability) if capability else None,
        persistent=None if persistence is None else persistence == nvml.NVML_FEATURE_ENABLED,
        usual_limit=None if limit is None else limit / 1000,
        errors=_ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        remapping=_remapping(nvml, handle),
        links=len(links),
        links_up=sum(state == nvml.NVML_FEATURE_ENABLED for state in links),
    )


def _remapping(nvml: Any, handle: Any) -> str | None:
    """Bad memory that was or is to be replaced: rows since Ampere, pages before."""
    rows = _ask(nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        _, _, pending, failed = rows
        return "failed" if failed else "pending" if pending else ""
    pages = _ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    return None if pages is None else "pending" if pages else ""


def _paths(
    nvml: Any, handles: dict[str, Any], boards: dict[str, Board]
) -> Iterator[tuple[tuple[str, str], str]]:
    names = list(handles)
    for place, first in enumerate(names):
        for other in names[place + 1 :]:
            path = _path(nvml, handles[first], handles[other], (boards[first], boards[other]))
            if path is not None:
                yield (first, other), path
                yield (other, first), path


def _path(nvml: Any, first: Any, other: Any, boards: Sequence[Board]) -> str | None:
    status = _ask(nvml.nvmlDeviceGetP2PStatus, first, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == nvml.NVML_P2P_STATUS_OK:
        # Through switches every link leads to every GPU; else those count that end at the other.
        direct = _links_between(nvml, first, other, boards[0].links)
        return f"NV{direct or min(board.links_up for board in boards)}"
    ancestor = _ask(nvml.nvmlDeviceGetTopologyCommonAncestor, first, other)
    return _ANCESTORS.get(ancestor) if ancestor is not None else None


def _links_between(nvml: Any, first: Any, other: Any, links: int) -> int:
    there = _ask(nvml.nvmlDeviceGetPciInfo, other)
    ends = [_ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, first, link) for link in range(links)]
    return sum(end is not None and there is not None and end.busId == there.busId for end in ends)
