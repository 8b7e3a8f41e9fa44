"""Query which devices this machine has and how busy they are; `jobs.doctor` asks NVML for more.

Internally GPUs are identified by UUID, for users by their index in PCI bus order. A value that the
driver does not provide is None, never an exception.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import psutil

from jobs.machine.gpu import Gpu, GpuProcess, MigInstance, find, foreign_users, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Gpu",
    "GpuProcess",
    "Host",
    "MigInstance",
    "find",
    "foreign_users",
    "gpus",
    "host",
    "visible",
]

_RETRY_AFTER: Final = 30.0  # seconds until a missing driver is tried again
_SLOW: Final = 5.0  # seconds for which names, limits, MIG mode and command lines are cached
# the kernel's fixed inode of the host's pid namespace
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
_COMMAND_LENGTH: Final = 300
_SLOWDOWNS: Final = {  # bits of NVML's clock event reasons; being idle does not count
    0x04: "power limit",
    0x10: "sync boost",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
# set in addition to the specific reason, if that is known
_SLOWED: Final = (0x08, "hardware slowdown")
_GPU_ERRORS: Final = {  # NVML's error → the GPU's problem
    4: "is not accessible to you",
    15: "is lost (it fell off the bus); reboot the machine",
    16: "must be reset before use",
}


@dataclass(frozen=True)
class Host:
    """A snapshot of the machine: bytes, and percent of all cores."""

    cores: int
    cpu_percent: float
    memory_total: int
    memory_used: int


def gpus() -> list[Gpu]:
    """Return every GPU that jobs may use, in PCI bus order; empty without a driver.

    Respects an inherited `CUDA_VISIBLE_DEVICES`, as set by schedulers and containers. Its indices
    count in PCI bus order, and so do the returned ones, regardless of hidden GPUs.
    """
    with _LOCK:
        nvml = _nvml()
        present = _read_all(nvml) if nvml is not None else []
    return visible(present, os.environ.get("CUDA_VISIBLE_DEVICES"))


def host() -> Host:
    """Return current CPU and memory usage; the first call of a process reports 0 % CPU."""
    memory = psutil.virtual_memory()
    return Host(
        cores=psutil.cpu_count() or 1,
        cpu_percent=psutil.cpu_percent(interval=None),
        memory_total=memory.total,
        memory_used=memory.total - memory.available,
    )


# -- the driver --------------------------------------------------------------------------------


class _Driver:
    """The connection to NVML, and cached answers."""

    def __init__(self) -> None:
        self.ready = False
        self.inherited = False  # by a fork; NVML's connection belongs to the parent
        self.retry_at = 0.0
        self.absent: set[Any] = set()  # calls that this driver is too old or too new for
        self.facts: dict[int, _Facts] = {}  # by NVML's index
        self.owners: dict[tuple[int, float], tuple[str, str]] = {}
        self.owners_until = 0.0

    def close(self, nvml: Any) -> None:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        self.ready = self.inherited = False


_driver = _Driver()
_LOCK: Final = threading.RLock()


def _forked() -> None:
    _driver.inherited = _driver.ready
    _LOCK.release()


# Hold the lock during a fork, so that no child inherits a lock (ours or NVML's) that is never
# released.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_forked)


def _nvml() -> Any:
    """Return the initialized `pynvml` module; None while there is no driver.

    Initializing takes tens of milliseconds on a machine with many GPUs, so it is done once per
    process. After a failure it is retried later, because drivers are loaded and repaired.
    """
    import pynvml  # takes 0.07 s; commands that do not use GPUs avoid it

    if _driver.inherited:
        _driver.close(pynvml)
        _driver.retry_at = 0.0
    now = time.monotonic()
    if not _driver.ready and now >= _driver.retry_at:
        _driver.retry_at = now + _RETRY_AFTER
        _driver.absent.clear()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            _driver.ready = True
    return pynvml if _driver.ready else None


class _Ask:
    """Query the driver about one device; the answer is None if the driver has none.

    Once the driver says that the device is gone, `problem` is set and no more queries are made.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle
        self.problem: str | None = None

    def __call__(self, *calls: str | tuple[Any, ...]) -> Any:
        """Return the first answer of several calls, given as a name or as name and arguments."""
        for call in calls:
            name, *arguments = (call,) if isinstance(call, str) else call
            function = getattr(self.nvml, name, None)
            if function is None or self.problem is not None or call in _driver.absent:
                continue
            try:
                return function(self.handle, *arguments)
            except self.nvml.NVMLLibraryMismatchError:  # not a subclass of NVMLError
                _driver.absent.add(call)
            except self.nvml.NVMLError as error:
                if error.value == self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    _driver.absent.add(call)
                elif error.value != self.nvml.NVML_ERROR_NO_PERMISSION:
                    self.problem = _GPU_ERRORS.get(error.value)
        return None


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """Rarely changing facts of a GPU, and when they were read (monotonic seconds)."""

    at: float
    gpu: Gpu
    pci: tuple[int, int, int] | None


