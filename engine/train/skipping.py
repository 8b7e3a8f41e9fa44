"""Optimizer steps that the device skips by itself, where it has found them not finite.

Nothing is asked of the host: each tensor that a step changes is changed by a kernel that ends
before it writes anything where a scalar on the device is 1. So a step that is skipped leaves
parameters and state as they were, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.sgd import sgd

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unless` can leave a step out without asking the host."""
    if isinstance(optimizer, torch.optim.AdamW):
        return bool(optimizer.defaults["fused"])
    return bool(getattr(optimizer, "decides_on_device", False))


def step_unless(optimizer: torch.optim.Optimizer, spoilt: torch.Tensor) -> None:
    """Step, or change nothing where `spoilt` is 1; the device decides.

    Args:
        optimizer: One that `decides_on_device`.
        spoilt: An fp32 scalar, 0 or 1, on the device of what is trained.
    """
    # How torch's loss scale tells its fused optimizers of an overflow (2.13).
    optimizer.found_inf = spoilt  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def spoilt_of(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return what `step_unless` gave the optimizer; None in an ordinary step."""
    return getattr(optimizer, "found_inf", None)


class SkippedSteps:
    """How many of the steps that the host has counted were skipped, known to the device alone.

    Of each thing that counts steps, such as a parameter; one scalar for all that have skipped the
    same.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, torch.Tensor] = {}

    def of(self, counted: Hashable) -> torch.Tensor | None:
        """Return the number, an fp32 scalar; None if it is surely 0."""
        return self._numbers.get(counted)

    def add(self, counted: Sequence[Hashable], spoilt: torch.Tensor | None) -> None:
        """Note a step that these have counted, and that was skipped where `spoilt` is 1."""
        if spoilt is None:
            return
        before = [self._numbers.get(each) for each in counted]
        distinct = {id(number): number for number in before}
        after = {place: spoilt if n is None else n + spoilt for place, n in distinct.items()}
        self._numbers.update(zip(counted, (after[id(n)] for n in before), strict=True))

    def take(self) -> dict[Hashable, int]:
        """Return all numbers, for which the host waits, and start again at 0."""
        numbers, self._numbers = self._numbers, {}
        distinct = {id(number): number for number in numbers.values()}
        read = {place: int(number) for place, number in distinct.items()}
        return {each: read[id(number)] for each, number in numbers.items()}


def add_unless(
    tensors: Sequence[torch.Tensor],
    amounts: Sequence[torch.Tensor],
    factor: float | torch.Tensor,
    spoilt: torch.Tensor | None,
) -> None:
    """Add `factor` times the amounts in place, as `add_` does bit for bit on a CPU.

    Args:
        tensors: Plain tensors; many are changed by one kernel.
        amounts: Of the same shapes, strides and precision; may be the tensors themselves.
        factor: A number, or an fp32 scalar on their device.
        spoilt: Where it is 1 nothing changes; None for never.
    """
    descend_unless(tensors, amounts, -factor, 0.0, spoilt)


def follow_unless(
    tensors: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    weight: float,
    spoilt: torch.Tensor | None,
) -> None:
    """Move tensors by `weight`, 0 … 1, towards others in place; else as `add_unless`.

    Below a half, these are the numbers of `lerp_`, bit for bit on a CPU.
    """
    descend_unless(tensors, others, -weight, -1.0, spoilt)


def scale_unless(
    tensors: Sequence[torch.Tensor], factor: float | torch.Tensor, spoilt: torch.Tensor | None
) -> None:
    """Multiply tensors by a factor from 0 to 1 in place; by exactly 1 where `spoilt` is 1."""
    if spoilt is not None and isinstance(factor, torch.Tensor):
        factor = torch.maximum(factor, spoilt)
    elif spoilt is not None:
        factor = spoilt.clamp(min=factor)
    torch._foreach_mul_(list(tensors), cast("torch.Tensor", factor))  # or a number


def descend_unless(
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    rate: float | torch.Tensor,
    weight_decay: float,
    spoilt: torch.Tensor | None,
) -> None:
    """Subtract `rate · (gradient + weight_decay · tensor)` in place; else as `add_unless`.

    By torch's fused SGD, whose kernel (2.13) changes nothing where `found_inf` is 1.
    """
    words: dict[str, Any] = {"lr": rate, "momentum": 0.0, "dampening": 0.0}
    words |= {"weight_decay": weight_decay, "nesterov": False, "maximize": False}
    without: list[torch.Tensor | None] = [None] * len(tensors)
    sgd(list(tensors), list(gradients), without, fused=True, found_inf=spoilt, **words)
