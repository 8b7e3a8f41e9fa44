"""Which devices this machine has and how busy they are. The only place that talks to NVML.

GPUs are UUIDs inside and indices for people, in PCI bus order. A value that the driver does not
give is None, never an exception.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU. The pid is the driver's, which may be the host's."""

    pid: int
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One look at a GPU: bytes, percent, degrees Celsius, watts."""

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


@dataclass(frozen=True)
class Host:
    """One look at the machine: bytes and percent of all cores."""

    cores: int
    cpu_percent: float
    memory_total: int
    memory_used: int


def gpus() -> list[Gpu]:
    """Every GPU that jobs may use, in PCI bus order; empty without a driver.

    An inherited `CUDA_VISIBLE_DEVICES` (as schedulers and containers set it) is respected.
    """
    nvml = _nvml()
    if nvml is None:
        return []
    found = []
    for index in range(_or(0, nvml.nvmlDeviceGetCount)):
        handle = _or(None, partial(nvml.nvmlDeviceGetHandleByIndex, index))
        if handle is not None:
            found.append(_read(nvml, index, handle))
    return [gpu for gpu in found if _visible(gpu)]


def host() -> Host:
    """CPU and memory now; the first call of a process reports 0 % CPU."""
    memory = psutil.virtual_memory()
    return Host(
        cores=psutil.cpu_count() or 1,
        cpu_percent=psutil.cpu_percent(interval=None),
        memory_total=memory.total,
        memory_used=memory.total - memory.available,
    )


def _read(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = _or(None, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _or(None, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    power = _or(None, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    limit = _or(None, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    processes = _or([], lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return Gpu(
        index=index,
        uuid=_text(_or(f"GPU-{index}", lambda: nvml.nvmlDeviceGetUUID(handle))),
        name=_text(_or("GPU", lambda: nvml.nvmlDeviceGetName(handle))),
        memory_total=int(memory.total) if memory is not None else 0,
        memory_used=int(memory.used) if memory is not None else None,
        utilisation=int(rates.gpu) if rates is not None else None,
        temperature=_or(
            None, lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        power=power / 1000 if power is not None else None,
        power_limit=limit / 1000 if limit is not None else None,
        processes=tuple(GpuProcess(int(p.pid), p.usedGpuMemory) for p in processes),
    )


def _visible(gpu: Gpu) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(
        name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
        for name in names
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _or(default: Any, call: Callable[[], Any]) -> Any:
    """The call's value, or `default` where this driver or GPU cannot say."""
    import pynvml

    with suppress(pynvml.NVMLError):
        return call()
    return default


@cache
def _nvml() -> Any:
    """The `pynvml` module, ready to use; None on a machine without the driver.

    Initialised once per process: it takes tens of milliseconds on a machine with many GPUs.
    """
    import pynvml  # 0.07 s; not paid by commands that never look at GPUs

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
