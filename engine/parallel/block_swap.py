"""Keep the frozen weights of some blocks in host memory, on one GPU.

A block's weights are copied to the GPU before the block computes, beside the computing of others,
and dropped after it, in backward again. It is FSDP2 over a single rank with its CPU offload, on
some blocks alone: torch has the streams, the events and the prefetching.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.parallel.sharding import precision_policy
from jobs.errors import UserError

if TYPE_CHECKING:
    from engine.families import Family
    from engine.ranks.world import World
    from jobs.spec.job_spec import RecipeKeys


def spread(count: int, blocks: int) -> list[int]:
    """Places of `count` among `blocks`, as far apart as they can be.

    Between two that are swapped there are others, whose computing hides the copies.
    """
    return [(2 * number + 1) * blocks // (2 * count) for number in range(count)]


def swap_blocks(model: torch.nn.Module, spec: RecipeKeys, family: Family, world: World) -> str:
    """Have `swap_blocks` blocks, spread over the model, kept in host memory.

    Called while parameters are on the meta device; `engine.model.files.weights.materialise` then
    puts what is a `DTensor` into host memory.

    Args:
        model: With its adapter, which stays on the GPU.
        spec: The job.
        family: Its family.
        world: One rank.

    Returns:
        A line for the log; "" where the job swaps none.

    Raises:
        UserError: The model has fewer blocks.
    """
    if not spec.swap_blocks:
        return ""
    blocks: list[Any] = [m for m in model.modules() if type(m).__name__ in family.facts.blocks]
    if spec.swap_blocks > len(blocks):
        raise UserError(
            f"swap_blocks: {spec.swap_blocks}, but the model has {len(blocks)} blocks",
            f"set it to {len(blocks)} or less",
        )
    chosen = [blocks[place] for place in spread(spec.swap_blocks, len(blocks))]
    if not dist.is_initialized():  # a job of one rank has no process group of its own
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    trained = {p for p in model.parameters() if p.requires_grad}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(world.device.type, (1,)),
        "mp_policy": precision_policy(spec),
        "offload_policy": CPUOffloadPolicy(pin_memory=world.device.type == "cuda"),
        "reshard_after_forward": True,
    }
    for block in chosen:
        fully_shard(block, ignored_params=trained & set(block.parameters()), **options)
    swapped = {p for p in model.parameters() if isinstance(p, DTensor)}
    # The root holds nothing; it is there for its units to share streams.
    fully_shard(model, ignored_params=set(model.parameters()) - swapped, **options)
    for block, following in pairwise(chosen):
        block.set_modules_to_forward_prefetch([following])
    size = sum(p.numel() * p.element_size() for p in swapped)
    return (
        f"{len(chosen)} of {len(blocks)} blocks stay in host memory ({size / 2**30:.2f} GiB) and "
        "are copied to the GPU when they compute"
    )
