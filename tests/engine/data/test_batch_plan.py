"""The global batch plan, variants and captions: pure, seeded, the same on every rank."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from typing import Any, Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.data.index.batch_plan import (
    _WINDOW,
    BatchPlan,
    Draw,
    Share,
    nth_variant,
    shares_of,
)
from engine.data.index.captions import prompt_text, texts_of, with_class, with_trigger
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.buckets import bucket_sizes, nearest_bucket
from jobs.spec.values.datasets import Dataset

# Datasets, each a list of how many samples it has in each bucket.
_DATASETS = st.lists(
    st.lists(st.integers(0, 13), min_size=3, max_size=3).filter(any), min_size=1, max_size=3
)


def made_of(datasets: list[list[int]]) -> list[int]:
    """The bucket of every sample."""
    return [b for members in datasets for b, count in enumerate(members) for _ in range(count)]


@st.composite
def _plans(draw: st.DrawFn) -> tuple[BatchPlan, list[int]]:
    """A plan over one to three datasets of three buckets, and the image that each sample shows."""
    datasets = draw(_DATASETS)
    buckets = made_of(datasets)
    shares = [Share(sum(members), sum(members) * draw(st.floats(1, 5))) for members in datasets]
    micro = draw(st.integers(1, 4))
    size = micro * draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    several = draw(st.integers(1, 3))  # resolutions of an image, one sample after the other
    images = [sample // several for sample in range(len(buckets))]
    seed = draw(st.integers(0, 1000))
    cost = draw(st.sampled_from([lambda bucket: 1.0, lambda bucket: 4.0**bucket]))
    plan = BatchPlan(buckets, size, seed, shares, micro_batch=micro, images=images, cost=cost)
    return plan, images


def steps_of(plan: BatchPlan, epochs: float) -> int:
    return math.ceil(epochs * plan.draws_per_epoch / plan.global_batch)


def _seen(plan: BatchPlan, steps: range) -> Counter[int]:
    return Counter(draw.sample for step in steps for draw in plan.draws(step))


@given(made=_plans(), begin=st.integers(0, 500))
@settings(max_examples=100, deadline=None)
def test_a_step_is_full_and_every_micro_batch_is_of_one_bucket(
    made: tuple[BatchPlan, list[int]], begin: int
) -> None:
    plan, _ = made
    for step in range(begin, begin + 5):
        draws = plan.draws(step)
        assert len(draws) == plan.global_batch
        for place in range(0, len(draws), plan.micro_batch):
            micro = draws[place : place + plan.micro_batch]
            assert len({plan.buckets[draw.sample] for draw in micro}) == 1


@given(made=_plans(), begin=st.integers(0, 500))
@settings(max_examples=25, deadline=None)
def test_what_comes_first_changes_the_order_of_a_step_alone(
    made: tuple[BatchPlan, list[int]], begin: int
) -> None:
    plan, images = made
    first = plan.buckets[0]
    other = BatchPlan(
        plan.buckets,
        plan.global_batch,
        plan.seed,
        plan.shares,
        micro_batch=plan.micro_batch,
        images=images,
        cost=dict(zip(plan.buckets, plan._cost[plan._bucket].tolist(), strict=True)).__getitem__,
        first=lambda bucket: bucket == first,
    )
    for step in range(begin, begin + 3):
        draws = other.draws(step)
        assert sorted(draws) == sorted(plan.draws(step))
        are_first = [other.buckets[draw.sample] == first for draw in draws]
        assert are_first == sorted(are_first, reverse=True)


@given(made=_plans())
@settings(max_examples=25, deadline=None)
def test_every_sample_is_drawn_in_its_proportion_whatever_the_batch_sizes(
    made: tuple[BatchPlan, list[int]],
) -> None:
    """What waits for its bucket is all that a sample can be behind, after any number of steps."""
    plan, _ = made
    steps = steps_of(plan, 15)
    seen = _seen(plan, range(steps))
    rates = [share.draws / share.samples for share in plan.shares for _ in range(share.samples)]
    epochs = plan.epoch(steps)
    # A micro-batch that waits, one that a window holds back, and the stretch of a round.
    slack = 2 * plan.micro_batch + 3
    for sample, rate in enumerate(rates):
        assert abs(seen[sample] - epochs * rate) <= slack + 2 * rate, (sample, rate)


@given(made=_plans())
@settings(max_examples=30, deadline=None)
def test_nothing_is_drawn_twice_and_no_turn_is_left_out(
    made: tuple[BatchPlan, list[int]],
) -> None:
    plan, _ = made
    # Within a window, forwards wait for those of similar cost; the next one has what is due before.
    steps = steps_of(plan, 12) + 2 * _WINDOW
    drawn = [draw for step in range(steps) for draw in plan.draws(step)]
    assert len(drawn) == len(set(drawn)), "each turn of a sample comes once"
    first = 0
    for share in plan.shares:
        due = range(share.drawn_before(4) // max(share.samples, 1))
        numbers = range(first, first + share.samples)
        assert {Draw(sample, turn) for sample in numbers for turn in due} <= set(drawn)
        first += share.samples


@given(
    datasets=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    times=st.integers(1, 3),
    size=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_alone_in_a_forward_no_image_comes_twice_in_a_step_that_others_could_fill(
    datasets: list[int], times: int, size: int, seed: int
) -> None:
    """At one sample a forward there is nothing that a shape could force."""
    count = sum(datasets)
    plan = BatchPlan(
        [sample % 5 for sample in range(count)], size, seed, [Share(count, count * times)]
    )
    least = -(-size // count)  # copies that cannot be avoided
    for step in range(steps_of(plan, 12 / times)):
        copies = Counter(draw.sample for draw in plan.draws(step))
        assert max(copies.values()) <= least + (times > 1)


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    size=st.integers(1, 32),
    epochs=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_at_one_sample_a_forward_shows_every_image(
    counts: list[int], size: int, epochs: int
) -> None:
    plan = BatchPlan(made_of([counts]), size, 7)
    seen = _seen(plan, range(steps_of(plan, epochs)))
    assert min(seen[sample] for sample in range(sum(counts))) >= epochs - (epochs > 1)


@given(made=_plans(), steps=st.lists(st.integers(0, 800), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_step_is_the_same_however_it_is_reached(
    made: tuple[BatchPlan, list[int]], steps: list[int]
) -> None:
    """By another rank, after a resume, or by threads that read ahead."""
    plan, images = made

    def fresh() -> BatchPlan:
        return BatchPlan(
            plan.buckets,
            plan.global_batch,
            plan.seed,
            plan.shares,
            micro_batch=plan.micro_batch,
            images=images,
            cost=lambda bucket: float(plan._cost[list(dict.fromkeys(plan.buckets)).index(bucket)]),
        )

    forth = [plan.draws(step) for step in steps]
    assert [fresh().draws(step) for step in steps] == forth
    assert [plan.draws(step) for step in reversed(steps)] == forth[::-1]


MIXTURES: Final = {
    "mixed": [{}],
    "weighted": [{"weight": 0.9}, {"weight": 0.1}],
    "halves": [{"weight": 0.5}, {"weight": 0.5}],
    "regularization": [{}, {"regularization": True}],
}


@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1, 4, 8, 32, 64]),
    micro=st.sampled_from([1, 4]),
    mixture=st.sampled_from([*MIXTURES, "three resolutions"]),
    step=st.sampled_from([16, 64]),
)
@settings(max_examples=25, deadline=None)
def test_photographs_are_trained_on_alike_at_every_global_batch(
    seed: int, size: int, micro: int, mixture: str, step: int
) -> None:
    """Half of them of a camera's shape and half cropped freely, over 50 epochs."""
    assume(size % micro == 0)
    rng = random.Random(seed)
    entries = [Dataset(path=str(n), **d) for n, d in enumerate(MIXTURES.get(mixture, [{}]))]
    counts = [100, 50][: len(entries)]
    sides = (512, 768, 1024) if mixture == "three resolutions" else (1024,)
    sizes = {side: bucket_sizes(side, step) for side in sides}
    shapes = [_photograph(rng) for _ in range(sum(counts))]
    buckets = [nearest_bucket(*shape, sizes[side]) for shape in shapes for side in sides]
    images = [image for image in range(len(shapes)) for _ in sides]
    shares = shares_of(entries, [count * len(sides) for count in counts])
    plan = BatchPlan(buckets, size, seed, shares, micro_batch=micro, images=images, cost=math.prod)
    seen: Counter[int] = Counter()
    most, busiest, mean = 0, 0.0, 0.0
    for number in range(steps_of(plan, 50)):
        draws = plan.draws(number)
        seen.update(draw.sample for draw in draws)
        most = max(most, *Counter(images[draw.sample] for draw in draws).values())
        costs = [math.prod(buckets[draw.sample]) for draw in draws[::micro]]
        ranks = min(8, len(costs))
        busiest += sum(max(costs[n : n + ranks]) for n in range(0, len(costs), ranks))
        mean += sum(costs) / ranks
    first = 0
    weights = {"weighted": (0.9, 0.1), "halves": (0.5, 0.5), "regularization": (0.5, 0.5)}
    for share, weight in zip(shares, weights.get(mixture, (1.0,)), strict=True):
        own = [seen[sample] for sample in range(first, first + share.samples)]
        first += share.samples
        assert max(own) <= 1.1 * min(own)
        assert abs(sum(own) / seen.total() - weight) < 0.01
    rarest = max(share.draws / share.samples for share in shares) * len(sides)
    unavoidable = math.ceil(size * rarest / plan.draws_per_epoch)
    assert most <= max(unavoidable + 1, micro * unavoidable)
    assert busiest <= mean * (1.1 if micro == 1 or size <= 8 else 1.3)


