"""What a step sees on any number of ranks, how many steps epochs are, and what is refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec.file.flags import parse_flags, to_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.no_effect import find_inapplicable
from jobs.spec.rules.steps import (
    accumulation_steps,
    base_forwards,
    forwards_of_ranks,
    global_batch_size,
    micro_batches_of,
    passes,
    periodic_saves,
    share_on_card,
    steps_of,
    total_steps,
    with_total_steps,
)
from jobs.spec.rules.strategy import data_parallel_size
from jobs.spec.rules.token_routes import routes_of
from tests.support.paths import ROOT

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


@pytest.mark.parametrize(
    ("values", "forwards", "expected"),
    [
        ({}, 4, 0),
        ({"preservation": "blank"}, 4, 4),
        ({"preservation": "blank", "model_type": "full"}, 4, 0),
        ({"regularization_target": "base"}, 4, 0),
        ({"regularization_target": "base", "num_class_images": 9}, 4, 2),
        ({"regularization_target": "base", "num_class_images": 9, "model_type": "full"}, 4, 0),
        ({"regularization_target": "base", "datasets": [1.0, 3.0]}, 4, 3),
        ({"regularization_target": "base", "datasets": [9.0, 1.0]}, 4, 1),
        ({"regularization_target": "base", "datasets": [None, None]}, 1, 1),
        (
            {"regularization_target": "base", "datasets": [None, None], "preservation": "blank"},
            3,
            5,
        ),
    ],
    ids=str,
)
def test_forwards_of_the_base_in_a_step(
    values: dict[str, Any], forwards: int, expected: int
) -> None:
    if "datasets" in values:
        values = values | {
            "datasets": [
                {"path": f"{n}", "weight": weight, "regularization": n == 1}
                for n, weight in enumerate(values["datasets"])
            ]
        }
    spec = read(**values, gradient_accumulation_steps=forwards)
    assert base_forwards(spec) == expected
    preserved = values.get("preservation") == "blank" and spec.model_type == "lora"
    assert passes(spec) == 1 + preserved


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


# -- epochs --------------------------------------------------------------------------------


@given(st.decimals("0.01", 50, places=2).map(float), st.integers(1, 10**6), st.integers(1, 512))
def test_epochs_are_the_fewest_steps_that_draw_as_many_samples(
    epochs: float, draws: int, size: int
) -> None:
    steps = total_steps(read(num_train_epochs=epochs, global_batch_size=size), draws)
    assert steps is not None
    wanted = Fraction(str(epochs)) * draws
    assert steps * size >= wanted
    assert steps == 1 or (steps - 1) * size < wanted


@pytest.mark.parametrize(
    ("epochs", "draws", "size", "steps"),
    [(1, 200, 8, 25), (3, 20, 8, 8), (0.1, 30, 3, 1), (0.1, 330, 11, 3), (0.7, 10, 7, 1)],
)
def test_epochs_are_as_many_steps_as_they_are_written(
    epochs: float, draws: int, size: int, steps: int
) -> None:
    """A binary fraction is a little more than 0.1: that must not make one step more."""
    assert total_steps(read(num_train_epochs=epochs, global_batch_size=size), draws) == steps


def test_exactly_one_key_decides_the_length() -> None:
    assert total_steps(read()) == 1000
    assert total_steps(read(max_train_steps=7), 10**6) == 7
    epochs = read(num_train_epochs=2)
    assert epochs.max_train_steps is None
    assert (total_steps(epochs), total_steps(epochs, 10)) == (None, 20)
    both = read(num_train_epochs=2, max_train_steps=1000)
    assert [c.message for c in find_conflicts(both)] == [
        "max_train_steps 1000 and num_train_epochs 2 are both set; keep one"
    ]
    assert find_inapplicable(epochs)["max_train_steps"] == "num_train_epochs decides"


def test_a_length_is_replaced_by_a_flag(tmp_path: Path) -> None:
    """A trial of a few steps needs no other file, and neither does a job that resumes."""
    file = tmp_path / "job.yaml"
    for spec in (read(num_train_epochs=2.5), read(max_train_steps=70)):
        file.write_text(dump_spec(spec))
        assert load_spec(file) == spec
        assert total_steps(load_spec(file, {"max_train_steps": "10"})) == 10
        assert total_steps(load_spec(file, {"num_train_epochs": "0.5"}), 100) == 50
    with pytest.raises(SpecError, match="are both set; keep one"):
        load_spec(file, {"max_train_steps": 10, "num_train_epochs": 1})
    few = read(num_train_epochs=2.5).to_dict(only_set=True)
    assert (few["num_train_epochs"], "max_train_steps" in few) == (2.5, False)


def test_ranks_settle_the_length_and_refuse_a_warm_up_that_is_longer() -> None:
    spec = read(
        num_train_epochs=3,
        global_batch_size=8,
        lr_scheduler="cosine",
        lr_warmup_steps=75,
    )
    assert find_conflicts(spec) == []
    with pytest.raises(ValueError, match="is given in epochs"):
        steps_of(spec)
    assert steps_of(with_total_steps(spec, 200)) == 75
    assert with_total_steps(read(), 200) == read()
    with pytest.raises(SpecError) as refused:
        with_total_steps(spec, 192)
    assert str(refused.value) == (
        "lr_warmup_steps (75) is more than the steps of num_train_epochs 3 (72)"
    )


def test_as_many_checkpoints_are_counted_as_there_will_be() -> None:
    assert periodic_saves(read(max_train_steps=100, checkpointing_steps=30)) == 4
    assert periodic_saves(read(checkpointing_steps=0)) == 1
    assert periodic_saves(read(num_train_epochs=2, checkpointing_steps=30)) is None
    assert periodic_saves(read(num_train_epochs=2.5, checkpointing_steps="0.5 epochs")) == 5
    assert periodic_saves(read(max_train_steps=100, checkpointing_steps="1 epoch")) is None


def test_what_follows_is_said_where_it_cannot_be_filled_in() -> None:
    assert "gradient_accumulation_steps" not in find_inapplicable(read(num_processes=2))
    reasons = find_inapplicable(read(num_processes=2, global_batch_size=8))
    assert reasons["gradient_accumulation_steps"] == "global_batch_size sets it to 4"


# -- GPUs of several sizes -----------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 12))
def test_forwards_are_shared_out_so_that_the_last_rank_is_done_first(
    shares: list[int], more: int
) -> None:
    """Each rank has one at least, all are computed once, and moving one ends later or as late."""
    forwards = len(shares) + more
    counts = forwards_of_ranks(shares, forwards)
    assert sum(counts) == forwards
    assert min(counts) >= 1
    ends = [Fraction(count, share) for count, share in zip(counts, shares, strict=True)]
    movable = [end for end, count in zip(ends, counts, strict=True) if count > 1]
    for count, share in zip(counts, shares, strict=True):
        assert Fraction(count + 1, share) >= max(movable, default=0)
    each = [micro_batches_of(counts, rank) for rank in range(len(shares))]
    assert sorted(number for own in each for number in own) == [*range(forwards)]
    assert [len(own) for own in each] == counts


def test_the_documented_shares_give_the_documented_forwards() -> None:
    text = (ROOT / "docs/training.md").read_text()
    pattern = r"batch_shares: \{16GB: (\d+), 24GB: (\d+)\} +# of the (\d+) .* step, (\d+) and (\d+)"
    ((*shares, forwards, first, second),) = [map(int, g) for g in re.findall(pattern, text)]
    assert forwards_of_ranks(shares, forwards) == [first, second]


@given(st.integers(1, 8), st.integers(1, 8))
def test_equal_shares_are_dealt_as_without_shares(ranks: int, forwards: int) -> None:
    counts = forwards_of_ranks([3] * ranks, forwards * ranks)
    assert counts == [forwards] * ranks
    for rank in range(ranks):
        assert micro_batches_of(counts, rank) == [n * ranks + rank for n in range(forwards)]


def test_a_gpu_beyond_all_sizes_and_a_cpu_have_the_largest_share() -> None:
    spec = read(batch_shares={"24GB": 2, 16: 1, 48: 5})
    sizes = {None: 5, 12: 1, 16: 1, 23: 2, 24: 2, 32: 5, 80: 5}
    assert {n: share_on_card(spec, n and n << 30) for n in sizes} == sizes
    assert share_on_card(read(), 16 << 30) == 1


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (3, 3),
        ("3", 3),
        ({16: 24}, {"16GB": 24}),
        ("{24: 0, 16GB: 24}", {"16GB": 24}),
        ("24gb:8,16:24", {"16GB": 24, "24GB": 8}),
        ({"16 GiB": "4"}, {"16GB": 4}),
        ({16: 0}, 0),
        ("{}", 0),
    ],
)
def test_a_number_by_size_of_gpu_is_read_however_it_is_written(written: Any, value: Any) -> None:
    spec = read(swap_blocks=written, num_processes=1)
    assert spec.swap_blocks == value
    assert [*(spec.swap_blocks if isinstance(spec.swap_blocks, dict) else ())] == [
        *(value if isinstance(value, dict) else ())
    ]
    assert load_spec(None, parse_flags(to_flags(spec))[0]).swap_blocks == value


@pytest.mark.parametrize("written", ["x", {16: -1}, {16: 2.5}, True, {"a": 1}, 1000, "1:2:3", [3]])
def test_what_is_no_number_by_size_of_gpu_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="one for each size of GPU, such as"):
        read(swap_blocks=written)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ({"2..-2": 0.5}, {"2..-2": 0.5}),
        ("2..-2:0.5,-1 .. -1: 0.25", {"2..-2": 0.5, "-1..-1": 0.25}),
        ("{2..-2: 0}", None),
        ({}, None),
        ("none", None),
    ],
)
def test_routes_are_read_however_they_are_written(written: Any, value: Any) -> None:
    spec = read(tread=written, num_processes=1)
    assert spec.tread == value
    assert load_spec(None, parse_flags(to_flags(spec))[0]).tread == value


@pytest.mark.parametrize(
    "written",
    ["x", 0.5, {"2..-2": 1}, {"2..-2": -0.1}, {"2-5": 0.5}, {"1..2": True}, {"1..2": "x"}],
)
def test_what_is_no_route_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match=r"a share of tokens .*\{2..-2: 0.5\}"):
        read(tread=written)


def test_routes_are_in_the_order_of_forward_and_within_the_model() -> None:
    assert routes_of({"-3..-2": 0.1, "0..2": 0.5}, 6) == [(0, 2, 0.5), (4 - 1, 4, 0.1)]
    for wrong, message in {
        "6..6": r"6..6 is no range of the model's 6 blocks",
        "3..2": r"3..2 is no range",
        "-7..2": r"-7..2 is no range",
    }.items():
        with pytest.raises(SpecError, match=message):
            routes_of({wrong: 0.5}, 6)
    with pytest.raises(SpecError, match=r"0..2 and 2..4 overlap.*begin at 3"):
        routes_of({"-4..-2": 0.1, "0..2": 0.5}, 6)
