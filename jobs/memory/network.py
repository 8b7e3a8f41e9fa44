"""Compute the network traffic between machines in each step, and what it costs. Pure.

This is a model: bytes follow from the job, seconds from a bandwidth that was measured or read off
the adapter. How much of a transfer overlaps with compute is unknown, so both extremes are reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

REDUCED: Final = 4  # bytes of a gradient during averaging: fp32
SHARED: Final = ("ddp", "hsdp", "fsdp2")
"""Strategies over machines, from the one with the least traffic."""


@dataclass(frozen=True)
class Across:
    """The traffic of one strategy over several machines, with the same batch on each rank.

    Attributes:
        strategy: ddp, hsdp (one replica per machine) or fsdp2 (sharded over all).
        nodes: Number of machines.
        sent: Bytes that leave each machine in a step; about as many arrive.
        seconds: Seconds this takes at the given bandwidth.
    """

    strategy: str
    nodes: int
    sent: float
    seconds: float

    def speed(self, step: float) -> tuple[float, float]:
        """Return images per second relative to one machine: without overlap, and with full overlap.

        Args:
            step: Seconds of a step on one machine.
        """
        return self.nodes * step / (step + self.seconds), self.nodes * step / max(
            step, self.seconds
        )

    @property
    def slower_below(self) -> float:
        """Return the step time on one machine (seconds) below which these are slower without
        overlap.
        """
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
    """Compute the traffic between machines in one step.

    Args:
        strategy: One of `SHARED`.
        nodes: Number of machines, two or more.
        weights: Bytes of the model.
        trained: Number of trained parameters.
        gathers: How often a step gathers all weights: forward and backward of each accumulated
            batch.
        gigabits: Network bandwidth of a machine, in gigabits per second and direction.
        full: Whether the whole model is trained, so that gradients are sharded with it.
    """
    share = (nodes - 1) / nodes
    gradients = trained * REDUCED
    if strategy == "fsdp2":
        sent = (gathers * weights + (1 if full else 2) * gradients) * share
    else:
        sent = 2 * gradients * share  # an all-reduce sends everything to the others and back
    return Across(strategy, nodes, sent, sent * 8 / (gigabits * 1e9))
