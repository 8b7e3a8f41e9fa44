"""A moving average of what is trained, sharded like it.

Only the trained tensors are averaged, each rank its own part, so that under FSDP the average
costs one more shard and no communication.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from engine.weights import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Ema:
    """The average of a set of parameters.

    Args:
        parameters: Name → trained parameter, plain or `DTensor`.
        decay: Share of the old average that each step keeps.
        on_cpu: Keep plain tensors in host memory; `DTensor`s stay where they are.

    Attributes:
        shadow: Name → average, of the parameter's own kind, so that a checkpoint saves it alike.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], decay: float, *, on_cpu: bool = False
    ) -> None:
        self._parameters = dict(parameters)
        self._decay = decay
        self.shadow: dict[str, torch.Tensor] = {
            name: parameter.detach().to("cpu", copy=True) if on_cpu else parameter.detach().clone()
            for name, parameter in self._parameters.items()
        }

    def decay_at(self, step: int) -> float:
        """The decay of optimizer step `step`, counted from 1.

        Early averages would remember the start for long, so the decay warms up as
        (1 + step) / (10 + step), as in TensorFlow's `ExponentialMovingAverage`.
        """
        return min(self._decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int, spoilt: torch.Tensor | None = None) -> None:
        """Move the average towards the parameters after optimizer step `step`, counted from 1.

        Args:
            step: The step.
            spoilt: A scalar on the parameters' device; where it is 1 nothing changes.
        """
        weight = 1 - self.decay_at(step)
        for average, current in self._pairs():
            if spoilt is None:
                average.lerp_(current.to(average.device), weight)
            else:
                average.lerp_(
                    current.to(average.device), (weight * (1 - spoilt)).to(average.device)
                )

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the present parameters."""
        for average, current in self._pairs():
            average.copy_(current)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the model has the averaged weights.

        The two are exchanged value by value: nothing is allocated but one tensor at a time, and
        whoever holds a parameter (optimizer, FSDP) still holds it.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, current in self._pairs():
            before = current.clone()
            current.copy_(average)
            average.copy_(before)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(average, parameter), this rank's parts of them."""
        for name, average in self.shadow.items():
            yield local_part(average), local_part(self._parameters[name].detach())
