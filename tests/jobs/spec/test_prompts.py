"""Prompts that are sampled while training: how they may be written, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.errors import SpecError
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.job_spec import JobSpec
from jobs.spec.keys.prompts import ValidationPrompt, read_prompts, requests_of, size_of
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.warnings import find_warnings

GOOD: dict[str, Any] = {"pretrained_model_name_or_path": "m", "dataset": "d"}


def prompts_of(written: Any) -> Any:
    return JobSpec(**GOOD, validation_prompts=written).to_dict()["validation_prompts"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a cat", ["a cat"]),
        ("a cat, a dog", ["a cat", "a dog"]),
        (["a cat, sitting"], ["a cat, sitting"]),
        ("", []),
        ([], []),
        ([""], [""]),
        ({"prompt": "a"}, ["a"]),
        ([{"prompt": "a", "seed": None}], ["a"]),
        (ValidationPrompt(prompt="a"), ["a"]),
        ([{"prompt": "a", "Seed": 3}, "b"], [{"prompt": "a", "seed": 3}, "b"]),
        (
            [{"prompt": "a", "num-inference-steps": "8", "guidance_scale": 2}],
            [{"prompt": "a", "steps": 8, "guidance": 2.0}],
        ),
        (
            "{prompt: a, negative_prompt: b, seed: 3}",
            [{"prompt": "a", "negative_prompt": "b", "seed": 3}],
        ),
        (
            ['{"prompt": "a", "resolution": "64x32"}', "{a|b} cat", "{seed: 3}"],
            [{"prompt": "a", "resolution": "64x32"}, "{a|b} cat", "{seed: 3}"],
        ),
        ([{"prompt": "{prompt: a}"}], [{"prompt": "{prompt: a}"}]),
        ([{"prompt": "a", "negative_prompt": ""}], [{"prompt": "a", "negative_prompt": ""}]),
    ],
)
def test_prompts_may_be_written_as_people_write_them(written: Any, meant: Any) -> None:
    assert prompts_of(written) == meant
    assert prompts_of(meant) == meant


def test_flags_say_what_the_file_says() -> None:
    words = ["--validation_prompts=a, b", "--validation_prompts={prompt: c, seed: 3}"]
    spec = load_spec(None, GOOD | parse_flags(words)[0])
    assert spec.to_dict()["validation_prompts"] == ["a, b", {"prompt": "c", "seed": 3}]
    assert "- a, b\n- prompt: c\n  seed: 3\n" in dump_spec(spec)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ([{"prompt": "a", "stepps": 3}], 'entry 1 has an unknown key "stepps" (did you mean "st'),
        (["a", {"seed": 3}], "entry 2 prompt: field required"),
        ([{"prompt": "a", "steps": 0}], "entry 1 steps"),
        ([{"prompt": "a", "seed": -1}], "entry 1 seed"),
        ([{"prompt": "a", "resolution": "big"}], "use a side such as 768 or WIDTHxHEIGHT"),
        ([3], "entry 1"),
        (3, "list"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(written: Any, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(None, GOOD | {"validation_prompts": written})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (768, 768),
        ("768", 768),
        ("768x512", "768x512"),
        (" 768 X 512 ", "768x512"),
        ("768×768", 768),
        ([768, 512], "768x512"),
        ("none", None),
        (None, None),
    ],
)
def test_sizes(written: Any, meant: Any) -> None:
    assert JobSpec(**GOOD, validation_resolution=written).validation_resolution == meant


@pytest.mark.parametrize(
    "written", [8, "8x512", "512x9999", True, 1.5, "512x", {"a": 1}, [1, 2, 3]]
)
def test_sizes_that_cannot_be(written: Any) -> None:
    with pytest.raises(ValidationError):
        JobSpec(**GOOD, validation_resolution=written)


def test_pictures_are_made_of_the_familys_steps() -> None:
    assert size_of(100, 16) == (96, 96)
    assert size_of("100x33", 16) == (96, 32)
    assert size_of(16, 16) == (16, 16)


def test_a_prompt_says_what_it_says_and_the_job_the_rest() -> None:
    spec = JobSpec(
        **GOOD,
        resolution=64,
        seed=7,
        validation_num_inference_steps=5,
        validation_guidance=2.0,
        validation_negative_prompt="blurry",
        validation_true_cfg_scale=4.0,
        validation_prompts=[
            "a",
            {
                "prompt": "b",
                "negative_prompt": "",
                "resolution": "96x32",
                "steps": 3,
                "guidance": 0.0,
                "seed": 0,
                "true_cfg_scale": 1.0,
            },
        ],
    )
    first, second = requests_of(spec)
    assert (first.width, first.height, first.steps, first.guidance) == (64, 64, 5, 2.0)
    assert (first.negative_prompt, first.true_cfg_scale, first.seed) == ("blurry", 4.0, 7)
    assert first.guided
    assert (second.width, second.height, second.steps, second.guidance) == (96, 32, 3, 0.0)
    assert (second.negative_prompt, second.true_cfg_scale, second.seed) == ("", 1.0, 0)
    assert not second.guided
    of_its_own = spec.model_copy(update={"validation_seed": 3})
    assert [request.seed for request in requests_of(of_its_own)] == [3, 0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"validation_prompts": ["[trigger]"]}, "is not replaced without a trigger_word"),
        ({"validation_prompts": [{"prompt": "a", "negative_prompt": "b"}]}, "prompt has no effect"),
        (
            {
                "validation_prompts": ["a"],
                "validation_negative_prompt": "b",
                "validation_true_cfg_scale": 1.0,
            },
            "prompt has no effect",
        ),
        ({"validation_prompts": ["a"], "validation_true_cfg_scale": 3}, "without a neg"),
        ({"validation_prompts": ["a"], "validation_resolution": 100}, "samples are 96x96"),
        ({"validation_prompts": [{"prompt": "a", "resolution": "64x40"}]}, "samples are 64x32"),
        ({"validation_on_startup": True}, "validation_on_startup: no effect"),
        ({"validation_loss_steps": 5}, "needs validation_fraction"),
        (
            {"model_family": "minimax_h3", "train_audio": True, "fps": 16},
            "places sound beside frames at 24 per second",
        ),
        (
            {"model_family": "minimax_h3", "train_audio": True, "validation_prompts": ["a"]},
            "samples are single images, without motion and sound; to sample videos, set "
            "validation_num_frames, such as 73",
        ),
        (
            {
                "model_family": "ltx2",
                "model_flavour": "2-19b",
                "validation_prompts": [{"prompt": "a", "conditioning_image": "b"}],
            },
            "set validation_num_frames, such as 81",
        ),
    ],
)
def test_what_has_no_effect_is_said(values: dict[str, Any], words: str) -> None:
    (warning,) = find_warnings(JobSpec(**GOOD, **values))
    assert words in warning
    assert find_conflicts(JobSpec(**GOOD, **values)) == []


@pytest.mark.parametrize(
    "values",
    [
        {"validation_prompts": ["a"], "validation_resolution": "64x32"},
        {
            "validation_prompts": ["a"],
            "validation_negative_prompt": "",
            "validation_true_cfg_scale": 2,
        },
        {"validation_prompts": [{"prompt": "a", "negative_prompt": "b", "true_cfg_scale": 2}]},
        {"validation_fraction": 0.1, "validation_loss_steps": 5, "validation_on_startup": True},
        {"validation_prompts": ["a"], "model_family": "minimax_h3"},
        {"model_family": "minimax_h3", "train_audio": True},
        {
            "model_family": "minimax_h3",
            "train_audio": True,
            "validation_prompts": [{"prompt": "a", "num_frames": 1}, "b"],
            "validation_num_frames": 73,
        },
        {"model_family": "ltx2", "train_audio": True, "fps": 16},
    ],
)
def test_what_has_an_effect_is_not_warned_of(values: dict[str, Any]) -> None:
    assert find_warnings(JobSpec(**GOOD, **values)) == []


def test_context_parallel_samples_must_divide() -> None:
    values = GOOD | {"num_processes": 2, "strategy": "fsdp2", "context_parallel_size": 2}
    odd = values | {"validation_prompts": [{"prompt": "a", "resolution": 48}]}
    (conflict,) = find_conflicts(JobSpec(**odd))
    assert conflict.key == "validation_prompts"
    assert "does not divide the 9 tokens of samples of 48x48" in conflict.message
    assert find_conflicts(JobSpec(**values, validation_prompts=["a"])) == []
    filled = odd | {"model_family": "minimax_h3", "max_sequence_length": 511}
    assert find_conflicts(JobSpec(**filled)) == [], "rows are added"


@given(text=st.text(max_size=20) | st.text("{}prom:t,\"'", max_size=20))
def test_any_text_is_a_prompt_that_comes_back(text: str) -> None:
    spec = JobSpec(**GOOD, validation_prompts=[{"prompt": text}])
    assert JobSpec(**spec.to_dict()) == spec
    assert isinstance(read_prompts([text]), list)
