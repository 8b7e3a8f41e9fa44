"""Average gradients that nobody else averages, and clip by the global norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.world import World

_BUCKET: Final = 64 << 20  # elements; bounds the extra memory of one flat bucket


def average_gradients(parameters: Sequence[torch.nn.Parameter], world: World) -> None:
    """Replace each plain gradient by its mean over the ranks; a collective.

    FSDP2 has already averaged the gradients of sharded parameters (`DTensor`s). Parameters whole
    on every rank (DDP, LoRA placed `replicated`) are averaged here, in flat buckets, before
    clipping and the optimizer step, so that all replicas stay identical.
    """
    if world.size == 1:
        return
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    for parameter in plain:
        if parameter.grad is None:  # unused this step here, but perhaps not on other ranks
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([p.grad for p in plain if p.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        world.average(flat)
        offset = 0
        for gradient in bucket:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()


def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most `max_norm`.

    Args:
        parameters: All trained parameters, all sharded or all plain.
        max_norm: 0 only measures.

    Returns:
        The norm before clipping, over all parameters of all ranks: a scalar on their device.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one dtype and about `_BUCKET` elements."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > _BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
