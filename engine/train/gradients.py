"""Average gradients that nobody else averages, and clip by the global norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engine.model.files.weights import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.ranks.world import World

BUCKET: Final = 8 << 20  # elements; large enough to be sent at full speed
AT_ONCE: Final = 64  # sharded tensors in one call; see `parts_of`
UNDER_WAY: Final = 2  # buckets in flight besides the next one; bounds the extra memory


class Averager:
    """Replaces gradients by their means over the ranks, while backward still runs.

    FSDP2 averages the gradients of sharded parameters (`DTensor`s). Replicated parameters (DDP,
    LoRA placed `replicated`) are averaged here, in flat buckets, before clipping and the optimizer
    step, so that all replicas stay identical. A bucket's contents never change, so that sums have
    one order whatever has been trained before; only the time when it is sent does.

    Args:
        parameters: What is trained; the same on every rank, in the same order.
        world: The ranks.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], world: World) -> None:
        self._world = world
        plain = [p for p in parameters if not isinstance(p, DTensor)] if world.size > 1 else []
        # Backward goes through the model from its end.
        self._buckets = list(buckets(plain[::-1]))
        self._place = {p: n for n, bucket in enumerate(self._buckets) for p in bucket}
        self._order: list[int] = []  # in which buckets are sent; empty until it is known
        self._filled: list[int] = []
        self._missing: list[set[torch.nn.Parameter]] = []
        self._sent = 0
        self._under_way: list[tuple[int, torch.Tensor, Any]] = []

    def watch(self) -> None:
        """Register hooks that are called when gradients are ready."""
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """Prepare for the last backward of the step."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._filled = []

    def finish(self) -> None:
        """Average the remaining gradients, and wait for those under way; a collective."""
        for number in self._order or range(len(self._buckets)):
            if number not in self._order[: self._sent]:
                self._send(number)
        while self._under_way:
            self._receive()
        if self._missing and not self._order:
            # Rank 0's order: collectives must have one order. Unused buckets come last.
            filled = self._world.from_main(self._filled)
            rest = [number for number in range(len(self._buckets)) if number not in filled]
            self._order = [*filled, *rest]
        self._missing, self._sent = [], 0

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if not self._missing:
            return
        number = self._place[parameter]
        self._missing[number].remove(parameter)
        if self._missing[number]:
            return
        self._filled.append(number)
        while self._sent < len(self._order) and not self._missing[self._order[self._sent]]:
            self._send(self._order[self._sent])
            self._sent += 1

    @torch.no_grad()
    def _send(self, number: int) -> None:
        bucket = self._buckets[number]
        for parameter in bucket:
            if parameter.grad is None:  # unused this step here, but perhaps not on other ranks
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        # Gloo has no AVG, so every backend sums and divides.
        work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)
        self._under_way.append((number, flat, work))
        if len(self._under_way) > UNDER_WAY:
            self._receive()

    @torch.no_grad()
    def _receive(self) -> None:
        """Have the first bucket under way replace its gradients; on a GPU nothing waits here."""
        number, flat, work = self._under_way.pop(0)
        work.wait()
        flat.div_(self._world.size)
        gradients = [p.grad for p in self._buckets[number] if p.grad is not None]
        means = flat.split([gradient.numel() for gradient in gradients])
        shaped = [mean.view_as(g) for mean, g in zip(means, gradients, strict=True)]
        torch._foreach_copy_(gradients, shaped)


def average_gradients(parameters: Sequence[torch.nn.Parameter], world: World) -> None:
    """Replace each plain gradient by its mean over the ranks, after backward; a collective."""
    Averager(parameters, world).finish()


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
    sharded = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
    plain = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    norms = [_norm_of_shards(sharded)] if sharded else []
    norms += [torch.nn.utils.get_total_norm(plain)] if plain else []
    norm = norms[0] if len(norms) == 1 else torch.stack([n.to(norms[-1]) for n in norms]).norm()
    copies = bool(plain) or world.replicas > 1
    if world.size > 1 and copies:
        dist.broadcast(norm, src=0)
    if max_norm:
        _scale([*map(local_part, sharded), *plain], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def parts_of(
    parameters: Sequence[torch.nn.Parameter], at_once: int | None = None
) -> list[list[torch.nn.Parameter]]:
    """Split parameters for functions of many tensors: sharded ones in parts, then all plain ones.

    Apart, since torch's functions take tensors of one kind only. In parts, since the first time
    that one is called with a list of `DTensor`s, torch 2.13 takes time with the square of its
    length to find out how the result is sharded: AdamW 14 s of CPU in the first step of 1,700
    tensors (SDXL has as many), and 0.2 to 2.4 s in parts.
    """
    sharded: list[torch.nn.Parameter] = [p for p in parameters if isinstance(p, DTensor)]
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    size = at_once or AT_ONCE
    parts = [sharded[start : start + size] for start in range(0, len(sharded), size)]
    return [*parts, plain] if plain else parts


def _norm_of_shards(gradients: Sequence[DTensor]) -> torch.Tensor:
    """Return the norm over all gradients and ranks that share them; one collective per mesh.

    Not by `DTensor`'s own arithmetic, for the reason of `parts_of`.
    """
    squares = []
    for (mesh, *dims), places in owners_of(gradients).items():
        parts = [gradients[place].to_local() for place in places]
        square = torch.nn.utils.get_total_norm(parts).float().square()
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def sent_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; from host memory to a GPU without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda")


def owners_of(tensors: Sequence[torch.Tensor]) -> dict[tuple[Any, ...], list[int]]:
    """Return (mesh, dimensions that split tensors) → the indices of these tensors."""
    owners: dict[tuple[Any, ...], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            split = (n for n, placed in enumerate(tensor.placements) if placed.is_shard())
            owners.setdefault((tensor.device_mesh, *split), []).append(place)
    return owners


def _scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply plain tensors by a scalar tensor, grouped by device and precision."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), some in alike.items():
        torch._foreach_mul_(some, factor.to(device))


def buckets(
    parameters: Sequence[torch.nn.Parameter],
) -> Iterator[list[torch.nn.Parameter]]:
    """Yield runs of parameters of one precision and about `BUCKET` elements on this rank."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (
            size + local_part(parameter).numel() > BUCKET or parameter.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += local_part(parameter).numel()
    if bucket:
        yield bucket
