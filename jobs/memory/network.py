"""What crosses the network between machines in each step, and what that costs. Pure.

A simulation: bytes follow from the model, seconds from a bandwidth that someone has measured or
read off the adapter. Whether transfers hide behind computing is not known; both ends are said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REDUCED: Final = 4  # bytes of a gradient as it is averaged: fp32
SHARED: Final = ("ddp", "hsdp", "fsdp2")
"""Strategies over machines, from the one with the least traffic."""


@dataclass(frozen=True)
class Across:
    """One strategy on some machines, with the same batch on each rank.

    Attributes:
        strategy: ddp, hsdp (a replica on each machine) or fsdp2 (shards over all).
        nodes: Machines.
        sent: Bytes that leave each machine in a step; about as many arrive.
        seconds: What that takes at the bandwidth.
    """

    strategy: str
    nodes: int
    sent: float
    seconds: float

    def speed(self, step: float) -> tuple[float, float]:
        """Images a second against one machine: if nothing is hidden, and if all is.

        Args:
            step: Seconds of a step on one machine.
        """
        return self.nodes * step / (step + self.seconds), self.nodes * step / max(
            step, self.seconds
        )

    @property
    def slower_below(self) -> float:
        """Seconds of a step on one machine below which these are slower, if nothing is hidden."""
        return self.seconds / (self.nodes - 1)


def across(
    strategy: str,
    nodes: int,
    *,
    weights: int,
    trained: int,
    gathers: int,
    gigabits: float,
    full: bool,
) -> Across:
    """Compute the traffic between machines in a step.

    Args:
        strategy: One of `SHARED`.
        nodes: Machines, two or more.
        weights: Bytes of the model.
        trained: Parameters that are trained.
        gathers: How often a step gathers all weights: forward and backward of each
            accumulated batch.
        gigabits: Of a machine's network, per second and direction.
        full: Whether the whole model is trained, so that gradients are sharded with it.
    """
    share = (nodes - 1) / nodes
    gradients = trained * REDUCED
    if strategy == "fsdp2":
        sent = (gathers * weights + (1 if full else 2) * gradients) * share
    else:
        sent = 2 * gradients * share  # an all-reduce: to the others, and back
    return Across(strategy, nodes, sent, sent * 8 / (gigabits * 1e9))
