"""Muon: the momentum of matrices, orthogonalized; AdamW for everything else.

The numbers are those of `torch.optim.Muon` (2.13) with `adjust_lr_fn="match_rms_adamw"`
(Moonshot's, arXiv 2502.16982), which makes an update about as large as AdamW's, so that its
learning rate and weight decay hold for both. Torch's takes whole matrices only.

Here one rank orthogonalizes each matrix, whatever the strategy, as in the published distributed
versions (Moonshot's, Microsoft's Dion). Ranks that share shards send the owner their rows and get
back rows of the result; replicas send each other what their owners computed. So N ranks share the
work, and replicas stay equal bit for bit, even on GPUs of different kinds. Matrices of one shape go
in rounds: small ones in one batched product, and the next round travels while one is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from engine.model.files.weights import local_part
from engine.train.gradients import BUCKET, owners_of
from engine.train.skipping import add_unless, follow_unless, scale_unless, spoilt_of
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from jobs.spec.job_spec import RecipeKeys

# Keller Jordan's, as torch has them.
_MOMENTUM: Final = 0.95
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_EPSILON: Final = 1e-7


def hidden_matrices(model: torch.nn.Module, spec: RecipeKeys) -> dict[str, torch.nn.Parameter]:
    """Return name → trained weight of each linear layer inside the family's blocks.

    The published recipes leave the rest to AdamW: first and last layers, embeddings, norms, biases,
    tables, convolutions. Of a LoRA, these are its two factors.
    """
    classes = FAMILIES[spec.model_family].blocks_of(spec.model_flavour)
    blocks = [
        name
        for name, module in model.named_modules()
        if any(base.__name__ in classes for base in type(module).__mro__)  # FSDP2 makes subclasses
    ]
    inside = tuple(f"{name}." for name in blocks)
    layers = (
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(inside)
    )
    parameters = dict(model.named_parameters())
    return {
        name: parameters[name]
        for name in layers
        if name in parameters and parameters[name].requires_grad and parameters[name].ndim == 2
    }


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices with about the same singular vectors and singular values near 1.

    Args:
        matrices: (k, m, n), overwritten: the caller may hold them while this runs, so products
            that need no new memory go there. What they are in is what the products compute in.
    """
    count, rows, columns = matrices.shape
    tall = rows > columns
    batch = matrices.mT if tall else matrices
    short, long = batch.shape[1:]
    batch.div_(batch.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON))
    a, b, c = _COEFFICIENTS
    free, other = matrices.new_empty(count, short, long), matrices.view(count, short, long)
    gram, polynomial = matrices.new_empty(2, count, short, short)
    for _ in range(_ITERATIONS):
        torch.bmm(batch, batch.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        batch = torch.baddbmm(batch, polynomial, batch, beta=a, out=free)
        free, other = other, free
    if not tall:
        return batch
    return free.view(count, rows, columns).copy_(batch.mT)


class Muon(torch.optim.Optimizer):
    """Both kinds of parameters in one group, so that a checkpoint does not depend on the split.

    Args:
        parameters: Parameters or groups of them; plain, `DTensor`s sharded along dim 0, or both.
        matrices: Those of them whose momentum is orthogonalized; the same on every rank.
        device: Where this rank computes, also when parameters are in host memory.
        dtype: What it is orthogonalized in.
        settings: `lr`, `weight_decay`, and AdamW's `betas` and `eps`.
    """

    decides_on_device = True

    def __init__(
        self,
        parameters: Any,
        matrices: Collection[torch.nn.Parameter],
        device: torch.device,
        dtype: torch.dtype,
        **settings: Any,
    ) -> None:
        super().__init__(parameters, settings)
        self._matrices = set(matrices)
        self._device = device
        self._dtype = dtype

    def begin(self, parameter: torch.nn.Parameter) -> None:
        """Create a parameter's state before its first step, sharded like the parameter."""
        state = self.state[parameter]
        if state:
            return
        if parameter in self._matrices:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        else:
            state["step"] = torch.zeros((), device=local_part(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do a step; a collective. Gradients of matrices are overwritten."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                self.begin(parameter)
            self._adamw([p for p in trained if p not in self._matrices], group)
            self._muon([p for p in trained if p in self._matrices], group)
        return loss

    def _adamw(self, parameters: Sequence[torch.nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local_part(p) for p in parameters],
            _gradients(parameters),
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=spoilt_of(self),
        )

    def _muon(self, parameters: Sequence[torch.nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        values, gradients = [local_part(p) for p in parameters], _gradients(parameters)
        momenta = [local_part(self.state[p]["momentum_buffer"]) for p in parameters]
        spoilt = spoilt_of(self)
        follow_unless(momenta, gradients, 1 - _MOMENTUM, spoilt)
        torch._foreach_lerp_(gradients, momenta, _MOMENTUM)  # Nesterov's look ahead
        if group["weight_decay"]:
            scale_unless(values, 1 - group["lr"] * group["weight_decay"], spoilt)
        for team, places in _teams(parameters, self._device):
            shapes = [_shape(parameters[place]) for place in places]
            rounds = [
                _Round(
                    team,
                    shapes[chosen[0]],
                    [values[places[n]] for n in chosen],
                    [gradients[places[n]] for n in chosen],
                    self._dtype,
                )
                for chosen in rounds_of(shapes, team.ranks)
            ]
            _run(rounds, group["lr"], spoilt, ahead=team.ranks > 1)


def _gradients(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def _shape(parameter: torch.Tensor) -> tuple[int, int]:
    rows, columns = parameter.shape
    return rows, columns


def flops_of(shape: tuple[int, int]) -> int:
    """Return the floating-point operations of orthogonalizing one matrix."""
    short, long = sorted(shape)
    return _ITERATIONS * (4 * short * short * long + 2 * short**3)


# -- who computes what ----------------------------------------------------------------------


def rounds_of(shapes: Sequence[tuple[int, int]], ranks: int) -> Iterator[list[int]]:
    """Yield indices of matrices of one shape that are orthogonalized at once.

    A rank has about `BUCKET` elements of them, or one matrix that is larger. Every `ranks`-th
    matrix of a round is the same rank's.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for place, shape in enumerate(shapes):
        alike.setdefault(shape, []).append(place)
    for (rows, columns), places in alike.items():
        size = max(1, BUCKET // max(1, rows * columns)) * ranks
        yield from (places[start : start + size] for start in range(0, len(places), size))


def rows_on(rows: int, shards: int, rank: int) -> int:
    """Return how many rows of a matrix FSDP2 gives a rank."""
    each = -(-rows // shards)
    return min(each, max(0, rows - rank * each))


@dataclass(frozen=True)
class _Team:
    """The ranks that orthogonalize some matrices together.

    Attributes:
        device: Where this rank computes.
        shards: Ranks that share a copy of each matrix.
        shard: This rank among them.
        replicas: Copies of each matrix.
        replica: Which one is this rank's.
        sharing: The ranks that share this rank's copy; None for no others.
        copying: The ranks that have copies of this rank's rows; None for no others.
    """

    device: torch.device
    shards: int = 1
    shard: int = 0
    replicas: int = 1
    replica: int = 0
    sharing: dist.ProcessGroup | None = None
    copying: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas


def _teams(
    parameters: Sequence[torch.nn.Parameter], device: torch.device
) -> Iterator[tuple[_Team, list[int]]]:
    """Yield each team, and the indices of its matrices; alike on all ranks."""
    for (mesh, *dims), places in owners_of(parameters).items():
        (split,) = dims
        copied = next((n for n in range(mesh.ndim) if n != split), None)
        whole = mesh.size(split) == 1
        alone = copied is None or mesh.size(copied) == 1
        yield (
            _Team(
                device,
                mesh.size(split),
                mesh.get_local_rank(split),
                1 if alone else mesh.size(copied),
                0 if alone else mesh.get_local_rank(copied),
                None if whole else mesh.get_group(split),
                None if alone else mesh.get_group(copied),
            ),
            places,
        )
    plain = [n for n, p in enumerate(parameters) if not isinstance(p, DTensor)]
    if plain and dist.is_initialized() and dist.get_world_size() > 1:
        size, rank = dist.get_world_size(), dist.get_rank()
        yield _Team(device, replicas=size, replica=rank, copying=dist.group.WORLD), plain
    elif plain:
        yield _Team(device), plain


# -- a round --------------------------------------------------------------------------------


class _Round:
    """Matrices of one shape on their way to the ranks that orthogonalize them, and back.

    Args:
        team: The ranks.
        shape: (m, n) of each matrix.
        values: This rank's rows of them, which are updated.
        updates: This rank's rows of what is orthogonalized, in the same order.
        dtype: In which they are sent and computed.
    """

    def __init__(
        self,
        team: _Team,
        shape: tuple[int, int],
        values: Sequence[torch.Tensor],
        updates: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._team, (self._rows, self._columns) = team, shape
        self._values, self._updates, self._dtype = values, updates, dtype
        numbers = range(len(values))
        # Of each replica, and there of each rank: the matrices that it orthogonalizes.
        self._owned = [
            [
                [n for n in numbers if n % team.ranks == replica * team.shards + shard]
                for shard in range(team.shards)
            ]
            for replica in range(team.replicas)
        ]
        self._mine = len(self._owned[team.replica][team.shard])
        here = rows_on(self._rows, team.shards, team.shard)
        self._here = here * self._columns
        self._work: Any = None
        self._kept: torch.Tensor | None = None  # what is sent, until that is done
        self._received = torch.empty(0)

    def gather(self) -> None:
        """Send each owner this rank's rows of its matrices, without waiting."""
        owned = self._owned[self._team.replica]
        numbers = [n for some in owned for n in some]
        size, device = len(numbers) * self._here, self._values[0].device
        apart = device.type != self._team.device.type
        # From host memory in one copy, which does not wait if its source is pinned.
        sent = torch.empty(size, dtype=self._dtype, device=device, pin_memory=apart)
        if size:
            parts = sent.view(len(numbers), -1, self._columns).unbind()
            torch._foreach_copy_(parts, [self._updates[n] for n in numbers])
        sent = sent.to(self._team.device, non_blocking=True)
        self._updates = ()
        if self._team.sharing is None:
            self._received = sent
            return
        self._received = self._empty(self._mine * self._rows * self._columns)
        self._exchange(sent, [self._mine * size for size in self._sizes()], self._to_owners())

    def compute(self) -> None:
        """Orthogonalize this rank's matrices, and send the ranks their rows without waiting."""
        self._wait()
        result = orthogonalize(self._whole()) if self._mine else self._empty(0)
        team = self._team
        if team.sharing is not None:
            sizes = [self._mine * size for size in self._sizes()]
            if self._mine > 1:
                heights = [size // self._columns for size in self._sizes()]
                result = torch.cat([part.flatten() for part in result.split(heights, dim=1)])
            to_owners = self._to_owners()
            # As large as that of the replica that has the most, for `_share`.
            self._received = self._empty(self._most())
            self._exchange(result.flatten(), to_owners, sizes)
        elif team.copying is not None:
            self._share(result.flatten())
        else:
            self._received = result.flatten()

    def apply(self, rate: float, spoilt: torch.Tensor | None) -> None:
        """Subtract the results, times the rate of such a matrix, unless `spoilt` is 1."""
        self._wait()
        team = self._team
        if team.sharing is not None and team.copying is not None:
            received, self._received = self._received, torch.empty(0)
            self._share(received)
            del received
            self._wait()
        if not self._here:
            return
        numbers: list[int] = []
        parts: list[torch.Tensor] = []
        height = self._here // self._columns
        # In the values' precision: kernels of many tensors take no two.
        flats = self._to_values(self._received).view(team.replicas, -1)
        for owned, flat in zip(self._owned, flats, strict=True):
            some = [n for each in owned for n in each]
            numbers += some
            rows = flat[: len(some) * self._here].view(-1, self._columns)
            parts += rows.split(height) if some else ()
        adjusted = rate * 0.2 * math.sqrt(max(self._rows, self._columns))
        add_unless([self._values[n] for n in numbers], parts, -adjusted, spoilt)
        self._received = torch.empty(0)

    def _whole(self) -> torch.Tensor:
        """Return this rank's matrices, `(k, m, n)`, from the parts of all ranks."""
        received, self._received = self._received, torch.empty(0)
        if self._team.sharing is None or self._mine == 1:
            return received.view(self._mine, self._rows, self._columns)
        parts = received.split([self._mine * size for size in self._sizes()])
        return torch.cat(
            [part.view(self._mine, -1, self._columns) for part in parts if part.numel()], 1
        )

    def _share(self, flat: torch.Tensor) -> None:
        """Send all replicas what this one has orthogonalized of this rank's rows."""
        most = self._most()
        if flat.numel() < most:
            flat = torch.cat([flat, flat.new_zeros(most - flat.numel())])
        self._kept, self._received = flat, self._empty(most * self._team.replicas)
        self._work = dist.all_gather_into_tensor(
            self._received, flat, group=self._team.copying, async_op=True
        )

    def _exchange(self, sent: torch.Tensor, incoming: list[int], outgoing: list[int]) -> None:
        self._kept = sent
        received = self._received[: sum(incoming)]
        self._work = dist.all_to_all_single(
            received, sent, incoming, outgoing, group=self._team.sharing, async_op=True
        )

    def _most(self) -> int:
        """Return the elements that this rank gets of the replica that owns the most matrices."""
        return max(sum(map(len, replica)) for replica in self._owned) * self._here

    def _wait(self) -> None:
        """Have what follows wait for what was sent; on a GPU the host does not wait."""
        if self._work is not None:
            self._work.wait()
            self._work = self._kept = None

    def _to_values(self, flat: torch.Tensor) -> torch.Tensor:
        """Return numbers where the values are, in their precision; the host waits if it has them.

        On their way there they are as they were sent.
        """
        values = self._values[0]
        if values.device != flat.device:
            flat = flat.to(values.device, non_blocking=True)  # into pinned memory
            torch.cuda.current_stream(self._team.device).synchronize()
        return flat.to(values.dtype)

    def _to_owners(self) -> list[int]:
        return [len(some) * self._here for some in self._owned[self._team.replica]]

    def _sizes(self) -> list[int]:
        """Return the elements of a matrix on each rank of a copy."""
        shards = self._team.shards
        return [rows_on(self._rows, shards, rank) * self._columns for rank in range(shards)]

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._team.device)


def _run(rounds: list[_Round], rate: float, spoilt: torch.Tensor | None, *, ahead: bool) -> None:
    """Do all rounds; while one is computed, the next comes in and the one before goes out."""
    behind: _Round | None = None
    for place, current in enumerate(rounds):
        if place == 0 or not ahead:
            current.gather()
        if ahead and place + 1 < len(rounds):
            rounds[place + 1].gather()
        current.compute()
        if behind is not None:
            behind.apply(rate, spoilt)
        behind = current
        if not ahead:
            current.apply(rate, spoilt)
            behind = None
    if behind is not None:
        behind.apply(rate, spoilt)
