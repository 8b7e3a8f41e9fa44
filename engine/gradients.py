"""Average gradients that nobody else averages, and clip by the global norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
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


def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float, world: World) -> torch.Tensor:
    """Scale gradients so that their global 2-norm is at most `max_norm`; a collective.

    Ranks that hold copies all scale by rank 0's norm. Their own could differ in the last bit,
    where groups of ranks add in another order, and the copies would drift apart.

    Args:
        parameters: All trained parameters, sharded or plain.
        max_norm: 0 only measures.
        world: The ranks.

    Returns:
        The norm before clipping, over all parameters of all ranks: a scalar on their device.
    """
    # Apart, since torch's functions take tensors of one kind only.
    kinds = [
        [p for p in parameters if p.grad is not None and isinstance(p, DTensor) is sharded]
        for sharded in (True, False)
    ]
    norms = [_norm(kind) for kind in kinds if kind]
    norm = norms[0] if len(norms) == 1 else torch.stack([n.to(norms[-1]) for n in norms]).norm()
    copies = bool(kinds[1]) or world.replicas > 1
    if world.size > 1 and copies:
        dist.broadcast(norm, src=0)
    if max_norm:
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
    return norm


def _norm(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
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
