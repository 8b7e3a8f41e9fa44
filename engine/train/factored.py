"""Adafactor and CAME on shards: the numbers of whole tensors, in two or three small sums.

Both keep a mean for each row and each column of a matrix instead of a number for each weight, and
clip each tensor's update by its length. Of a matrix whose rows are on several ranks, a rank has its
rows' means; the columns' sums and the lengths are added up over the ranks, of all tensors at once.
Plain tensors get their authors' numbers (transformers 5, came-pytorch 0.1), bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engine.model.files.weights import local_part
from engine.train.gradients import owners_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def sharded_factored(base: Any) -> Any:
    """Return transformers' `Adafactor` or came-pytorch's `CAME` with a step of our own.

    The learning rate is the group's, relative to nothing, and Adafactor has no first moment.
    """

    class Factored(base):
        def __init__(self, parameters: Any, device: torch.device, **settings: Any) -> None:
            super().__init__(parameters, **settings)
            self._device = device

        def begin(self, parameter: torch.nn.Parameter) -> None:
            """Create a parameter's state before its first step."""
            state = self.state[parameter]
            if state:
                return
            state["step"] = 0
            confident = _is_came(self.param_groups[0])
            if confident:
                state["exp_avg"] = torch.zeros_like(parameter)
            if parameter.ndim < 2:
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                return
            for name in ("exp_avg_sq", "exp_avg_res")[: 1 + confident]:
                state[f"{name}_row"] = torch.zeros_like(parameter.detach().select(-1, 0))
                state[f"{name}_col"] = _columns(parameter)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            """Do a step; a collective. Gradients are overwritten."""
            loss = None if closure is None else closure()
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                for parameter in parameters:
                    self.begin(parameter)
                    self.state[parameter]["step"] += 1
                _step(parameters, [self.state[p] for p in parameters], group, self._device)
            return loss

    return Factored


def _is_came(group: dict[str, Any]) -> bool:
    return "betas" in group


