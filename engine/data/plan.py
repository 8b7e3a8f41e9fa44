"""The global batch plan: which samples every optimizer step trains on. Pure and seeded.

It depends on the data, the seed and the *global* batch size only, so that any number of ranks
trains on the same samples in the same order, and a resumed run goes on where it would have been.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True)
class BatchPlan:
    """The plan.

    Attributes:
        buckets: Per sample, the bucket it belongs to; a step's samples are all of one bucket, so
            that all ranks compute the same shapes.
        global_batch: Samples per optimizer step.
        seed: Of the order.
    """

    buckets: tuple[Hashable, ...]
    global_batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every sample has been seen."""
        return sum(-(-len(m) // self.global_batch) for m in _members(self.buckets).values())

    def samples(self, step: int) -> tuple[int, ...]:
        """The samples of a step, counted from 0.

        A bucket that does not fill its last batch fills it up from the beginning of its order,
        so no sample is left out and every batch has the same size.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        return _epoch(self, epoch)[position]

    def epoch(self, step: int) -> float:
        """How many epochs are complete when `step` begins, with its fraction."""
        return step / self.steps_per_epoch


def positions_of_rank(rank: int, ranks: int, micro_batch: int, micro_batch_size: int) -> range:
    """Which positions of the global batch a rank computes in one forward.

    Args:
        rank: The rank.
        ranks: World size.
        micro_batch: Which forward of the step, counted from 0.
        micro_batch_size: Samples per rank and forward.
    """
    start = (micro_batch * ranks + rank) * micro_batch_size
    return range(start, start + micro_batch_size)


@lru_cache(maxsize=4)
def _members(buckets: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for sample, bucket in enumerate(buckets):
        members.setdefault(bucket, []).append(sample)
    return members


@lru_cache(maxsize=2)
def _epoch(plan: BatchPlan, epoch: int) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    draw = random.Random(f"{plan.seed}:{epoch}")
    for members in _members(plan.buckets).values():
        order = members.copy()
        draw.shuffle(order)
        for start in range(0, len(order), plan.global_batch):
            batch = order[start : start + plan.global_batch]
            missing = plan.global_batch - len(batch)
            fill = [order[i % len(order)] for i in range(missing)]
            batches.append((*batch, *fill))
    draw.shuffle(batches)
    return batches
