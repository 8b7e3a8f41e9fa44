"""What an optimizer step sees on any number of ranks, and what is refused with what would do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.no_effect import find_inapplicable
from jobs.spec.rules.steps import accumulation_steps, global_batch_size
from jobs.spec.rules.strategy import data_parallel_size

if TYPE_CHECKING:
    from pathlib import Path

GIVEN = {"pretrained_model_name_or_path": "m", "dataset": "d"}
KEYS = ("global_batch_size", "gradient_accumulation_steps")


def read(**values: Any) -> JobSpec:
    return JobSpec.model_validate(GIVEN | values)


def said(spec: JobSpec) -> list[str]:
    return [str(conflict) for conflict in find_conflicts(spec) if conflict.key in KEYS]


@st.composite
def splits(draw: st.DrawFn) -> dict[str, Any]:
    """Ranks, alone or in groups that share samples, and what each computes at once."""
    group = draw(st.sampled_from([1, 1, 2, 4]))
    return {
        "num_processes": group * draw(st.integers(1, 12)),
        "context_parallel_size": group,
        "train_batch_size": draw(st.integers(1, 6)),
    }


@given(splits(), st.integers(1, 20))
def test_without_a_global_batch_accumulation_is_what_the_job_says(
    split: dict[str, Any], forwards: int
) -> None:
    spec = read(**split, gradient_accumulation_steps=forwards)
    assert accumulation_steps(spec) == forwards
    assert global_batch_size(spec) == (
        data_parallel_size(spec) * split["train_batch_size"] * forwards
    )
    assert said(spec) == []


@given(splits(), st.integers(1, 96))
def test_a_global_batch_is_kept_exactly_or_refused_with_what_would_do(
    split: dict[str, Any], size: int
) -> None:
    spec = read(**split, global_batch_size=size)
    at_once = data_parallel_size(spec) * split["train_batch_size"]
    assert global_batch_size(spec) == size
    if size % at_once == 0:
        assert said(spec) == []
        assert accumulation_steps(spec) * at_once == size
        return
    (sentence,) = said(spec)
    _, _, choices = sentence.partition("; use ")
    assert choices
    for choice in choices.split(", or "):
        key, _, numbers = choice.rpartition(": ")
        for number in map(int, re.findall(r"\d+", numbers)):
            other = read(**split | {"global_batch_size": size} | {key or "num_processes": number})
            assert said(other) == [], (sentence, choice)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"num_processes": 8, "global_batch_size": 12},
            "global_batch_size 12 is not a multiple of 8 (8 ranks x train_batch_size 1); "
            "use global_batch_size: 8 or 16, or 6 or 12 ranks",
        ),
        (
            {"gpus": 4, "train_batch_size": 4, "global_batch_size": 12},
            "global_batch_size 12 is not a multiple of 16 (4 ranks x train_batch_size 4); "
            "use global_batch_size: 16, or train_batch_size: 3, or 3 ranks",
        ),
        (
            {"num_processes": 4, "context_parallel_size": 2, "global_batch_size": 3},
            "global_batch_size 3 is not a multiple of 2 (4 ranks / context_parallel_size 2 x "
            "train_batch_size 1); use global_batch_size: 2 or 4, or 2 or 6 ranks",
        ),
        (
            {"num_processes": 2, "global_batch_size": 8, "gradient_accumulation_steps": 1},
            "gradient_accumulation_steps 1 contradicts global_batch_size 8 (2 ranks x "
            "train_batch_size 1 x 1 = 2); remove gradient_accumulation_steps",
        ),
    ],
)
def test_what_does_not_divide_or_contradicts_is_one_sentence(
    values: dict[str, Any], sentence: str
) -> None:
    assert said(read(**values)) == [sentence]


def test_both_keys_may_say_the_same() -> None:
    assert said(read(num_processes=2, global_batch_size=8, gradient_accumulation_steps=4)) == []


@given(splits(), st.none() | st.integers(1, 4))
def test_a_job_is_written_down_and_read_back(split: dict[str, Any], times: int | None) -> None:
    """Neither text fixes an accumulation that follows: on other GPUs it will be another."""
    size = times and times * split["num_processes"] * split["train_batch_size"]
    spec = read(**split, global_batch_size=size)
    assert JobSpec(**spec.to_dict()) == spec
    few = spec.to_dict(only_set=True)
    assert JobSpec(**few) == spec
    assert "gradient_accumulation_steps" not in few


def test_a_flag_replaces_what_the_file_says_in_another_way(tmp_path: Path) -> None:
    """A job's own file has every key, also those that nobody has set."""
    file = tmp_path / "job.yaml"
    file.write_text(dump_spec(read(num_processes=2, gradient_accumulation_steps=3)))
    assert accumulation_steps(load_spec(file)) == 3
    assert accumulation_steps(load_spec(file, {"global_batch_size": "8"})) == 4
    file.write_text(dump_spec(read(num_processes=2, global_batch_size=8)))
    assert accumulation_steps(load_spec(file, {"num_processes": 4})) == 2
    other = load_spec(file, {"gradient_accumulation_steps": "3"})
    assert (accumulation_steps(other), global_batch_size(other)) == (3, 6)
    unset = load_spec(file, {"global_batch_size": None})
    assert (accumulation_steps(unset), global_batch_size(unset)) == (1, 2)


def test_what_follows_is_said_where_it_cannot_be_filled_in() -> None:
    assert "gradient_accumulation_steps" not in find_inapplicable(read(num_processes=2))
    reasons = find_inapplicable(read(num_processes=2, global_batch_size=8))
    assert reasons["gradient_accumulation_steps"] == "global_batch_size sets it to 4"
