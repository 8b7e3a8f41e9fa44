"""The global batch plan: which samples every optimizer step trains on. Pure and seeded.

It depends on the data, the seed and the *global* batch size only, so that any number of ranks
trains on the same samples in the same order, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from jobs.spec.values.datasets import Dataset

_LONGEST_EPOCH: Final = 20_000_000  # draws; planning these takes about a minute and 3 GB
_KEPT_EPOCHS: Final = 2  # the one that ends and the one that begins


class Draw(NamedTuple):
    """One use of a sample.

    Attributes:
        sample: Its number in the index.
        turn: Which of its captions and cuts it uses; one more each time it comes.
    """

    sample: int
    turn: int


@dataclass(frozen=True)
class Share:
    """What a dataset contributes to an epoch.

    Attributes:
        samples: How many it has; the datasets' samples are numbered one after the other.
        draws: How often one of them is drawn, at least once each.
    """

    samples: int
    draws: int

    def __post_init__(self) -> None:
        if self.draws < self.samples:
            raise ValueError(f"{self.draws} draws do not show {self.samples} samples")


def shares_of(datasets: Sequence[Dataset], samples: Sequence[int]) -> list[Share]:
    """How often each dataset is drawn from in an epoch.

    With `repeats`, each of its samples that many times, and regularization samples as often as all
    others together: the fewer of the two are drawn again. With `weight`, in proportion to it. The
    epoch is then as long as it takes until every dataset has been seen whole.

    Args:
        datasets: In the order of their samples; all with a weight, or none.
        samples: How many each has. One without any is drawn from not at all.

    Raises:
        UserError: An epoch would be too long to be planned.
    """
    weights = [d.weight if n else 0.0 for d, n in zip(datasets, samples, strict=True)]
    if any(weight is None for weight in weights):
        return _checked(_balanced(datasets, samples), "repeats")
    parts = [weight / math.fsum(filter(None, weights)) for weight in weights if weight is not None]
    length = max(n / part for n, part in zip(samples, parts, strict=True) if n)
    draws = [max(n, round(length * part)) for n, part in zip(samples, parts, strict=True)]
    return _checked([Share(n, d) for n, d in zip(samples, draws, strict=True)], "weight")


def _balanced(datasets: Sequence[Dataset], samples: Sequence[int]) -> list[Share]:
    """Shares by `repeats`, with as many draws of regularization samples as of others."""
    draws = [n * d.repeats for d, n in zip(datasets, samples, strict=True)]
    for role in (False, True):
        own = [number for number, dataset in enumerate(datasets) if dataset.regularization is role]
        now = sum(draws[number] for number in own)
        others = sum(draws) - now
        if 0 < now < others:
            counts = [draws[number] for number in own]
            for number, count in zip(own, _in_proportion(counts, others), strict=True):
                draws[number] = count
    return [Share(n, count) for n, count in zip(samples, draws, strict=True)]


def _in_proportion(counts: Sequence[int], total: int) -> list[int]:
    """Counts enlarged to a total; the largest remainders get what is left over."""
    exact = [total * count / sum(counts) for count in counts]
    rounded = [int(part) for part in exact]
    by_remainder = sorted(range(len(rounded)), key=lambda number: rounded[number] - exact[number])
    for number in by_remainder[: total - sum(rounded)]:
        rounded[number] += 1
    return rounded


def _checked(shares: list[Share], key: str) -> list[Share]:
    draws = sum(share.draws for share in shares)
    if draws > _LONGEST_EPOCH:
        raise UserError(
            f"datasets: with these values of {key}, an epoch has {draws:,} samples, more than "
            f"{_LONGEST_EPOCH:,}",
            "choose closer values",
        )
    return shares


class BatchPlan:
    """The plan.

    Within an epoch a sample comes as often as its dataset's share says. A bucket that does not
    fill its last batch fills it up from the beginning of its order, so no sample is skipped and
    every batch has the same size.

    Args:
        buckets: Per sample, the bucket it belongs to; a step's samples are all of one bucket, so
            that all ranks compute the same shapes.
        global_batch: Samples per optimizer step.
        seed: Of the order.
        shares: Of the datasets; without them, every sample comes once an epoch.
    """

    def __init__(
        self,
        buckets: Sequence[Hashable],
        global_batch: int,
        seed: int,
        shares: Sequence[Share] | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.global_batch = global_batch
        self.seed = seed
        self.shares = tuple(shares or [Share(len(self.buckets), len(self.buckets))])
        if sum(share.samples for share in self.shares) != len(self.buckets):
            raise ValueError("the shares do not add up to the samples")
        self._epochs: dict[int, list[tuple[Draw, ...]]] = {}
        self._lock = Lock()  # threads read ahead, at the turn of an epoch in two of them

    @property
    def draws_per_epoch(self) -> int:
        """Samples an epoch shows, not counting what fills last batches."""
        return sum(share.draws for share in self.shares)

    @cached_property
    def bucket_draws(self) -> dict[Hashable, int]:
        """Bucket → how many draws of an epoch are from it, not counting what fills last batches."""
        draws: Counter[Hashable] = Counter()
        for group in self._groups:
            draws[group.bucket] += group.draws
        return dict(draws)

    @cached_property
    def batches(self) -> dict[Hashable, int]:
        """Bucket → how many steps of an epoch are of it."""
        draws = self.bucket_draws
        return {bucket: -(-count // self.global_batch) for bucket, count in draws.items()}

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps until every sample has been seen as often as it should."""
        return sum(self.batches.values())

    def draws(self, step: int) -> tuple[Draw, ...]:
        """The samples of a step, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[position]

    def epoch(self, step: int) -> float:
        """How many epochs are complete when `step` begins, with its fraction."""
        return step / self.steps_per_epoch

    @cached_property
    def _groups(self) -> list[_Group]:
        """The samples of each dataset in each bucket, with their part of the dataset's draws."""
        groups = []
        first = 0
        for share in self.shares:
            members: dict[Hashable, list[int]] = {}
            for sample in range(first, first + share.samples):
                members.setdefault(self.buckets[sample], []).append(sample)
            first += share.samples
            exact = {b: share.draws * len(m) / share.samples for b, m in members.items()}
            draws = {bucket: int(part) for bucket, part in exact.items()}
            left = share.draws - sum(draws.values())
            # The largest remainders get what is left, so that an epoch has always the same length.
            by_remainder = sorted(exact, key=lambda b: draws[b] - exact[b])
            for bucket in by_remainder[:left]:
                draws[bucket] += 1
            groups += [_Group(bucket, tuple(m), draws[bucket]) for bucket, m in members.items()]
        return groups

    def _epoch(self, epoch: int) -> list[tuple[Draw, ...]]:
        with self._lock:
            if epoch not in self._epochs:
                while len(self._epochs) >= _KEPT_EPOCHS:
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self._make_epoch(epoch)
            return self._epochs[epoch]

    def _make_epoch(self, epoch: int) -> list[tuple[Draw, ...]]:
        draw = random.Random(f"{self.seed}:{epoch}")
        orders: dict[Hashable, list[tuple[float, Draw]]] = {}
        for group in self._groups:
            orders.setdefault(group.bucket, []).extend(group.epoch(epoch, draw))
        batches = {bucket: self._batches(placed) for bucket, placed in orders.items()}
        # Buckets come in a random order, and the batches of each in theirs.
        order = [bucket for bucket, own in batches.items() for _ in own]
        draw.shuffle(order)
        left = {bucket: iter(own) for bucket, own in batches.items()}
        return [next(left[bucket]) for bucket in order]

    def _batches(self, placed: list[tuple[float, Draw]]) -> list[tuple[Draw, ...]]:
        """A bucket's draws, in the order of their places."""
        order = [draw for _, draw in sorted(placed)]
        batches: list[tuple[Draw, ...]] = []
        for start in range(0, len(order), self.global_batch):
            batch = order[start : start + self.global_batch]
            for number in range(self.global_batch - len(batch)):
                again, place = divmod(number, len(order))
                draw = order[place]
                batch.append(Draw(draw.sample, draw.turn + 1 + again))
            batches.append(tuple(batch))
        return batches


