"""Describe this rank, its device, and its process group."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState

from engine.ranks.mesh import build_mesh, collective_timeout
from jobs.errors import UserError
from jobs.machine.cgroups import CGROUPS, OWN, memory_rooms
from jobs.spec.rules.strategy import SHARDING, chosen_strategy, launched_strategy, world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys


# -- host memory ----------------------------------------------------------------------------
# Determine the host memory that this process may still use, limited by the machine and its
# container.


def available_memory(own: Path = OWN, mounted: Path = CGROUPS) -> int:
    """Return the free bytes: the minimum over the machine and every control group of this process.

    Args:
        own: Lists this process's control groups.
        mounted: Where control groups (v1 or v2) are mounted.
    """
    rooms = [left for left, _ in memory_rooms(own, mounted)]
    return min([psutil.virtual_memory().available, *rooms])


# -- affinity -------------------------------------------------------------------------------
# Keep a rank on the CPUs next to its GPU, on machines with several sockets.
#
# Accelerate's `set_numa_affinity` (1.15) uses the local rank as NVML's index of the GPU, which is
# wrong if CUDA_VISIBLE_DEVICES selects GPUs. It also moves only a single thread, and fails in a
# container that has none of those CPUs.


_PCI: Final = Path("/sys/bus/pci/devices")
_THREADS: Final = Path("/proc/self/task")
_ASKED: Final = "ACCELERATE_CPU_AFFINITY"


def stay_near_gpu(*, on_cpu: bool, pci: Path = _PCI) -> str:
    """Pin this process to the allowed CPUs next to its GPU. Call before NCCL starts.

    Args:
        on_cpu: Whether the job runs on the CPU even if there are GPUs.
        pci: Directory of the kernel's PCI devices.

    Returns:
        A log message; "" if all CPUs are equally near, or the kernel does not know.
    """
    os.environ.pop(_ASKED, None)  # accelerate would pin it again, see above
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if on_cpu or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return ""
    facts: Any = torch.cuda.get_device_properties(index)  # the stubs lack these three attributes
    place = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    near = _cpus_near(pci / place) & allowed
    if not near or near == allowed:
        return ""
    for thread in _THREADS.iterdir():  # libraries have started some already
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), near)
    return f"on {len(near)} of {len(allowed)} CPUs, those of the GPU's socket ({place})"


def _cpus_near(device: Path) -> set[int]:
    """Return the CPUs of a device's NUMA node (`0-15,32-47`).

    Empty if the kernel does not report them.
    """
    cpus: set[int] = set()
    with suppress(OSError, ValueError):
        for part in (device / "local_cpulist").read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


# -- world ----------------------------------------------------------------------------------


_T = TypeVar("_T")


@dataclass(frozen=True)
class World:
    """This rank's position in the process group.

    Attributes:
        rank: 0 … size - 1.
        size: World size.
        device: The device that this rank computes on.
        strategy: single, ddp, fsdp2 or hsdp.
        token: A random string, the same on all ranks, new for each attempt.
        reason: Why this strategy was chosen.
        mesh: The ranks as a grid, for strategies that shard; see `engine.ranks.mesh`.
        context_size: Ranks that share each sample.
    """

    rank: int
    size: int
    device: torch.device
    strategy: str
    token: str
    reason: str = ""
    mesh: DeviceMesh | None = None
    context_size: int = 1

    @property
    def main(self) -> bool:
        """Return whether this is the rank that writes shared output."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Return whether the model is sharded."""
        return self.strategy in SHARDING

    @property
    def replicas(self) -> int:
        """Return the number of copies of a sharded model; 1 except for HSDP."""
        return self.mesh.size(0) if self.mesh is not None else 1

    @property
    def data_rank(self) -> int:
        """Return which part of the global batch this rank trains on; a context group shares one."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """Return the number of parts into which the global batch is divided."""
        return self.size // self.context_size

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all ranks. A collective.

        Args:
            value: Any shape, on this rank's device; the same shape on every rank.
        """
        if self.size == 1:
            return value
        # Gloo has no AVG, so sum and divide on every backend.
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value.div_(self.size)

    def any(self, flags: list[bool]) -> list[bool]:
        """Return, for each flag, whether it is set on any rank. A collective on the CPU group."""
        if self.size == 1:
            return flags
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes]

    def gather(self, value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
        """Return every rank's value, in rank order. A collective.

        Args:
            value: Any picklable value.
            group: A group of all ranks; None for the default group.
        """
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    def from_main(self, value: _T, group: dist.ProcessGroup | None = None) -> _T:
        """Return rank 0's value on all ranks. A collective.

        Args:
            value: Any picklable value; ignored on other ranks.
            group: A group of all ranks; None for the default group.
        """
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks. A collective."""
        if self.size > 1:
            dist.barrier()

    def device_uuid(self) -> str | None:
        """Return the GPU's UUID as NVML spells it."""
        if self.device.type != "cuda":
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def gpu(self) -> tuple[str | None, int | None]:
        """Return the GPU's name and its memory in bytes, for readers on other machines."""
        if self.device.type != "cuda":
            return None, None
        properties = torch.cuda.get_device_properties(self.device)
        return properties.name, properties.total_memory


def take_gpu(spec: DeviceKeys) -> None:
    """Make this rank's GPU the current one, before importing libraries that query it.

    Torchao 0.18 queries the current GPU's properties on import (torch 2.14), which would open a
    context on the first GPU in every rank.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not _computes_on_cpu(spec) and local < torch.cuda.device_count():
        torch.cuda.set_device(local)


def start_world(spec: JobSpec) -> World:
    """Join the process group and select this rank's device.

    Raises:
        UserError: The launcher started a different number of ranks than the job sets, or torch does
            not see the GPUs assigned to the job.
    """
    on_cpu = spec.device == "cpu" or not torch.cuda.is_available()
    _check_gpus(spec)
    options: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options["timeout"] = collective_timeout(spec)
        if not on_cpu:
            # Requests and checkpoints use small CPU tensors, so add gloo to NCCL.
            options["backend"] = "cpu:gloo,cuda:nccl"
            # This makes NCCL connect now instead of guessing a device later.
            options["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    state = PartialState(cpu=on_cpu, **options)
    if state.num_processes != world_size(spec):
        raise UserError(
            f"the job has {world_size(spec)} ranks but the launcher started {state.num_processes}",
            "launch with the same --num_processes",
        )
    # All CPU ranks share one CPU device, which accelerate would number. For a single GPU,
    # accelerate omits the number.
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    common = [uuid.uuid4().hex[:12], *_strategy(spec)]
    if state.num_processes > 1:
        dist.broadcast_object_list(common, src=0)
    token, strategy, reason = common
    return World(
        rank=state.process_index,
        size=state.num_processes,
        device=device,
        strategy=strategy,
        token=token,
        reason=reason,
        mesh=build_mesh(spec, strategy, state.num_processes, device.type),
        context_size=spec.context_parallel_size,
    )


def _check_gpus(spec: DeviceKeys) -> None:
    """Refuse to train on the CPU, or twice on one GPU, if the job was assigned GPUs.

    Raises:
        UserError: Torch sees fewer GPUs than this machine's ranks need.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    needed = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if _computes_on_cpu(spec) or not (given or spec.device == "cuda"):
        return
    if (seen := torch.cuda.device_count()) < needed:
        raise UserError(
            f"torch {torch.__version__} sees {seen} of the {needed} GPUs assigned to this job"
            f"{f' ({given})' if given else ''}",
            "`fsdp-tui doctor` checks the driver and torch",
        )


def _computes_on_cpu(spec: DeviceKeys) -> bool:
    """Return whether the job or the launcher selects the CPU."""
    launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    return spec.device == "cpu" or launched


def _strategy(spec: RecipeKeys) -> tuple[str, str]:
    """Return the launcher's strategy; ranks started by hand choose their own."""
    strategy, reason = launched_strategy(os.environ)
    return (strategy, reason) if reason else chosen_strategy(spec)


def leave_world() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
