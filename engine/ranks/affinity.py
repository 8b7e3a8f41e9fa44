"""Keep a rank on the CPUs beside its GPU, where a machine has several sockets.

Accelerate's `set_numa_affinity` (1.15) takes the local rank for NVML's index of the GPU, which is
another one's wherever CUDA_VISIBLE_DEVICES chooses, moves a single thread, and fails in a container
that has none of those CPUs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

_PCI: Final = Path("/sys/bus/pci/devices")
_THREADS: Final = Path("/proc/self/task")
_ASKED: Final = "ACCELERATE_CPU_AFFINITY"


def stay_near_gpu(*, on_cpu: bool, pci: Path = _PCI) -> str:
    """Move this process to the CPUs beside its GPU, of those that it may use; before NCCL starts.

    Args:
        on_cpu: Whether the job is to run on the CPU whatever there is.
        pci: The PCI devices that the kernel knows.

    Returns:
        What was done, for the log; "" where all CPUs are as near, or the kernel knows none.
    """
    os.environ.pop(_ASKED, None)  # accelerate would move it again, see above
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if on_cpu or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return ""
    facts: Any = torch.cuda.get_device_properties(index)  # its types lack these three
    place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = _cpus_beside(pci / place) & allowed
    if not near or near == allowed:
        return ""
    for thread in _THREADS.iterdir():  # libraries have started some already
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), near)
    return f"on {len(near)} of {len(allowed)} CPUs, those of the GPU's socket ({place})"


def _cpus_beside(device: Path) -> set[int]:
    """Return the CPUs of a device's NUMA node (`0-15,32-47`).

    Empty where the kernel does not report them.
    """
    cpus: set[int] = set()
    with suppress(OSError, ValueError):
        for part in (device / "local_cpulist").read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
