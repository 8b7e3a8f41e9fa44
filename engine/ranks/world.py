"""Who the ranks are and what they run on."""

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
# How much host memory this process may still take: of the machine, and of its container.


def available_memory(own: Path = OWN, mounted: Path = CGROUPS) -> int:
    """Bytes; the least of what the machine and every control group around this process leave.

    Args:
        own: Lists this process's control groups.
        mounted: Where they are, of either version.
    """
    rooms = [left for left, _ in memory_rooms(own, mounted)]
    return min([psutil.virtual_memory().available, *rooms])


# -- affinity -------------------------------------------------------------------------------
# Keep a rank on the CPUs beside its GPU, where a machine has several sockets.
#
# Accelerate's `set_numa_affinity` (1.15) takes the local rank for NVML's index of the GPU,
# which is another one's wherever CUDA_VISIBLE_DEVICES chooses, moves a single thread, and
# fails in a container that has none of those CPUs.


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


# -- world ----------------------------------------------------------------------------------


_T = TypeVar("_T")


@dataclass(frozen=True)
class World:
    """This rank's place among the others.

    Attributes:
        rank: 0 … size - 1.
        size: World size.
        device: Where this rank computes.
        strategy: single, ddp, fsdp2 or hsdp.
        token: A random text, the same on all ranks, new for each attempt.
        reason: Why this strategy.
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
        """Whether this rank writes what is written once."""
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Whether the model is sharded."""
        return self.strategy in SHARDING

    @property
    def replicas(self) -> int:
        """How many copies of a sharded model there are; 1 but for HSDP."""
        return self.mesh.size(0) if self.mesh is not None else 1

    @property
    def data_rank(self) -> int:
        """Which part of the global batch this rank trains on; shared by a context group."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """Into how many parts the global batch is divided."""
        return self.size // self.context_size

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all ranks. A collective.

        Args:
            value: Any shape, on this rank's device; the same shape on every rank.
        """
        if self.size == 1:
            return value
        # Gloo has no AVG, so sum and divide everywhere alike.
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value.div_(self.size)

    def any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank. A collective on the CPU group."""
        if self.size == 1:
            return flags
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes]

    def gather(self, value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
        """Every rank's value, by rank. A collective.

        Args:
            value: What can be pickled.
            group: All ranks; None for the default group.
        """
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    def from_main(self, value: _T, group: dist.ProcessGroup | None = None) -> _T:
        """Rank 0's value, on all ranks. A collective.

        Args:
            value: What can be pickled; only rank 0's counts.
            group: All ranks; None for the default group.
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
    """Make this rank's GPU the current one, before libraries are imported that ask for it.

    Torchao 0.18 asks the current GPU for its properties while it is imported (torch 2.14), which
    would open a context on the first GPU in every rank.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not _computes_on_cpu(spec) and local < torch.cuda.device_count():
        torch.cuda.set_device(local)


def start_world(spec: JobSpec) -> World:
    """Join the process group and take this rank's device.

    Raises:
        UserError: The launcher started another number of ranks than the job asks for, or torch
            does not see the GPUs that the job was given.
    """
    on_cpu = spec.device == "cpu" or not torch.cuda.is_available()
    _check_gpus(spec)
    options: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options["timeout"] = collective_timeout(spec)
        if not on_cpu:
            # Requests and checkpoints use small CPU tensors: gloo beside NCCL.
            options["backend"] = "cpu:gloo,cuda:nccl"
            # NCCL connects now, and never guesses a device.
            options["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    state = PartialState(cpu=on_cpu, **options)
    if state.num_processes != world_size(spec):
        raise UserError(
            f"the job has {world_size(spec)} ranks but the launcher started {state.num_processes}",
            "launch with the same --num_processes",
        )
    # All CPU ranks compute on the one CPU, which accelerate numbers. Of a single GPU it leaves the
    # number out.
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
    """Refuse to train on the CPU, or twice on one GPU, where the job was given GPUs.

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
    """Whether the job or the launcher says so."""
    launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    return spec.device == "cpu" or launched


def _strategy(spec: RecipeKeys) -> tuple[str, str]:
    """Return the launcher's strategy; ranks started by hand choose their own."""
    strategy, reason = launched_strategy(os.environ)
    return (strategy, reason) if reason else chosen_strategy(spec)


def leave_world() -> None:
    """Leave the process group in order."""
    if dist.is_initialized():
        dist.destroy_process_group()