def _columns(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return zeros for each column: whole of a matrix, sharded of a convolution."""
    if parameter.ndim > 2:
        return torch.zeros_like(parameter.detach().select(-2, 0))
    return local_part(parameter).new_zeros(parameter.shape[-1])


def _step(
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    device: torch.device,
) -> None:
    """Do a step of a group; what is computed of a gradient takes its place."""
    if not parameters:
        return
    came, rate, decay = _is_came(group), group["lr"], group["weight_decay"]
    values = [local_part(p) for p in parameters]
    updates = [local_part(p.grad) for p in parameters if p.grad is not None]
    counts = {state["step"] for state in states}
    for count in sorted(counts):  # one, unless some parameters had no gradient before
        chosen = [n for n, state in enumerate(states) if state["step"] == count]
        share = group["betas"][1] if came else 1 - count ** group["decay_rate"]
        squares = _Means([parameters[n] for n in chosen], [states[n] for n in chosen], "exp_avg_sq")
        squares.measure(updates[n].square().add_(group["eps"][0]) for n in chosen)
        squares.keep(share, device)
        for n, factors in zip(chosen, squares.inverse_roots(), strict=True):
            updates[n].mul_(factors)
    _clip(parameters, updates, group["clip_threshold"], device)
    if came:
        beta = group["betas"][0]
        moments = [local_part(state["exp_avg"]) for state in states]
        torch._foreach_mul_(moments, beta)
        torch._foreach_add_(moments, updates, alpha=1 - beta)
        torch._foreach_sub_(updates, moments)
        torch._foreach_mul_(updates, updates)
        torch._foreach_add_(updates, group["eps"][1])
        chosen = [n for n, p in enumerate(parameters) if p.ndim > 1]
        unsure = _Means([parameters[n] for n in chosen], [states[n] for n in chosen], "exp_avg_res")
        unsure.measure(updates[n] for n in chosen)
        unsure.keep(group["betas"][2], device)
        torch._foreach_copy_(updates, moments)
        for n, factors in zip(chosen, unsure.inverse_roots(), strict=True):
            updates[n].mul_(factors)
    torch._foreach_mul_(updates, rate)
    if decay:
        torch._foreach_add_(values, values, alpha=-decay * rate)
    torch._foreach_sub_(values, updates)


class _Means:
    """The means of squares that states keep: of rows and columns, or of each number.

    Args:
        parameters: Some parameters.
        states: Theirs.
        name: Of the means there.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], states: Sequence[dict[str, Any]], name: str
    ) -> None:
        self._parameters = parameters
        self._factored = [p.ndim > 1 for p in parameters]
        # Whether other ranks have other rows: then columns are sums until they are added up.
        self._split = [p.ndim == 2 and isinstance(p, DTensor) for p in parameters]
        self._rows = [
            local_part(state[f"{name}_row" if factored else name])
            for state, factored in zip(states, self._factored, strict=True)
        ]
        self._columns = [
            local_part(state[f"{name}_col"])
            for state, factored in zip(states, self._factored, strict=True)
            if factored
        ]
        self._new: list[list[torch.Tensor]] = [[], []]

    def measure(self, squares: Iterable[torch.Tensor]) -> None:
        """Reduce what is new; one tensor at a time is in memory."""
        rows, columns = self._new
        for new, factored, split in zip(squares, self._factored, self._split, strict=True):
            rows.append(new.mean(dim=-1) if factored else new)
            if factored:
                columns.append(new.sum(dim=0) if split else new.mean(dim=-2))

    def keep(self, share: float, device: torch.device) -> None:
        """Move the means on, keeping this share of them; a collective."""
        rows, columns = self._new
        matrices = [p for p in self._parameters if p.ndim > 1]
        sums = [n for n, p in enumerate(matrices) if p.ndim == 2 and isinstance(p, DTensor)]
        if sums:
            parts = [columns[n] for n in sums]
            _add_up([matrices[n] for n in sums], parts, device)
            torch._foreach_div_(parts, [float(matrices[n].shape[0]) for n in sums])
        for kept, new in ((self._rows, rows), (self._columns, columns)):
            if kept:
                torch._foreach_mul_(kept, share)
                torch._foreach_add_(kept, new, alpha=1 - share)
        self._new = [[], []]

    def inverse_roots(self) -> Iterator[torch.Tensor]:
        """Yield the factors of each parameter's numbers, in the shape of this rank's part."""
        # The rows' mean is the columns', which every rank has.
        matrices = [n for n, factored in enumerate(self._factored) if factored]
        means = [
            (column if self._split[n] else self._rows[n]).mean(dim=-1, keepdim=True)
            for n, column in zip(matrices, self._columns, strict=True)
        ]
        scaled = [self._rows[n] / mean for n, mean in zip(matrices, means, strict=True)]
        of_rows, of_columns = map(iter, map(_inverse_roots, (scaled, self._columns)))
        for kept, is_matrix in zip(self._rows, self._factored, strict=True):
            if is_matrix:
                yield torch.mul(next(of_rows).unsqueeze(-1), next(of_columns).unsqueeze(-2))
            else:
                yield kept.rsqrt()


def _inverse_roots(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_rsqrt(tensors) if tensors else ()


def _clip(
    parameters: Sequence[torch.nn.Parameter],
    updates: list[torch.Tensor],
    most: float,
    device: torch.device,
) -> None:
    """Scale each update whose root mean square is larger; a collective."""
    lengths = list(torch._foreach_norm(updates, 2))
    sharded = [n for n, p in enumerate(parameters) if isinstance(p, DTensor)]
    if sharded:
        squares = [lengths[n].square() for n in sharded]
        _add_up([parameters[n] for n in sharded], squares, device)
        for n, square in zip(sharded, squares, strict=True):
            lengths[n] = square.sqrt()
    torch._foreach_div_(lengths, [p.numel() ** 0.5 for p in parameters])
    torch._foreach_div_(lengths, most)
    torch._foreach_clamp_min_(lengths, 1.0)
    torch._foreach_div_(updates, lengths)


def _add_up(
    parameters: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], device: torch.device
) -> None:
    """Add up what ranks have of sharded parameters, in place; one collective per mesh.

    Replicas take the first one's sums: their own could differ in the last bit, where they add in
    another order, and the copies would drift apart.

    Args:
        parameters: In their order.
        sums: Of each, as far as this rank has it.
        device: Where ranks meet, also when parameters are in host memory.
    """
    for (mesh, *dims), places in owners_of(parameters).items():
        parts = [sums[n] for n in places]
        flat = torch.cat([part.flatten() for part in parts]).to(device)
        for dim in dims:
            dist.all_reduce(flat, group=mesh.get_group(dim))
        for dim in range(mesh.ndim):
            if dim not in dims and mesh.size(dim) > 1:
                dist.broadcast(flat, group=mesh.get_group(dim), group_src=0)
        whole = flat.to(parts[0].device).split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [w.view_as(p) for w, p in zip(whole, parts, strict=True)])
