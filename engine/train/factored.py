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
from engine.train.gradients import owners_of, sent_to
from engine.train.skipping import SkippedSteps, add_unless, scale_unless, spoilt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def sharded_factored(base: Any) -> Any:
    """Return transformers' `Adafactor` or came-pytorch's `CAME` with a step of our own.

    The learning rate is the group's, relative to nothing, and Adafactor has no first moment.
    """

    class Factored(base):
        decides_on_device = True

        def __init__(self, parameters: Any, device: torch.device, **settings: Any) -> None:
            super().__init__(parameters, **settings)
            self._device = device
            self._skipped = SkippedSteps()
            self.register_state_dict_pre_hook(_settle)
            self.register_load_state_dict_post_hook(_forget)

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
            spoilt = spoilt_of(self)
            for group in self.param_groups:
                parameters = [p for p in group["params"] if p.grad is not None]
                for parameter in parameters:
                    self.begin(parameter)
                    self.state[parameter]["step"] += 1
                states = [self.state[p] for p in parameters]
                skipped = [self._skipped.of(p) for p in parameters]
                _step(parameters, states, skipped, group, self._device, spoilt)
                self._skipped.add(parameters, spoilt)
            return loss

    return Factored


def _settle(optimizer: Any) -> None:
    """Count no steps that the device has skipped; the host waits for the device."""
    for parameter, number in optimizer._skipped.take().items():
        optimizer.state[parameter]["step"] -= number


def _forget(optimizer: Any) -> None:
    optimizer._skipped = SkippedSteps()


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
    skipped: Sequence[torch.Tensor | None],
    group: dict[str, Any],
    device: torch.device,
    spoilt: torch.Tensor | None,
) -> None:
    """Do a step of a group; what is computed of a gradient takes its place."""
    if not parameters:
        return
    came, rate, decay = _is_came(group), group["lr"], group["weight_decay"]
    values = [local_part(p) for p in parameters]
    updates = [local_part(p.grad) for p in parameters if p.grad is not None]
    alike: dict[tuple[int, int], list[int]] = {}
    for n, state in enumerate(states):
        alike.setdefault((state["step"], id(skipped[n])), []).append(n)
    # One, unless some parameters had no gradient before.
    for (count, _), chosen in sorted(alike.items(), key=lambda item: item[1]):
        fewer = skipped[chosen[0]]
        share = group["betas"][1] if came else _share(count, fewer, group["decay_rate"])
        squares = _Means([parameters[n] for n in chosen], [states[n] for n in chosen], "exp_avg_sq")
        squares.measure(updates[n].square().add_(group["eps"][0]) for n in chosen)
        squares.keep(share, device, spoilt)
        for n, factors in zip(chosen, squares.inverse_roots(), strict=True):
            updates[n].mul_(factors)
    _clip(parameters, updates, group["clip_threshold"], device)
    if came:
        beta = group["betas"][0]
        moments = [local_part(state["exp_avg"]) for state in states]
        scale_unless(moments, beta, spoilt)
        add_unless(moments, updates, 1 - beta, spoilt)
        torch._foreach_sub_(updates, moments)
        torch._foreach_mul_(updates, updates)
        torch._foreach_add_(updates, group["eps"][1])
        chosen = [n for n, p in enumerate(parameters) if p.ndim > 1]
        unsure = _Means([parameters[n] for n in chosen], [states[n] for n in chosen], "exp_avg_res")
        unsure.measure(updates[n] for n in chosen)
        unsure.keep(group["betas"][2], device, spoilt)
        torch._foreach_copy_(updates, moments)
        for n, factors in zip(chosen, unsure.inverse_roots(), strict=True):
            updates[n].mul_(factors)
    torch._foreach_mul_(updates, rate)
    if decay:
        add_unless(values, values, -decay * rate, spoilt)
    add_unless(values, updates, -1.0, spoilt)


def _share(count: int, skipped: torch.Tensor | None, exponent: float) -> float | torch.Tensor:
    """Return the share of its means that Adafactor keeps in step `count`, less the skipped ones.

    Where the device knows how many these are, in fp64 there.
    """
    if skipped is None:
        return 1 - float(count**exponent)
    return 1 - (count - skipped.double()) ** exponent


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

    def keep(
        self, share: float | torch.Tensor, device: torch.device, spoilt: torch.Tensor | None
    ) -> None:
        """Move the means on, keeping this share of them unless `spoilt` is 1; a collective."""
        rows, columns = self._new
        matrices = [p for p in self._parameters if p.ndim > 1]
        sums = [n for n, p in enumerate(matrices) if p.ndim == 2 and isinstance(p, DTensor)]
        if sums:
            parts = [columns[n] for n in sums]
            _add_up([matrices[n] for n in sums], parts, device)
            torch._foreach_div_(parts, [float(matrices[n].shape[0]) for n in sums])
        rest = 1 - share
        if isinstance(share, torch.Tensor) and isinstance(rest, torch.Tensor):
            share, rest = share.float(), rest.float()
        for kept, new in ((self._rows, rows), (self._columns, columns)):
            if kept:
                scale_unless(kept, share, spoilt)
                add_unless(kept, new, rest, spoilt)
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
        flat = sent_to(torch.cat([part.flatten() for part in parts]), device)
        for dim in dims:
            dist.all_reduce(flat, group=mesh.get_group(dim))
        for dim in range(mesh.ndim):
            if dim not in dims and mesh.size(dim) > 1:
                dist.broadcast(flat, group=mesh.get_group(dim), group_src=0)
        whole = flat.to(parts[0].device).split([part.numel() for part in parts])
        torch._foreach_copy_(parts, [w.view_as(p) for w, p in zip(whole, parts, strict=True)])