def _photograph(rng: random.Random) -> tuple[int, int]:
    if rng.random() < 0.5:
        width, height = rng.choice([(3, 2), (2, 3), (4, 3), (3, 4), (16, 9), (9, 16), (1, 1)])
        return width * 1000, height * 1000
    return round(1000 * 2 ** rng.uniform(-1, 1)), 1000


def test_any_step_of_a_million_samples_is_found_without_walking_to_it() -> None:
    buckets = [(512 + 16 * (number * number % 53), 1024) for number in range(100_000)]
    plan = BatchPlan(buckets, 64, 1, micro_batch=4)
    made: list[int] = []
    stock = plan._fresh

    def counted(epoch: int) -> Any:
        made.append(epoch)
        return stock(epoch)

    plan._fresh = counted  # type: ignore[method-assign]
    assert len(plan.draws(10_000_000)) == 64
    assert len(set(made)) <= 3, "the epoch, the one before, and where what waits comes from"


@given(members=st.lists(st.integers(1, 20), min_size=1, max_size=3), epochs=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_exactly_once_an_epoch(members: list[int], epochs: int) -> None:
    plan = BatchPlan(made_of([members]), 1, seed=3)
    steps = range(epochs * sum(members))
    seen = Counter(draw for step in steps for draw in plan.draws(step))
    expected = {Draw(s, turn) for s in range(sum(members)) for turn in range(epochs)}
    assert seen == Counter(expected), "and takes its turns one after the other"


def test_what_comes_more_than_once_but_not_twice_takes_turns_over_the_epochs() -> None:
    plan = BatchPlan(["a"] * 4, 1, 0, [Share(4, 5)])
    seen = Counter(d.sample for step in range(20) for d in plan.draws(step))
    assert set(seen.values()) == {5}, "in four epochs each came one more time"


def test_repeats_lie_apart_and_datasets_mix() -> None:
    plan = BatchPlan(["a"] * 30, 1, 0, [Share(10, 100), Share(20, 20)])
    order = [plan.draws(step)[0].sample for step in range(120)]
    for sample in range(10):
        places = [place for place, drawn in enumerate(order) if drawn == sample]
        assert len(places) == 10
        assert max(b - a for a, b in itertools.pairwise(places)) < 30, "ten to an epoch of 120"
    assert any(sample >= 10 for sample in order[:40])
    assert any(sample >= 10 for sample in order[-40:])


def test_orders_differ_by_epoch_and_seed_and_are_stable() -> None:
    def steps(seed: int, start: int) -> list[tuple[Draw, ...]]:
        plan = BatchPlan(("a",) * 12, global_batch=4, seed=seed)
        return [plan.draws(step) for step in range(start, start + 3)]

    def samples(batches: list[tuple[Draw, ...]]) -> list[int]:
        return [draw.sample for batch in batches for draw in batch]

    assert samples(steps(1, 0)) != samples(steps(1, 3))
    assert samples(steps(1, 0)) != samples(steps(2, 0))
    assert steps(1, 300) == steps(1, 300)


@pytest.mark.parametrize(
    ("size", "options", "digest"),
    [
        (12, {"shares": [Share(60, 150.5), Share(30, 30)], "micro_batch": 3}, "16cae86a8e5e0986"),
        (64, {}, "43a4d969b7d75340"),
    ],
)
def test_a_resumed_run_goes_on_where_it_was(size: int, options: Any, digest: str) -> None:
    """Also after an update: where this order changes, so does `PLAN_VERSION`."""
    buckets = [number * number % 7 for number in range(90)]
    images = [number // 2 for number in range(90)]
    plan = BatchPlan(buckets, size, 1, images=images, cost=float, **options)
    drawn = [tuple(draw) for step in range(40) for draw in plan.draws(step)]
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == digest


def test_an_epoch_may_be_asked_for_in_any_order() -> None:
    plan = BatchPlan(("a",) * 6, 2, 5)
    forth = [plan.draws(step) for step in range(30)]
    assert [plan.draws(step) for step in reversed(range(30))] == forth[::-1]


def test_a_batch_larger_than_the_data_takes_every_turn() -> None:
    plan = BatchPlan(["a", "a"], 6, 0)
    assert sorted(plan.draws(0)) == [Draw(s, turn) for s in (0, 1) for turn in (0, 1, 2)]
    assert [sorted(BatchPlan(["a"], 6, 0).draws(step))[0].turn for step in range(2)] == [0, 6]


def test_an_epoch_that_cannot_be_planned_is_refused() -> None:
    far = [Dataset(path="a", weight=1000), Dataset(path="b", weight=0.001)]
    with pytest.raises(UserError, match="weight, an epoch has"):
        shares_of(far, [100, 100])
    with pytest.raises(UserError, match="repeats, an epoch has 100,000,000 samples"):
        shares_of([Dataset(path="a", repeats=10_000)], [10_000])


@pytest.mark.parametrize(
    ("datasets", "samples", "draws"),
    [
        ([{"repeats": 3}, {}], [10, 5], [30, 5]),
        ([{"weight": 1}, {"weight": 1}], [100, 10], [100, 100]),
        ([{"weight": 3}, {"weight": 1}], [10, 10], [30, 10]),
        ([{"weight": 0.5}, {"weight": 0.25}], [7, 3], [7, 3.5]),
        ([{"weight": 2}, {"weight": 1}], [5, 0], [5, 0]),
    ],
)
def test_repeats_and_weights_say_how_often_a_dataset_is_drawn_from(
    datasets: list[dict[str, Any]], samples: list[int], draws: list[int]
) -> None:
    entries = [Dataset(path=str(number), **d) for number, d in enumerate(datasets)]
    assert [share.draws for share in shares_of(entries, samples)] == draws


@given(count=st.integers(1, 9), cycle=st.integers(0, 5), sample=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_variant_comes_once_before_any_comes_again(
    count: int, cycle: int, sample: int
) -> None:
    turns = range(cycle * count, (cycle + 1) * count)
    assert sorted(nth_variant(count, turn, 7, "view", sample) for turn in turns) == [*range(count)]


def test_variants_of_two_kinds_meet_in_all_combinations() -> None:
    pairs = Counter(
        (nth_variant(2, turn, 1, "view", sample), nth_variant(2, turn, 1, "caption", sample))
        for sample in range(50)
        for turn in range(8)
    )
    assert min(pairs.values()) > 60, pairs


# -- captions ------------------------------------------------------------------------------

VARIANTS = {"caption_lines": "variants"}


@pytest.mark.parametrize(
    ("written", "changes", "trigger", "texts"),
    [
        (("a cat",), {}, None, ("a cat",)),
        (("a cat\n\n  two  cats \n",), VARIANTS, None, ("a cat", "two cats")),
        (("a cat\ntwo cats",), {}, None, ("a cat two cats",)),
        (("a", "b", "a"), {}, None, ("a", "b")),
        ((), {}, None, ("",)),
        ((" \n ",), {}, None, ("",)),
        ((), {}, "sks", ("sks",)),
        (("a cat",), {}, "sks", ("sks, a cat",)),
        (("a photo of [trigger]",), {}, "sks dog", ("a photo of sks dog",)),
        (("a SKS cat",), {}, "sks", ("a SKS cat",)),
        (("two masks on a wall",), {}, "sks", ("sks, two masks on a wall",)),
        (("C++ art",), {}, "c++", ("C++ art",)),
        (("one\u2028two\r\nthree",), VARIANTS, None, ("one two", "three")),
        (("keep, it",), {"shuffle_captions": True, "keep_tags": 2}, None, ("keep, it",)),
    ],
)
def test_captions_become_texts(
    written: tuple[str, ...], changes: dict[str, Any], trigger: str | None, texts: tuple[str, ...]
) -> None:
    assert texts_of(written, JobSpec(**changes), trigger) == texts


def test_shuffled_tags_are_the_same_tags_and_the_first_ones_stay() -> None:
    spec = JobSpec(shuffle_captions=True, caption_shuffles=6, keep_tags=1)
    texts = texts_of(("1girl, red, blue, green, tall",), spec, None)
    assert texts[0] == "1girl, red, blue, green, tall", "as written comes first"
    assert len(texts) == len(set(texts)) > 3
    for text in texts:
        assert text.startswith("1girl, ")
        assert sorted(text.split(", ")) == ["1girl", "blue", "green", "red", "tall"]
    assert texts == texts_of(("1girl, red, blue, green, tall",), spec, None), "in every job alike"


def test_a_trigger_word_stays_in_front_when_tags_are_shuffled() -> None:
    spec = JobSpec(shuffle_captions=True, caption_shuffles=8)
    texts = texts_of(("red, blue, green",), spec, "sks")
    assert len(texts) > 3
    assert all(text.startswith("sks, ") for text in texts)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("sks, red", "dog, red"),
        ("a Sks and SKS", "a dog and dog"),
        ("sksy and a-sks", "sksy and a-dog"),
        ("", ""),
        ("a horse", "a horse"),
    ],
)
def test_a_class_stands_for_the_trigger_word_alone(caption: str, expected: str) -> None:
    assert with_class(caption, "sks", "dog") == expected
    assert with_class(caption, None, "dog") == caption
    assert with_class("sks", "sks", r"\\1") == r"\\1", "no template of a regular expression"


def test_a_prompt_only_has_its_placeholder_replaced() -> None:
    spec = JobSpec(trigger_word="sks")
    assert prompt_text("a photo of [trigger]", spec) == "a photo of sks"
    assert prompt_text("a horse", spec) == "a horse"
    assert with_trigger("a horse", None) == "a horse"
