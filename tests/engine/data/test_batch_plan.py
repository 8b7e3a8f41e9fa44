"""The global batch plan, variants and captions: pure, seeded, the same on every rank."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.index.batch_plan import (
    BatchPlan,
    Draw,
    Share,
    nth_variant,
    positions_of_rank,
    shares_of,
)
from engine.data.index.captions import prompt_text, texts_of, with_trigger
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from jobs.spec.values.datasets import Dataset

# Datasets, each a list of how many samples it has in each bucket.
_DATASETS = st.lists(
    st.lists(st.integers(0, 13), min_size=3, max_size=3).filter(any), min_size=1, max_size=3
)


def made_of(datasets: list[list[int]]) -> list[int]:
    """The bucket of every sample."""
    return [b for members in datasets for b, count in enumerate(members) for _ in range(count)]


@given(
    datasets=_DATASETS,
    extra=st.lists(st.floats(1, 5), min_size=3, max_size=3),
    ranks=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    seed=st.integers(0, 1000),
    first_epoch=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_every_epoch_shows_every_sample_as_often_as_it_should_and_ranks_the_same_shapes(
    datasets: list[list[int]],
    extra: list[float],
    ranks: int,
    batch: int,
    accumulation: int,
    seed: int,
    first_epoch: int,
) -> None:
    buckets = made_of(datasets)
    shares = [
        Share(sum(members), round(sum(members) * times))
        for members, times in zip(datasets, extra, strict=False)
    ]
    size = ranks * batch * accumulation
    plan = BatchPlan(buckets, size, seed, shares)
    seen: Counter[int] = Counter()
    begin = first_epoch * plan.steps_per_epoch
    for step in range(begin, begin + plan.steps_per_epoch):
        draws = plan.draws(step)
        assert len(draws) == size, "every batch is full"
        assert len({buckets[draw.sample] for draw in draws}) == 1, "all of one bucket"
        seen.update(draw.sample for draw in draws)
        positions = [
            [list(positions_of_rank(rank, ranks, micro, batch)) for micro in range(accumulation)]
            for rank in range(ranks)
        ]
        assert {len(part) for own in positions for part in own} == {batch}, "equal counts"
        assert sorted(p for own in positions for part in own for p in part) == list(range(size))
    first = 0
    for share in shares:
        own = [seen[sample] for sample in range(first, first + share.samples)]
        first += share.samples
        assert min(own) >= share.draws // share.samples >= 1, "nothing is left out"
    filled = sum(seen.values()) - plan.draws_per_epoch
    assert 0 <= filled < size * len(set(buckets)), "only last batches are filled up"
    # A bucket's last batch is filled from the beginning of its order, over and over if it is small.
    most = {bucket: -(-size // draws) for bucket, draws in plan.bucket_draws.items()}
    for sample, count in seen.items():
        share = shares[_dataset_of(sample, shares)]
        fair = -(-share.draws // share.samples)
        assert count <= (fair + 1) * (1 + most[buckets[sample]])


def _dataset_of(sample: int, shares: list[Share]) -> int:
    for number, share in enumerate(shares):
        if sample < share.samples:
            return number
        sample -= share.samples
    raise AssertionError("no such sample")


@given(
    datasets=_DATASETS, per_rank=st.integers(1, 2), seed=st.integers(0, 99), step=st.integers(0, 20)
)
@settings(max_examples=30, deadline=None)
def test_the_global_order_is_the_same_for_every_rank_count(
    datasets: list[list[int]], per_rank: int, seed: int, step: int
) -> None:
    """One global batch, shared out over 1, 2, 4 or 8 ranks, in one or several forwards."""
    buckets = made_of(datasets)
    size = 16 * per_rank
    drawn = BatchPlan(buckets, size, seed).draws(step)
    for ranks in (1, 2, 4, 8):
        # As each of the ranks would make it, in a process of its own.
        batches = []
        for micro in range(2):
            for rank in range(ranks):
                plan = BatchPlan(tuple(buckets), size, seed)
                own = size // ranks // 2
                batches += [plan.draws(step)[p] for p in positions_of_rank(rank, ranks, micro, own)]
        assert batches == list(drawn)


@given(members=st.lists(st.integers(1, 20), min_size=1, max_size=3), epochs=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_without_fill_every_sample_comes_exactly_once_an_epoch(
    members: list[int], epochs: int
) -> None:
    plan = BatchPlan(made_of([members]), 1, seed=3)
    seen = Counter(
        draw for step in range(epochs * plan.steps_per_epoch) for draw in plan.draws(step)
    )
    expected = {Draw(s, turn) for s in range(sum(members)) for turn in range(epochs)}
    assert seen == Counter(expected), "and takes its turns one after the other"


def test_what_comes_more_than_once_but_not_twice_takes_turns_over_the_epochs() -> None:
    plan = BatchPlan(["a"] * 4, 1, 0, [Share(4, 5)])
    seen = Counter(d.sample for step in range(4 * plan.steps_per_epoch) for d in plan.draws(step))
    assert set(seen.values()) == {5}, "in four epochs each came one more time"


def test_repeats_lie_apart_and_datasets_mix() -> None:
    plan = BatchPlan(["a"] * 30, 1, 0, [Share(10, 100), Share(20, 20)])
    order = [plan.draws(step)[0].sample for step in range(plan.steps_per_epoch)]
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
    # A checkpoint of an earlier release goes on where it was: this order must never change.
    assert samples(steps(1, 0)) == [5, 7, 2, 8, 1, 6, 3, 11, 0, 4, 10, 9]


def test_an_epoch_may_be_asked_for_in_any_order() -> None:
    plan = BatchPlan(("a",) * 6, 2, 5)
    forth = [plan.draws(step) for step in range(30)]
    assert [plan.draws(step) for step in reversed(range(30))] == forth[::-1]


def test_what_fills_a_batch_takes_its_turns_too() -> None:
    (batch,) = (BatchPlan(["a"], 6, 0).draws(step) for step in range(1))
    assert [draw.turn for draw in batch] == [0, 1, 2, 3, 4, 5]
    pair = BatchPlan(["a", "a"], 6, 0).draws(0)
    assert sorted(pair) == [Draw(s, turn) for s in (0, 1) for turn in (0, 1, 2)]


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
        ([{"weight": 0.5}, {"weight": 0.25}], [7, 3], [7, 4]),
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


def test_a_prompt_only_has_its_placeholder_replaced() -> None:
    spec = JobSpec(trigger_word="sks")
    assert prompt_text("a photo of [trigger]", spec) == "a photo of sks"
    assert prompt_text("a horse", spec) == "a horse"
    assert with_trigger("a horse", None) == "a horse"
