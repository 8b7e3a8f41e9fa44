"""Which strategy is the fastest that fits, and how few GPUs would do. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.memory.fit import Verdict
from jobs.spec.rules.strategy import SHARDING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.memory.fit import Fit
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys

FASTEST_FIRST: Final = ("single", "ddp", "hsdp", "fsdp2")
"""Each moves more bytes between GPUs in a step than the one before it, and keeps fewer on each."""

MOST_RANKS: Final = 1024


@dataclass(frozen=True)
class Candidate:
    """A strategy and how it fits; None where a job cannot run so, for the reason given."""

    strategy: str
    fit: Fit | None
    reason: str = ""


def candidates(spec: RecipeKeys, ranks: int) -> tuple[str, ...]:
    """Return the strategies that a job could run with, the fastest first.

    What only sharding can do (context parallelism, offload, a sharded adapter) rules out the rest.
    """
    if ranks == 1:
        return ("single",)
    needs_shards = (
        spec.context_parallel_size > 1
        or spec.fsdp_cpu_offload
        or (spec.model_type == "lora" and spec.lora_placement == "sharded")
    )
    able = SHARDING if needs_shards else FASTEST_FIRST[1:]
    replicas = spec.dp_replicate_size or 2
    divides = ranks % (replicas * spec.context_parallel_size) == 0
    return tuple(
        strategy
        for strategy in FASTEST_FIRST
        if strategy in able and (strategy != "hsdp" or (divides and ranks > replicas))
    )


def fastest(options: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest strategy that surely fits, or else the fastest that may fit.

    None if none does.
    """
    for verdict in (Verdict.FITS, Verdict.TIGHT):
        for option in sorted(options, key=lambda option: FASTEST_FIRST.index(option.strategy)):
            if option.fit is not None and option.fit.verdict is verdict:
                return option
    return None


def group_of(spec: DeviceKeys) -> int:
    """Return the number that must divide a job's number of ranks.

    It is the least common multiple of the machines and of the ranks that share a sample.
    """
    return math.lcm(spec.context_parallel_size, spec.num_machines)


def fewest(fits: Callable[[int], bool], group: int = 1, most: int = MOST_RANKS) -> int | None:
    """Return the smallest number of ranks that fits, since more ranks never need more each.

    Powers of two first, then between the last two: some dozen questions for any answer.

    Args:
        fits: Whether a job fits on this number.
        group: Only multiples of this are asked about.
        most: No larger number is asked about.

    Returns:
        The number, or None.
    """
    too_few, enough = 0, 1  # in groups
    while enough * group <= most and not fits(enough * group):
        too_few, enough = enough, enough * 2
    if enough * group > most:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(middle * group):
            enough = middle
        else:
            too_few = middle
    return enough * group