def _read_all(nvml: Any) -> list[Gpu]:
    """Return all GPUs. Unreachable ones keep their position, so that no other is renumbered."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:  # the driver was unloaded or replaced
        _driver.close(nvml)
        return []
    now = time.monotonic()
    if now >= _driver.owners_until:
        _driver.owners.clear()
        _driver.owners_until = now + _SLOW
    placed: list[tuple[tuple[int, ...], Gpu]] = []
    place: tuple[int, ...] = ()
    for position in range(count):
        gpu = _read(nvml, position)
        facts = _driver.facts.get(position)
        # NVML guarantees no order. A GPU without a known address stays behind its neighbor.
        place = facts.pci if facts is not None and facts.pci is not None else (*place, position)
        placed.append((place, gpu))
    placed.sort(key=lambda entry: entry[0])
    return [replace(gpu, index=index) for index, (_, gpu) in enumerate(placed)]


def _read(nvml: Any, position: int) -> Gpu:
    try:
        ask = _Ask(nvml, nvml.nvmlDeviceGetHandleByIndex(position))
    except nvml.NVMLError as error:
        return _unreachable(position, _GPU_ERRORS.get(error.value, f"cannot be reached ({error})"))
    remembered = _slow_facts(ask, position)
    memory = _memory(ask)
    rates = ask("nvmlDeviceGetUtilizationRates")
    sensor = nvml.NVML_TEMPERATURE_GPU
    power = ask("nvmlDeviceGetPowerUsage")
    reasons = ask(
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    )
    instances = list(_instances(ask)) if remembered.mig_mode else []
    gpu = replace(
        remembered,
        memory_total=memory.total if memory is not None else remembered.memory_total,
        memory_used=memory.used if memory is not None else None,
        utilisation=rates.gpu if rates is not None else None,
        temperature=ask(
            ("nvmlDeviceGetTemperature", sensor), ("nvmlDeviceGetTemperatureV", sensor)
        ),
        power=power / 1000 if power is not None else None,
        processes=_processes(ask, instances),
        clock=ask(("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
        memory_clock=ask(("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)),
        throttle=_throttle(reasons),
        mig=tuple(instance for _, instance in instances),
    )
    return gpu if ask.problem is None else _unreachable(position, ask.problem)


def _slow_facts(ask: _Ask, position: int) -> Gpu:
    """Return the GPU's values that do not change between refreshes."""
    # Query this every time: all cached values belong to this UUID.
    uuid = _text(ask("nvmlDeviceGetUUID"))
    if ask.problem is not None:
        return _unreachable(position, ask.problem)
    remembered = _driver.facts.get(position)
    if remembered and remembered.gpu.uuid == uuid and time.monotonic() - remembered.at < _SLOW:
        return remembered.gpu
    address = ask("nvmlDeviceGetPciInfo")
    memory = _memory(ask)
    limit = ask("nvmlDeviceGetEnforcedPowerLimit")
    mode = ask("nvmlDeviceGetMigMode")
    gpu = Gpu(
        index=position,
        uuid=uuid or f"unknown-{position}",
        name=_text(ask("nvmlDeviceGetName")) or "GPU",
        memory_total=memory.total if memory is not None else 0,
        power_limit=limit / 1000 if limit is not None else None,
        clock_limit=ask(("nvmlDeviceGetMaxClockInfo", ask.nvml.NVML_CLOCK_SM)),
        pci=_text(address.busId) if address is not None else None,
        mig_mode=mode is not None and mode[0] == ask.nvml.NVML_DEVICE_MIG_ENABLE,
        problem=None if uuid else "reports no UUID",
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_lanes=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_lanes_limit=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=_nvlinks(ask),
    )
    pci = (address.domain, address.bus, address.device) if address is not None else None
    if ask.problem is None:
        _driver.facts[position] = _Facts(time.monotonic(), gpu, pci)
    return gpu