@dataclass(frozen=True)
class _Group:
    """Samples of one dataset in one bucket."""

    bucket: Hashable
    members: tuple[int, ...]
    draws: int

    def epoch(self, epoch: int, draw: random.Random) -> list[tuple[float, Draw]]:
        """Its draws of an epoch, each with its place among those of its bucket, from 0 to 1.

        Each pass over the samples has its own stretch, so that repeats of one lie far apart and
        datasets mix evenly.
        """
        passes, extra = divmod(self.draws, len(self.members))
        stretches = passes + bool(extra)
        draws = []
        for number in range(stretches):
            chosen = self.members
            if number == passes:  # not all come once more: in every epoch the next ones
                start = epoch * extra % len(self.members)
                chosen = (self.members[start:] + self.members[:start])[:extra]
            for sample in chosen:
                place = (number + draw.random()) / stretches
                draws.append((place, Draw(sample, epoch * stretches + number)))
        return draws


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


def nth_variant(count: int, turn: int, *key: object) -> int:
    """Which of several variants of a sample a turn uses.

    Each comes once before any comes again, in a new random order for every round, so that
    variants of two kinds (a caption and a crop) meet in all combinations.

    Args:
        count: How many there are.
        turn: Of the draw.
        key: What the order depends on: the seed, the kind, the sample.
    """
    if count == 1:
        return 0
    cycle, place = divmod(turn, count)
    order = list(range(count))
    random.Random(":".join(map(str, (*key, cycle)))).shuffle(order)
    return order[place]
