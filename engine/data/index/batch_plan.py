"""Plan the global batches: which samples every optimizer step trains on. Pure and seeded.

The plan depends only on the data, the seed, the global batch size and the micro-batch size. Any
number of ranks therefore trains on the same samples in the same order, and a resumed run continues
where it stopped.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from jobs.spec.values.datasets import Dataset

    IntArray = NDArray[np.int64]

_LONGEST_EPOCH: Final = 20_000_000  # draws
_LONGEST_ROUND: Final = 200_000  # draws that are planned together when epochs are short
_WINDOW: Final = 64  # steps over which micro-batches are grouped by cost
_KEPT: Final = 3  # cached rounds and windows: the ending one, the next one, and a spare


class Draw(NamedTuple):
    """One use of a sample.

    Attributes:
        sample: Index of the sample.
        turn: How often the sample was drawn before; selects its caption and view.
    """

    sample: int
    turn: int


@dataclass(frozen=True)
class Share:
    """A dataset's share of an epoch.

    Attributes:
        samples: Number of samples; the samples of all datasets are numbered consecutively.
        draws: Draws per epoch, at least one per sample. With a fraction, some epochs have one draw
            more than others.
    """

    samples: int
    draws: float

    def __post_init__(self) -> None:
        if self.draws < self.samples:
            raise ValueError(f"{self.draws} draws do not show {self.samples} samples")

    def drawn_before(self, epoch: int) -> int:
        """Return the number of draws from this dataset before an epoch."""
        return math.floor(epoch * self.draws + 1e-6)


def shares_of(datasets: Sequence[Dataset], samples: Sequence[int]) -> list[Share]:
    """Return each dataset's share of an epoch.

    With `repeats`, every sample is drawn that many times, and regularization samples are drawn as
    often as all others together: the smaller of the two groups is repeated. With `weight`, draws
    are proportional to the weight, and an epoch is long enough to draw every sample of every
    dataset.

    Args:
        datasets: In the order of their samples; either all have a weight, or none has.
        samples: Number of samples per dataset. A dataset without samples is never drawn from.

    Raises:
        UserError: An epoch would be too long to plan.
    """
    weights = [d.weight if n else 0.0 for d, n in zip(datasets, samples, strict=True)]
    if any(weight is None for weight in weights):
        return _checked(_balanced(datasets, samples), "repeats")
    parts = [weight / math.fsum(filter(None, weights)) for weight in weights if weight is not None]
    length = max(n / part for n, part in zip(samples, parts, strict=True) if n)
    draws = [max(n, length * part) for n, part in zip(samples, parts, strict=True)]
    return _checked([Share(n, d) for n, d in zip(samples, draws, strict=True)], "weight")


def _balanced(datasets: Sequence[Dataset], samples: Sequence[int]) -> list[Share]:
    """Return shares by `repeats`, balancing regularization samples with all others."""
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
    """Scale counts to sum to a total; the largest remainders get the leftover units."""
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
            f"datasets: with these values of {key}, an epoch has {draws:,.0f} samples, more than "
            f"{_LONGEST_EPOCH:,}",
            "choose closer values",
        )
    return shares


class BatchPlan:
    """The plan.

    Samples that one rank computes in one forward (with context parallelism, one group of ranks)
    form a micro-batch and must share a shape. Ranks and accumulation steps may compute different
    shapes, since gradients are reduced per parameter. Draws arrive in a shuffled stream, each
    bucket collects them, and a bucket emits a micro-batch as soon as it has enough. Leftover draws
    wait for the bucket's next draws, in the next epoch if necessary. Nothing is ever padded or
    duplicated, and samples are drawn in proportion to the shares for any global batch size.

    Micro-batches become steps in windows of about `_WINDOW` steps. Within a window, micro-batches
    of similar cost share a step, so that ranks do not wait long for each other, and an image
    appears twice in a step only if that is unavoidable. If an epoch has fewer than two steps, the
    window spans as many epochs as make a whole number of steps.

    Any step can be computed from its number alone: the micro-batches emitted by earlier epochs can
    be counted without building them.

    Args:
        buckets: Per sample, the properties that samples of a micro-batch must share.
        global_batch: Samples per optimizer step.
        seed: Seed of the order.
        shares: Shares of the datasets; by default, every sample is drawn once per epoch.
        micro_batch: Samples per rank and forward; divides `global_batch`.
        images: Per sample, the identity of its image; samples of several resolutions may share one.
            By default, all samples are different images.
        cost: Returns a bucket's cost in any unit proportional to time, such as tokens.
        first: Returns whether a bucket's micro-batches come before the others of their step. Ranks
            that have to do more for some of them then do it at the same time.
    """

    def __init__(
        self,
        buckets: Sequence[Hashable],
        global_batch: int,
        seed: int,
        shares: Sequence[Share] | None = None,
        *,
        micro_batch: int = 1,
        images: Sequence[Hashable] | None = None,
        cost: Callable[[Any], float] = lambda bucket: 1.0,
        first: Callable[[Any], bool] = lambda bucket: False,
    ) -> None:
        if global_batch % micro_batch:
            raise ValueError(f"{micro_batch} samples a forward do not divide {global_batch}")
        self.buckets = tuple(buckets)
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.shares = tuple(shares or [Share(len(self.buckets), len(self.buckets))])
        if sum(share.samples for share in self.shares) != len(self.buckets):
            raise ValueError("the shares do not add up to the samples")
        names = dict.fromkeys(self.buckets)
        numbers = {bucket: number for number, bucket in enumerate(names)}
        self._bucket = np.array([numbers[bucket] for bucket in self.buckets])
        self._cost = np.array([cost(bucket) for bucket in names])
        self._comes_first = np.array([first(bucket) for bucket in names])
        shown = {image: number for number, image in enumerate(dict.fromkeys(images or ()))}
        self._image = np.array([shown[image] for image in images or ()] or range(len(self.buckets)))
        self._first = np.cumsum([0, *(share.samples for share in self.shares)])
        self._members = np.stack(
            [
                np.bincount(self._bucket[begin:end], minlength=len(names))
                for begin, end in pairwise(self._first)
            ]
        )
        self._per_step = global_batch // micro_batch
        self._in_order = self.draws_per_epoch < 2 * global_batch
        self._round_epochs = self._epochs_of_a_round()
        self._rounds: dict[int, IntArray] = {}
        self._windows: dict[int, tuple[int, list[tuple[Draw, ...]]]] = {}
        self._lock = Lock()  # reader threads may request two windows at a time

    @property
    def draws_per_epoch(self) -> float:
        """Return the samples drawn per epoch."""
        return math.fsum(share.draws for share in self.shares)

    @property
    def steps_per_epoch(self) -> float:
        """Return the optimizer steps per epoch; rarely a whole number."""
        return self.draws_per_epoch / self.global_batch

    @cached_property
    def bucket_draws(self) -> dict[Hashable, float]:
        """Return the mean number of draws per epoch from each bucket."""
        rates = np.array([share.draws / max(share.samples, 1) for share in self.shares])
        names = dict.fromkeys(self.buckets)
        return dict(zip(names, (rates @ self._members).tolist(), strict=True))

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed before `step`, including the fraction."""
        return step * self.global_batch / self.draws_per_epoch

    def draws(self, step: int) -> tuple[Draw, ...]:
        """Return the samples of a step, counted from 0, one micro-batch after the other."""
        with self._lock:
            for first, steps in self._windows.values():
                if first <= step < first + len(steps):
                    return steps[step - first]
            first, steps = self._window(step)
            while len(self._windows) >= _KEPT:
                del self._windows[min(self._windows)]
            self._windows[first] = first, steps
            return steps[step - first]

    def _epochs_of_a_round(self) -> int:
        """Return how many epochs to plan together: enough to emit two steps.

        If an epoch has fewer than two steps, round up so that the epochs end where a step ends; the
        draws of each image can then be spread evenly over the steps.
        """
        least = 2 * self._per_step + (self.micro_batch > 1) * len(self._cost)
        enough = math.ceil(least * self.micro_batch / self.draws_per_epoch)
        if not self._in_order:
            return enough
        whole = self.global_batch // math.gcd(round(self.draws_per_epoch), self.global_batch)
        whole = math.lcm(whole, self.micro_batch)
        affordable = max(1, _LONGEST_ROUND // round(self.draws_per_epoch))
        return max(enough if whole > affordable else whole * math.ceil(enough / whole), 1)

    def _rng(self, *key: object) -> np.random.RandomState:
        """Return a separate generator for each key, of a kind that NumPy keeps stable."""
        words = hashlib.sha256(":".join(map(str, (self.seed, *key))).encode()).digest()
        return np.random.RandomState(np.frombuffer(words, "<u4"))

    def _order(self, dataset: int, turn: int) -> IntArray:
        """Return a dataset's samples in the shuffled order of its `turn`-th pass."""
        order = self._rng("order", dataset, turn).permutation(self.shares[dataset].samples)
        return order + self._first[dataset]

    def _fresh(self, epoch: int) -> IntArray:
        """Return an epoch's draws in stream order, `(n, 2)`: sample and turn.

        Each dataset contributes one shuffled pass after the other. Its draws are spread over equal
        intervals of the epoch, so that datasets mix evenly.
        """
        draws, times = [], []
        for dataset, share in enumerate(self.shares):
            place = share.drawn_before(epoch)
            count = left = share.drawn_before(epoch + 1) - place
            while left:
                turn, begin = divmod(place, share.samples)
                samples = self._order(dataset, turn)[begin : begin + left]
                draws.append(np.stack([samples, np.full(len(samples), turn)], axis=1))
                place, left = place + len(samples), left - len(samples)
            within = self._rng("time", dataset, epoch).random_sample(count)
            times.append((np.arange(count) + within) / max(count, 1))
        return np.concatenate(draws)[np.argsort(np.concatenate(times), kind="stable")]

    def _drawn_before(self, epoch: int) -> IntArray:
        """Return the number of draws from each bucket before an epoch."""
        counts = np.zeros(len(self._cost), np.int64)
        for dataset, share in enumerate(self.shares):
            if not share.draws:
                continue
            turn, begin = divmod(share.drawn_before(epoch), share.samples)
            counts += turn * self._members[dataset]
            if begin:
                own = self._bucket[self._order(dataset, turn)[:begin]]
                counts += np.bincount(own, minlength=len(counts))
        return counts

    def _waiting(self, epoch: int) -> IntArray:
        """Return the draws left over in their buckets at the start of an epoch, `(n, 2)`."""
        missing = self._drawn_before(epoch) % self.micro_batch
        parts: list[IntArray] = []
        while missing.any():
            epoch -= 1
            draws = self._fresh(epoch)
            bucket = self._bucket[draws[:, 0]]
            taken = _place_in_group(bucket[::-1])[::-1] < missing[bucket]
            parts.insert(0, draws[taken])
            missing = missing - np.bincount(bucket[taken], minlength=len(missing))
        return np.concatenate([np.empty((0, 2), np.int64), *parts])

    def _emitted_before(self, number: int) -> int:
        """Return the number of micro-batches emitted before a round."""
        drawn = self._drawn_before(number * self._round_epochs)
        return int((drawn // self.micro_batch).sum())

    def _emitted(self, number: int) -> IntArray:
        """Return a round's micro-batches in the order in which they fill: `(n, micro_batch, 2)`."""
        if number not in self._rounds:
            first = number * self._round_epochs
            epochs = range(first, first + self._round_epochs)
            draws = np.concatenate([self._waiting(first), *(self._fresh(e) for e in epochs)])
            bucket = self._bucket[draws[:, 0]]
            place = _place_in_group(bucket)
            whole = np.bincount(bucket) // self.micro_batch * self.micro_batch
            full = np.flatnonzero(place < whole[bucket])
            by_bucket = full[np.argsort(bucket[full], kind="stable")].reshape(-1, self.micro_batch)
            while len(self._rounds) >= _KEPT:
                del self._rounds[min(self._rounds)]
            self._rounds[number] = draws[by_bucket[np.argsort(by_bucket[:, -1])]]
        return self._rounds[number]

    def _split_deferred(self, number: int) -> tuple[IntArray, IntArray]:
        """Split a round's micro-batches: those deferred to the next round's first step, and others.

        The deferred ones are too few for a step. They have similar costs.
        """
        emitted = self._emitted(number)
        count = self._emitted_before(number + 1) % self._per_step
        kept = np.arange(len(emitted) - count, len(emitted))
        if not self._in_order and count:
            kept = self._choose_deferred(number, emitted, count)
        others = np.ones(len(emitted), bool)
        others[kept] = False
        return emitted[kept], emitted[others]

    def _choose_deferred(self, number: int, emitted: IntArray, count: int) -> IntArray:
        """Choose late micro-batches of similar cost, with different images if possible."""
        first = len(emitted) - max(len(emitted) // self._round_epochs, min(2 * count, len(emitted)))
        costs = self._cost[self._bucket[emitted[first:, 0, 0]]]
        by_cost = first + np.argsort(costs, kind="stable")
        start = len(by_cost) - count  # take the last ones if all cost the same
        if costs.min() < costs.max():
            start = self._rng("kept back", number).randint(len(by_cost))
        images: set[int] = set()
        chosen: list[int] = []
        doubles: list[int] = []
        for place in np.roll(by_cost, -start).tolist():
            own = set(self._image[emitted[place, :, 0]].tolist())
            (doubles if images & own else chosen).append(place)
            images |= own
            if len(chosen) == count:
                break
        return np.sort(np.array((chosen + doubles)[:count]))

    def _window(self, step: int) -> tuple[int, list[tuple[Draw, ...]]]:
        """Return the first step of the window that contains a step, and the draws of its steps."""
        number = int(self.epoch(step) / self._round_epochs)
        while (begin := self._emitted_before(number) // self._per_step) > step:
            number -= 1
        while (end := self._emitted_before(number + 1) // self._per_step) <= step:
            number, begin = number + 1, end
        parts = max(self._round_epochs, round((end - begin) / _WINDOW))
        windows = 1 if self._in_order else min(parts, end - begin)
        place = (step - begin) * windows // (end - begin)
        first, last = (-(-(end - begin) * part // windows) for part in (place, place + 1))
        late = self._split_deferred(number - 1)[0] if number else self._emitted(0)[:0]
        units = self._split_deferred(number)[1]
        cuts = [max(0, bound * self._per_step - len(late)) for bound in (first, last)]
        return begin + first, self._steps(
            late if first == 0 else late[:0], units[cuts[0] : cuts[1]]
        )

    def _steps(self, late: IntArray, units: IntArray) -> list[tuple[Draw, ...]]:
        """Distribute micro-batches over steps.

        Args:
            late: Micro-batches that must be in the first step, `(n, micro_batch, 2)`.
            units: All other micro-batches, in the same layout.
        """
        every = np.concatenate([late, units])
        buckets = self._bucket[every[:, 0, 0]]
        costs, first = self._cost[buckets].tolist(), self._comes_first[buckets].tolist()
        shown = self._image[every[:, :, 0]].tolist()
        packer = _StepPacker(len(every) // self._per_step, self._per_step, shown)
        numbers = list(range(len(late), len(every)))
        for number in range(len(late)):
            packer.put(number, 0)
        if not self._in_order:
            numbers.sort(key=costs.__getitem__)
            if len(late):
                like = sum(costs[: len(late)]) / len(late)
                nearest = sorted(numbers, key=lambda number: abs(costs[number] - like))
                placed = {number for number in nearest if packer.try_put(number, 0)}
                numbers = [number for number in numbers if number not in placed]
        packer.fill(numbers)
        # Order steps by when their micro-batches filled. Within a step, put micro-batches of
        # similar cost next to each other, since ranks compute those at the same time.
        begin = bool(len(late))
        steps = packer.steps[:begin] + sorted(packer.steps[begin:], key=sum)
        steps = [sorted(step, key=lambda unit: (not first[unit], costs[unit])) for step in steps]
        rows = every.tolist()
        return [tuple(Draw(*draw) for unit in step for draw in rows[unit]) for step in steps]


def _place_in_group(groups: IntArray) -> IntArray:
    """Return each element's position among the elements of its group, counted from 0."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    places = np.empty_like(order)
    places[order] = np.arange(len(groups)) - starts[groups[order]]
    return places


class _StepPacker:
    """Distributes micro-batches over steps, spreading each image over as many steps as possible.

    Args:
        steps: Number of steps.
        size: Micro-batches per step.
        shown: Per micro-batch, the images of its samples.
    """

    def __init__(self, steps: int, size: int, shown: Sequence[Sequence[int]]) -> None:
        self.steps: list[list[int]] = [[] for _ in range(steps)]
        self._size = size
        self._shown = [Counter(images) for images in shown]
        self._image_counts: list[Counter[int]] = [Counter() for _ in range(steps)]
        total = Counter(image for images in shown for image in images)
        self._most = {image: -(-count // steps) for image, count in total.items()}
        for images in self._shown:
            for image, count in images.items():
                self._most[image] = max(self._most[image], count)

    def put(self, number: int, step: int) -> None:
        """Put a micro-batch into a step unconditionally."""
        self.steps[step].append(number)
        self._image_counts[step].update(self._shown[number])

    def try_put(self, number: int, step: int) -> bool:
        """Put it there if there is room and no image repeats too often; return whether it fit."""
        if len(self.steps[step]) == self._size or not self._fits(number, step):
            return False
        self.put(number, step)
        return True

    def fill(self, numbers: Iterable[int]) -> None:
        """Put each micro-batch into the first step that accepts it, swapping if necessary."""
        first, stuck = 0, []
        for number in numbers:
            while first < len(self.steps) and len(self.steps[first]) == self._size:
                first += 1
            if not any(self.try_put(number, step) for step in range(first, len(self.steps))):
                stuck.append(number)
        for number in stuck:
            open_ = next(s for s, own in enumerate(self.steps) if len(own) < self._size)
            self.put(self._swap(number, open_), open_)

    def _fits(self, number: int, step: int, without: int | None = None) -> bool:
        there, less = self._image_counts[step], self._shown[without] if without is not None else {}
        return all(
            there[image] - less.get(image, 0) + count <= self._most[image]
            for image, count in self._shown[number].items()
        )

    def _swap(self, number: int, step: int) -> int:
        """Swap a micro-batch with one that fits into `step`; return the one to put there."""
        near = sorted(range(len(self.steps)), key=lambda other: abs(other - step))
        for other in near[1:]:
            own = self.steps[other]
            for place, held in enumerate(own):
                if self._fits(held, step) and self._fits(number, other, held):
                    own[place] = number
                    self._image_counts[other].subtract(self._shown[held])
                    self._image_counts[other].update(self._shown[number])
                    return held
        return number


def positions_of(micro_batch: int, size: int) -> range:
    """Return the positions of the global batch that one forward computes.

    Args:
        micro_batch: Index of the forward among those of all ranks in a step.
        size: Samples per forward.
    """
    return range(micro_batch * size, (micro_batch + 1) * size)


def nth_variant(count: int, turn: int, *key: object) -> int:
    """Return which of a sample's variants a turn uses.

    Every variant is used once before any repeats, in a new random order each round, so that
    variants of two kinds (a caption and a crop) occur in all combinations.

    Args:
        count: Number of variants.
        turn: Turn of the draw.
        key: What the order depends on: the seed, the kind, the sample.
    """
    if count == 1:
        return 0
    cycle, place = divmod(turn, count)
    order = list(range(count))
    random.Random(":".join(map(str, (*key, cycle)))).shuffle(order)
    return order[place]
