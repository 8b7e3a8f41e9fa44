"""Query the driver for GPU facts beyond `jobs.machine.devices`: health and connections."""

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
_DISPLAY: Final = "0x03"  # PCI class prefix of display controllers
_ANCESTORS: Final = {  # NVML's common-ancestor level → nvidia-smi's name for it
    0: "PIX",
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}


@dataclass(frozen=True)
class Board:
    """A GPU's health as the driver reports it; None for unsupported values.

    Attributes:
        uuid: The GPU's.
        capability: Compute capability, for example `(9, 0)`.
        persistent: Whether the driver stays loaded while the GPU is idle.
        usual_limit: Default power limit in watts.
        errors: Uncorrectable memory errors since the driver was loaded.
        remapping: `pending` if a reset will replace bad memory by a spare row, `failed` if there is
            no spare left, "" if there is no bad memory.
        links: Number of NVLinks.
        links_up: Number of active NVLinks.
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
    """One snapshot of what the driver reports.

    Attributes:
        on_the_bus: Number of NVIDIA GPUs in this machine, accessible or not.
        counted: Number of those that the driver lists.
        driver: Driver version.
        cuda: Newest CUDA version it supports.
        installed: Whether a driver is installed.
        problem: Why it does not answer; None if it does.
        gpus: GPUs that CUDA_VISIBLE_DEVICES leaves to jobs.
        boards: UUID → health.
        paths: Pair of UUIDs → their connection: NV18, PIX, PXB, PHB, NODE or SYS.
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
    """Store the driver's answers for `jobs.doctor.checks.gpus`, which judges them."""
    patient.nvml = read_driver()
    yield from ()


def read_driver(pci: Path = PCI) -> Nvml:
    """Query NVML. Takes tens of milliseconds, or forever if the driver hangs."""
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
    """Count the NVIDIA GPUs that the kernel sees on the PCI bus, with or without a driver."""
    count = 0
    for device in pci.glob("*"):
        with suppress(OSError):
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
            count += vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)
    return count


def _ask(function: Any, *arguments: Any) -> Any:
    """Call NVML; return None if it does not support the call."""
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
    """Return the state of bad-memory replacement: rows since Ampere, pages before."""
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
        # With NVSwitch, every link reaches every GPU; without, count the links that end at the
        # other.
        direct = _links_between(nvml, first, other, boards[0].links)
        return f"NV{direct or min(board.links_up for board in boards)}"
    ancestor = _ask(nvml.nvmlDeviceGetTopologyCommonAncestor, first, other)
    return _ANCESTORS.get(ancestor) if ancestor is not None else None


def _links_between(nvml: Any, first: Any, other: Any, links: int) -> int:
    there = _ask(nvml.nvmlDeviceGetPciInfo, other)
    ends = [_ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, first, link) for link in range(links)]
    return sum(end is not None and there is not None and end.busId == there.busId for end in ends)
