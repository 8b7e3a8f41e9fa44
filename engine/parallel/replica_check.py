"""Prove that what should be the same on several ranks is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engine.model.files.weights import local_part
from engine.ranks.mesh import REPLICATE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.ranks.world import World


def check_replicas(trained: Mapping[str, torch.nn.Parameter], world: World) -> None:
    """Compare trained tensors with their copies on other ranks; a collective.

    Plain tensors (DDP, LoRA placed `replicated`) have a copy on every rank, HSDP's shards one in
    every replica. Two copies are the same when the sums of their bits are: a single differing
    value is always seen, and nothing leaves the device but one number a tensor.

    Args:
        trained: Name → parameter, the same names in the same order on every rank.
        world: The ranks.

    Raises:
        RuntimeError: Copies differ; names a tensor.
    """
    if world.size == 1:
        return
    plain = {n: p.detach() for n, p in trained.items() if not isinstance(p, DTensor)}
    _compare(plain, None)
    if world.mesh is not None and world.replicas > 1:
        shards = {n: local_part(p.detach()) for n, p in trained.items() if isinstance(p, DTensor)}
        _compare(shards, world.mesh.get_group(REPLICATE))


def _compare(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    if not tensors:
        return
    sums = torch.stack([_sum_of_bits(tensor) for tensor in tensors.values()])
    lowest, highest = sums.clone(), sums.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    wrong = (lowest != highest).nonzero().flatten().tolist()
    if wrong:
        names = list(tensors)
        raise RuntimeError(
            f"the ranks' copies of {len(wrong)} trained tensors differ, such as {names[wrong[0]]}"
        )


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar; `tensor` is of any 4-byte type, trained tensors are fp32."""
    return tensor.contiguous().view(torch.int32).sum(dtype=torch.int64)
