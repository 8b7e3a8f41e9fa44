"""Prodigy whose estimate is of all parameters of all ranks, and stays on the device.

Its authors' (prodigyopt 1.1) asks the host for two sums of every tensor, and on shards adds up
what its own rank has: another estimate on every rank. Their `fsdp_in_use` adds those up, on GPUs
and without replicas only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engine.model.files.weights import local_part
from engine.train.gradients import buckets, owners_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def sharded_prodigy(base: Any) -> Any:
    """Prodigyopt's `Prodigy` with a step of our own: the same numbers, with one group.

    Bias correction and the safeguard of warm-ups, which keeps these from inflating the estimate,
    are as its authors advise for diffusion models; growth is unlimited, and nothing is sliced.
    """

    class Prodigy(base):
        def __init__(self, parameters: Any, device: torch.device, **settings: Any) -> None:
            super().__init__(
                parameters, use_bias_correction=True, safeguard_warmup=True, **settings
            )
            self._device = device
            self._estimate: torch.Tensor | None = None  # d and its numerator, fp64
            self.register_state_dict_pre_hook(_settle)
            self.register_load_state_dict_post_hook(_forget)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            loss = None if closure is None else closure()
            (group,) = self.param_groups
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                _begin(self.state[parameter], parameter)
            if group["lr"] <= 0:
                return loss
            if self._estimate is None:
                numbers = [group["d"], group["d_numerator"]]
                self._estimate = torch.tensor(numbers, dtype=torch.float64).to(
                    self._device, non_blocking=True
                )
            self._estimate = _step(self.state, parameters, group, self._estimate)
            group["k"] += 1
            return loss

    return Prodigy


def _settle(optimizer: Any) -> None:
    """Write the estimate where the authors' keeps it, as numbers; the host waits for the device."""
    if optimizer._estimate is not None:
        d, numerator = optimizer._estimate.tolist()
        (group,) = optimizer.param_groups
        group.update(d=d, d_max=d, d_numerator=numerator)


def _forget(optimizer: Any) -> None:
    optimizer._estimate = None


def _begin(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Create a parameter's state before its first step, sharded like the parameter."""
    if "step" not in state:
        state["step"] = 0
        state["p0"] = parameter.detach().clone()
        for name in ("s", "exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)


def _step(
    states: Any,
    parameters: Sequence[torch.nn.Parameter],
    group: dict[str, Any],
    estimate: torch.Tensor,
) -> torch.Tensor:
    """Do a step, of some tensors at a time; returns the new estimate."""
    (beta1, beta2), d0, k = group["betas"], group["d0"], group["k"]
    beta3 = group["beta3"] or math.sqrt(beta2)
    rate = group["lr"] * math.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1))
    d, numerator = estimate.unbind()
    sums = []
    for some in buckets(parameters):
        s, p0, first, second = _of(states, some, "s", "p0", "exp_avg", "exp_avg_sq")
        gradients = [local_part(p.grad) for p in some if p.grad is not None]
        away = torch._foreach_sub(p0, [local_part(p) for p in some])
        dots = [torch.dot(g.flatten(), a.flatten()) for g, a in zip(gradients, away, strict=True)]
        del away
        scaled = torch._foreach_mul(gradients, _like(d, gradients))
        torch._foreach_lerp_(first, scaled, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, scaled, scaled, 1 - beta2)
        torch._foreach_mul_(scaled, _like(d / d0, gradients))
        torch._foreach_mul_(s, beta3)
        torch._foreach_add_(s, scaled)
        del scaled
        lengths = torch._foreach_norm(s, 1)
        sums.append(torch.stack([torch.stack(dots), torch.stack(lengths)]))
    product, denominator = _of_all(parameters, sums, estimate.device).unbind()
    moved = beta3 * numerator + d * d / d0 * rate * product
    # Nothing is known while all gradients are zero.
    d_hat = torch.where(denominator > 0, group["d_coef"] * moved / denominator, d)
    new = torch.maximum(d, d_hat)
    for some in buckets(parameters):
        first, second = _of(states, some, "exp_avg", "exp_avg_sq")
        values = [local_part(p) for p in some]
        update = torch._foreach_sqrt(second)
        torch._foreach_add_(update, _like(new * group["eps"], values))
        torch._foreach_reciprocal_(update)
        torch._foreach_mul_(update, first)
        torch._foreach_mul_(update, _like(d * rate, values))
        if group["weight_decay"]:
            torch._foreach_mul_(values, _like(1 - group["weight_decay"] * rate * d, values))
        torch._foreach_sub_(values, update)
        for parameter in some:
            states[parameter]["step"] += 1
    return torch.stack([new, moved])


def _of(
    states: Any, parameters: Sequence[torch.nn.Parameter], *names: str
) -> list[list[torch.Tensor]]:
    """Return this rank's parts of the state, by name."""
    return [[local_part(states[p][name]) for p in parameters] for name in names]


def _like(scalar: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return scalar.to(tensors[0].device, tensors[0].dtype)


def _of_all(
    parameters: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Both sums over all parameters of all ranks, `(2,)` in fp64; a collective.

    Args:
        parameters: In their order.
        sums: `(2, …)` of each of them, as far as this rank has it.
        device: Where ranks meet, also when parameters are in host memory.
    """
    each = torch.cat(list(sums), dim=1).to(device, torch.float64)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for (mesh, *dims), places in owners_of(parameters).items():
        part = each[:, places].sum(1)
        for dim in dims:
            dist.all_reduce(part, group=mesh.get_group(dim))
        total += part
    plain = [n for n, p in enumerate(parameters) if not isinstance(p, DTensor)]
    total += each[:, plain].sum(1)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(total, src=0)  # as of the norm: copies must not drift apart
    return total
