"""What a checkpoint remembers of its data: enough to see that a step trains on other samples."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.checkpoint.data_facts import data_facts, tell_difference
from engine.data.index.batch_plan import BatchPlan
from engine.data.index.data_index import DataIndex, Sample
from engine.data.index.views import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

CAT, DOG = (
    Reference(f"{digest}.png", "", 64, 64, digest * 32, True, (64, 64), (64, 64))
    for digest in ("1a", "1b")
)
SAMPLES = [
    Sample("a.png", "/a.png", 0, ("one",), 64, 64, "0a" * 32, (64, 64)),
    Sample("b.png", "/b.png", 0, ("two",), 96, 64, "0b" * 32, (96, 64)),
    Sample("c", "/table", 0, ("three",), 64, 64, "0c" * 32, (64, 64), row=4),
]


def facts_of(samples: list[Sample], batch: int = 1) -> dict[str, object]:
    index = DataIndex(samples)
    return data_facts(index, BatchPlan([sample.bucket for sample in samples], batch, seed=0))


def test_what_is_recorded_is_what_older_checkpoints_hold() -> None:
    """A digest of another making would tell every resumed run that its data has changed."""
    assert facts_of(SAMPLES) == {
        "samples": 3,
        "steps_per_epoch": 3,
        "plan": 2,
        "draws_per_epoch": 3,
        "digest": "84a46cf295c920c3",
    }
    pair = [replace(SAMPLES[0], references=(CAT,))]
    assert facts_of(pair)["digest"] == "f829136a826c79da"
    # Before there were shares, a first frame was given or not.
    always = [replace(SAMPLES[0], bucket=(64, 64, 9), from_first=1.0)]
    assert facts_of(always)["digest"] == "df67ef661a536459"
    shared = [replace(always[0], from_first=0.5)]
    assert facts_of(shared)["digest"] != facts_of(always)["digest"]


@pytest.mark.parametrize(
    "change",
    [
        lambda samples: [replace(samples[0], digest="0d" * 32), *samples[1:]],
        lambda samples: [*samples[:2], replace(samples[2], digest="0d" * 32)],
        lambda samples: [samples[0], replace(samples[1], bucket=(64, 96)), samples[2]],
        lambda samples: [*samples[:2], replace(samples[2], row=5)],
        lambda samples: [samples[1], samples[0], samples[2]],
        lambda samples: samples[:2],
        lambda samples: [*samples, samples[0]],
        lambda samples: [replace(samples[0], mask="0e" * 32), *samples[1:]],
        lambda samples: [replace(samples[0], references=(CAT,)), *samples[1:]],
    ],
    ids=[
        "first-file",
        "last-file",
        "bucket",
        "row",
        "order",
        "one-less",
        "one-more",
        "mask",
        "reference",
    ],
)
def test_other_samples_have_another_digest(
    change: Callable[[list[Sample]], list[Sample]],
) -> None:
    assert facts_of(change(SAMPLES))["digest"] != facts_of(SAMPLES)["digest"]


def test_each_conditioning_image_is_in_the_digest() -> None:
    found = {
        str(facts_of([replace(SAMPLES[0], references=images)])["digest"])
        for images in ((CAT,), (DOG,), (CAT, DOG), (DOG, CAT))
    }
    assert len(found) == 4


def test_where_samples_lie_and_how_many_make_a_step_is_not_in_the_digest() -> None:
    moved = [replace(sample, path=f"/elsewhere/{sample.name}") for sample in SAMPLES]
    assert facts_of(moved) == facts_of(SAMPLES)
    larger = facts_of(SAMPLES, batch=2)
    assert larger["digest"] == facts_of(SAMPLES)["digest"]
    assert larger["steps_per_epoch"] == 1.5


def test_other_data_is_told_and_the_same_is_not() -> None:
    before = {"samples": 4, "steps_per_epoch": 2, "digest": "a"}
    assert tell_difference(before, dict(before)) is None
    assert tell_difference({}, before) is None, "nothing is known of old checkpoints"
    assert "4 → 5 samples" in (
        tell_difference(before, before | {"samples": 5, "digest": "b"}) or ""
    )
    assert "different ones among" in (tell_difference(before, before | {"digest": "b"}) or "")
