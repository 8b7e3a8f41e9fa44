"""Who the ranks are and what they run on."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from jobs.conflicts import chosen_strategy, world_size
from jobs.errors import UserError

if TYPE_CHECKING:
    from jobs.spec import JobSpec


@dataclass(frozen=True)
class World:
    """This rank's place among the others.

    Attributes:
        rank: 0 … size - 1.
        size: World size.
        device: Where this rank computes.
        strategy: single, ddp or fsdp2.
        token: A random text, the same on all ranks, new for each attempt.
    """

    rank: int
    size: int
    device: torch.device
    strategy: str
    token: str

    @property
    def main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all ranks. A collective.

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

    def barrier(self) -> None:
        """Wait for all ranks. A collective."""
        if self.size > 1:
            dist.barrier()

    def memory(self) -> dict[str, int | None]:
        """Bytes that torch holds on this rank's GPU; empty on CPU."""
        if self.device.type != "cuda":
            return {}
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "peak": torch.cuda.max_memory_allocated(self.device),
        }

    def device_uuid(self) -> str | None:
        """The GPU's UUID as NVML spells it."""
        if self.device.type != "cuda":
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"


def start_world(spec: JobSpec) -> World:
    """Join the process group and take this rank's device.

    Raises:
        UserError: The launcher started another number of ranks than the job asks for.
    """
    on_cpu = spec.device == "cpu" or not torch.cuda.is_available()
    options: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options["timeout"] = timedelta(seconds=spec.distributed_timeout_seconds)
        if not on_cpu:
            # Requests and checkpoints use small CPU tensors: gloo beside NCCL.
            options["backend"] = "cpu:gloo,cuda:nccl"
    state = PartialState(cpu=on_cpu, **options)
    if state.num_processes != world_size(spec):
        raise UserError(
            f"the job asks for {world_size(spec)} ranks and the launcher started "
            f"{state.num_processes}",
            "launch with the same --num_processes",
        )
    strategy, _ = chosen_strategy(spec)
    token = [uuid.uuid4().hex[:12]]
    if state.num_processes > 1:
        dist.broadcast_object_list(token, src=0)
    return World(
        rank=state.process_index,
        size=state.num_processes,
        device=torch.device(state.device),
        strategy=strategy,
        token=token[0],
    )


def leave_world() -> None:
    """Leave the process group in order."""
    if dist.is_initialized():
        dist.destroy_process_group()