def _nvlinks(ask: _Ask) -> int | None:
    """Return the number of active NVLinks; None if the GPU has none."""
    up = None
    for link in range(ask.nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(("nvmlDeviceGetNvLinkState", link))
        if state is None:  # there are no more links
            return up
        up = (up or 0) + (state == ask.nvml.NVML_FEATURE_ENABLED)
    return up


def _unreachable(position: int, problem: str) -> Gpu:
    """Return an unreachable GPU with its last known values."""
    remembered = _driver.facts.get(position)
    gpu = (
        remembered.gpu if remembered is not None else Gpu(position, f"unknown-{position}", "GPU", 0)
    )
    return replace(gpu, problem=problem)


def _memory(ask: _Ask) -> Any:
    """Return total and used bytes; the v2 call excludes memory reserved by the driver."""
    return ask(("nvmlDeviceGetMemoryInfo", ask.nvml.nvmlMemory_v2), "nvmlDeviceGetMemoryInfo")


def _instances(ask: _Ask) -> Iterator[tuple[_Ask, MigInstance]]:
    """Yield the MIG instances.

    Handles are not cached, since a layout change invalidates all of them.
    """
    for place in range(ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = ask(("nvmlDeviceGetMigDeviceHandleByIndex", place))
        if handle is None:  # a gap; other instances may follow
            continue
        part = _Ask(ask.nvml, handle)
        memory = _memory(part)
        instance = MigInstance(
            uuid=_text(part("nvmlDeviceGetUUID")),
            name=_text(part("nvmlDeviceGetName")) or "MIG",
            gpu_instance=part("nvmlDeviceGetGpuInstanceId"),
            compute_instance=part("nvmlDeviceGetComputeInstanceId"),
            memory_total=memory.total if memory is not None else None,
            memory_used=memory.used if memory is not None else None,
        )
        yield part, instance


def _processes(
    whole: _Ask, instances: Sequence[tuple[_Ask, MigInstance]]
) -> tuple[GpuProcess, ...]:
    """Return the processes that hold memory, each once. With MIG, query the instances: the GPU
    as a whole answers only root."""
    processes: dict[tuple[int, str | None], GpuProcess] = {}
    parts: list[tuple[_Ask, str | None]] = [(part, it.uuid) for part, it in instances]
    for ask, mig in parts or [(whole, None)]:
        for kind, name in (("compute", "Compute"), ("graphics", "Graphics")):
            call = f"nvmlDeviceGet{name}RunningProcesses"
            for entry in ask(call, f"{call}_v2") or ():
                # In containers some drivers report 0 bytes, which no process on a GPU uses.
                memory = entry.usedGpuMemory or None
                process = GpuProcess(entry.pid, memory, kind, *_owner_of(entry.pid), mig)
                processes.setdefault((entry.pid, mig), process)
    return tuple(processes.values())


def _owner_of(pid: int) -> tuple[str | None, str | None]:
    """Return user and command line of a process that the driver names; None if they are unknown."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        bearer = (pid, process.create_time())
        if not _is_local_pid(*bearer):
            return None, None
        if bearer not in _driver.owners:
            words = " ".join(process.cmdline()) or process.name()
            # The text is untrusted: its characters must not control a terminal.
            plain = "".join(c if c.isprintable() else " " for c in words[:_COMMAND_LENGTH])
            _driver.owners[bearer] = (process.username(), " ".join(plain.split()))
        return _driver.owners[bearer]
    return None, None


@lru_cache(maxsize=256)
def _is_local_pid(pid: int, _started: float) -> bool:
    """Return whether the driver's pid refers to the process with this pid in our namespace.

    In the host's own pid namespace it does. In a container some drivers translate pids and others
    report the host's, which may be another process here. Then only a process that has CUDA's
    library mapped can be the right one. `_started` is part of the cache key, because pids are
    reused.
    """
    if os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE:
        return True
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return any("/libcuda.so" in line for line in maps)


def _throttle(reasons: int | None) -> str | None:
    if reasons is None:
        return None
    words = [word for bit, word in _SLOWDOWNS.items() if reasons & bit]
    if not words and reasons & _SLOWED[0]:
        return _SLOWED[1]
    return ", ".join(dict.fromkeys(words))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
