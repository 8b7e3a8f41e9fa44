"""What the new-job form holds: texts, values, problems by field. No widgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from PIL import Image

from jobs.errors import UserError
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec, field_names
from jobs.spec.rules.conflicts import find_conflicts
from tests.support.jobs.spec_strategies import REQUIRED, VALUES
from tui.form import draft, pages

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"pretrained_model_name_or_path": "m", "dataset": "d", "num_processes": 2}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("learning_rate", 1e-4, "0.0001"),
        ("max_train_steps", 20, "20"),
        ("lora_alpha", None, ""),
        ("validation_scores", [], ""),
        ("keep_in_full_precision", [], "[]"),
        ("validation_prompts", ["a red, round thing", "b"], "a red, round thing | b"),
        (
            "validation_prompts",
            ["a", {"prompt": "b|c", "seed": 3}],
            'a | {"prompt": "b\\u007cc", "seed": 3}',
        ),
    ],
)
def test_a_value_stands_in_an_input_as_people_write_it(name: str, value: object, text: str) -> None:
    assert draft.as_text(name, value) == text


def test_prompts_may_hold_commas_and_come_back_as_they_were() -> None:
    prompts = ["a red, round thing", "a blue square"]
    text = draft.as_text("validation_prompts", prompts)
    assert draft.from_text("validation_prompts", text) == prompts


@pytest.mark.parametrize(
    "prompts",
    [
        [{"prompt": "a", "negative_prompt": "b | c", "resolution": "64x32", "guidance": 2.5}, "d"],
        ["a | b", " a ", "", "é", "two\nlines", "\x85 \u2028", '{"prompt": "b"}', "{a|b} cat"],
        [{"prompt": "{prompt: a}"}, {"prompt": "ü|\n", "seed": 2**63 - 1}],
    ],
)
def test_the_form_keeps_prompts_with_settings_and_strange_ones(prompts: list[Any]) -> None:
    spec = JobSpec(**GOOD, validation_prompts=prompts)
    text = draft.as_text("validation_prompts", spec.to_dict()["validation_prompts"])
    assert text.isprintable()
    shown = {"validation_prompts": draft.from_text("validation_prompts", text)}
    assert load_spec(None, draft.merge(spec.to_dict(), shown)) == spec


def test_every_field_of_the_job_survives_the_form() -> None:
    spec = JobSpec(**GOOD, optimizer="sgd", seed=7, lora_dropout=0.25, max_train_steps=33)
    base = spec.to_dict()
    shown = {
        name: draft.from_text(name, draft.as_text(name, base[name]))
        for name in pages.SHOWN
        if name != "fsdp_reshard_after_forward"
    }
    assert load_spec(None, draft.merge(base, shown)) == spec


@given(values=VALUES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_value_comes_back_from_its_text(values: dict[str, Any]) -> None:
    spec = load_spec(None, REQUIRED | values)
    wholes = spec.to_dict()
    read = {
        key: value if isinstance(value, bool) else draft.from_text(key, draft.as_text(key, value))
        for key, value in wholes.items()
    }
    told = {key: value for key, value in read.items() if value is not None}
    assert load_spec(None, told) == spec
    assert draft.in_force(draft.merge(wholes, {}))[0] == draft.merge(wholes, {})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("learning_rate", 0.000123456789, "0.000123456789"),
        ("accelerate_extra_args", ["--tee", "3"], "--tee 3"),
        ("accelerate_config", {"rdzv_backend": "static"}, '{"rdzv_backend": "static"}'),
        ("validation_negative_prompt", "", '""'),
        ("dataset", "", ""),
        ("trigger_word", " sks", '" sks"'),
        ("datasets", [{"path": "a", "repeats": 3, "weight": None}], "a x3"),
    ],
)
def test_values_of_the_other_pages_are_texts_too(name: str, value: Any, text: str) -> None:
    if name == "datasets":
        value = JobSpec(datasets=value).to_dict()["datasets"]
    assert draft.as_text(name, value) == text
    read = draft.from_text(name, text)
    assert JobSpec(**({} if read is None else {name: read})).to_dict()[name] == value


def test_variables_in_paths_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/some/where")
    assert draft.from_text("dataset", "$DATA/cats") == "/some/where/cats"
    assert draft.from_text("dataset", "${NOT_SET_HERE}/cats") == "${NOT_SET_HERE}/cats"


def test_a_home_that_nobody_has_is_told() -> None:
    good, text = draft.check_path("dataset", {"dataset": "~nobody-here/x"})
    assert not good
    assert "no such home directory" in text


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"dp_replicate_size": 2, "strategy": "fsdp2"}, "dp_replicate_size"),
        ({"dp_replicate_size": "x", "strategy": "fsdp2"}, "dp_replicate_size"),
        ({"num_processes": 1, "context_parallel_size": 2}, "context_parallel_size"),
        ({"num_processes": 1, "shard_text_encoders": True}, "shard_text_encoders"),
        ({"snr_gamma": 5}, "snr_gamma"),
    ],
)
def test_what_would_be_refused_unasked_is_left_out(change: dict[str, Any], left_out: str) -> None:
    kept, reasons = draft.in_force(GOOD | change)
    assert set(GOOD | change) - set(kept) == {left_out}
    assert reasons[left_out]
    assert draft.find_problems(kept) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"snr_gamma": 5, "flow_shift": 3.0},
        {"crop": "square", "crop_variants": 2, "max_bucket_aspect_ratio": 3.0},
        {"prior_loss_weight": 2.0, "class_prompt": "a dog"},
        {"gradient_checkpointing_policy": "selective", "gradient_checkpointing_interval": 3},
    ],
)
def test_all_that_would_be_refused_is_left_out_at_once(change: dict[str, Any]) -> None:
    kept, reasons = draft.in_force(GOOD | change)
    assert set(GOOD | change) - set(kept) == set(change) - {"crop"}
    assert draft.find_problems(kept) == {}
    assert {one.key for one in find_conflicts(JobSpec(**GOOD, **change))} <= set(reasons)


def test_a_key_that_does_not_apply_turns_no_other_one_off() -> None:
    one_rank = GOOD | {"num_processes": 1}
    values = one_rank | {"context_parallel_size": 2, "fsdp_activation_checkpointing": True}
    kept, reasons = draft.in_force(values)
    assert kept == one_rank
    assert reasons == draft.in_force(one_rank)[1]


def test_what_does_not_apply_but_does_no_harm_stays_in_the_job() -> None:
    values = GOOD | {"strategy": "ddp", "fsdp_state_dict_type": "FULL_STATE_DICT"}
    kept, reasons = draft.in_force(values)
    assert kept == values
    assert reasons["fsdp_state_dict_type"] == "needs strategy: fsdp2 or hsdp"


@pytest.mark.parametrize(("ranks", "forwards"), [(1, 8), (2, 4), (8, 1)])
def test_the_accumulation_that_a_global_batch_makes_stands_beside_its_field(
    ranks: int, forwards: int
) -> None:
    """Whatever the field says itself: the form fills in its default."""
    values = draft.complete(GOOD) | {"num_processes": ranks, "global_batch_size": "8"}
    assert values["gradient_accumulation_steps"] == 1
    kept, reasons = draft.in_force(values)
    assert reasons["gradient_accumulation_steps"] == f"global_batch_size sets it to {forwards}"
    assert (
        not {"global_batch_size", "gradient_accumulation_steps"}
        & draft.find_problems(draft.merge(kept, {})).keys()
    )
    assert "gradient_accumulation_steps" not in draft.as_yaml(draft.merge(kept, {}))


def test_a_mistake_that_applies_is_left_in_place() -> None:
    values = GOOD | {"learning_rate": "fast", "strategy": "hsdp"}
    assert draft.in_force(values)[0] == values


def test_a_template_leaves_model_data_and_ranks_to_the_person() -> None:
    mine = GOOD | {"name": "mine", "seed": 7, "strategy": "ddp", "lora_rank": 4}
    begun = draft.begin_with({"model_family": "wan", "lora_rank": 64}, mine)
    usual = draft.defaults_of("wan", None)
    kept = ("name", "pretrained_model_name_or_path", "dataset", "num_processes", "strategy")
    assert begun == usual | {"lora_rank": 64} | {key: mine[key] for key in kept}
    own = draft.begin_with({"dataset": "other", "num_processes": 1}, mine)
    assert (own["dataset"], own["num_processes"], own["strategy"]) == ("other", 1, "auto")


def test_each_field_stands_on_one_page() -> None:
    names = [name for page in pages.PAGES for name in page.fields]
    assert sorted(names) == sorted(field_names())
    assert all(pages.PAGES[pages.page_of(name)].fields.count(name) == 1 for name in names)


def test_a_blank_field_means_its_default() -> None:
    values = draft.merge(JobSpec(max_train_steps=5).to_dict(), {"max_train_steps": None})
    assert "max_train_steps" not in values


def test_chosen_gpus_say_how_many_ranks_there_are() -> None:
    values = draft.merge({"num_processes": 4}, {"num_processes": "4", "gpus": [0, 1]})
    assert values == {"gpus": [0, 1]}


def test_choosing_a_strategy_overrules_the_switch_that_was_carried_along() -> None:
    base = {"fsdp_enable": True, "strategy": "auto"}
    assert "fsdp_enable" not in draft.merge(base, {"strategy": "ddp"})
    assert draft.merge(base, {"strategy": "auto"})["fsdp_enable"] is True


def test_problems_stand_at_the_field_they_are_about() -> None:
    problems = draft.find_problems(
        GOOD | {"learning_rate": "fast", "name": "a b", "mixed_precision": "bf61"}
    )
    assert set(problems) == {"learning_rate", "name", "mixed_precision"}
    assert "number" in problems["learning_rate"].text
    assert "letters" in problems["name"].text
    assert 'did you mean "bf16"' in problems["mixed_precision"].text


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dataset": ""}, "dataset"),
        ({"strategy": "fsdp2", "num_processes": 1}, "strategy"),
        ({"flow_shift": 3.0}, "flow_shift"),
        ({"model_family": "fluks"}, "model_family"),
        ({"model_flavour": "deev"}, "model_flavour"),
    ],
)
def test_a_conflict_stands_at_one_field(change: dict[str, object], field: str) -> None:
    assert list(draft.find_problems(GOOD | change)) == [field]


def test_a_problem_says_its_key_where_that_does_not_stand_beside_it() -> None:
    problems = draft.find_problems(GOOD | {"num_frames": 5})
    assert "trains on images" in problems["num_frames"].text
    assert "num_frames" not in problems["num_frames"].text
    (line,) = draft.problems_beside(problems, ())
    assert line == f"num_frames: {problems['num_frames'].text}"
    assert draft.problems_beside(problems, ["num_frames"]) == []
    old = draft.find_problems(GOOD | {"fsdp_sharding_strategy": "FULL"})
    assert list(old) == [""]  # it is no field, so nothing else says which key it is
    (line,) = draft.problems_beside(old, ())
    assert line.startswith("fsdp_sharding_strategy: ")


def test_a_good_job_has_no_problems() -> None:
    assert draft.find_problems(GOOD) == {}


def test_a_missing_dataset_is_found_at_once(tmp_path: Path) -> None:
    good, text = draft.check_path("dataset", {"dataset": str(tmp_path / "nowhere")})
    assert not good
    assert "no such dataset folder" in text


def test_a_dataset_is_counted(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a red circle")
    values = {"dataset": str(tmp_path), "resolution": "64"}
    assert draft.check_path("dataset", values) == (True, "1 image")
    usable, why = draft.check_path("dataset", values | {"resolution": "1024"})
    assert not usable
    assert "too small" in why


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    values = GOOD | {"max_train_steps": "12", "validation_prompts": ["one, two"]}
    path = draft.save_yaml(values, tmp_path / "job.yaml")
    spec = load_spec(path)
    assert (spec.max_train_steps, spec.to_dict()["validation_prompts"]) == (12, ["one, two"])


def test_a_full_disk_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "job.yaml", tmp_path / "link.yaml"
    path.write_text("name: before\n")
    link.symlink_to(path)
    draft.save_yaml(GOOD, link)
    assert link.is_symlink()
    assert "dataset: d" in (before := path.read_text())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        draft.save_yaml({"name": "half", "dataset": "d"}, path)
    assert path.read_text() == before
    assert {one.name for one in tmp_path.iterdir()} == {"job.yaml", "link.yaml"}


def test_an_unfinished_job_can_be_saved(tmp_path: Path) -> None:
    path = draft.save_yaml({"name": "half", "dataset": "d"}, tmp_path / "job.yaml")
    assert "half" in path.read_text()


def test_carried_fields_are_those_without_a_place_in_the_form() -> None:
    assert draft.carried(JobSpec(seed=7, max_train_steps=3).to_dict()) == {"seed": 7}


WHAT_FITS = ("→ what fits", "On GPUs: ddp if the full model fits on each, else fsdp2.")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"num_processes": 1}, ("→ single", "Now single: 1 rank.")),
        (
            {"num_processes": 2, "device": "cpu"},
            (
                "→ fsdp2",
                "Now fsdp2: 2 ranks, each holds 1/2 of the weights.",
            ),
        ),
        ({"num_processes": 2}, WHAT_FITS),
        ({"gpus": [0, 1]}, WHAT_FITS),
        (
            {"gpus": 2, "context_parallel_size": 2},
            ("→ fsdp2", "Now fsdp2: context parallelism requires it."),
        ),
        ({"gpus": [0, 1], "fsdp_enable": True}, ("→ fsdp2", "Now fsdp2: fsdp_enable is on.")),
        (
            {"num_processes": 2, "strategy": "ddp"},
            ("a full copy per rank", "Each of 2 ranks holds the full model."),
        ),
        (
            {"num_processes": 4, "strategy": "fsdp2"},
            ("1/4 of the model", "Each rank holds 1/4 of the model."),
        ),
        ({"strategy": "ddp", "num_processes": 1}, ("", "")),
        ({"num_processes": "x"}, ("", "")),
    ],
)
def test_what_auto_comes_to_is_told_beside_it(
    change: dict[str, object], note: tuple[str, str]
) -> None:
    assert draft.strategy_note(GOOD | change) == note


def test_auto_says_what_the_predicted_memory_makes_of_it() -> None:
    assert draft.strategy_note(GOOD, "ddp") == ("→ ddp", "Now ddp, by the predicted memory.")
    assert draft.strategy_note(GOOD | {"strategy": "fsdp2"}, "fsdp2")[0] == "1/2 of the model"


def test_warnings_are_told_while_the_values_are_right() -> None:
    (text,) = draft.warnings(GOOD | {"fsdp_version": 1})
    assert "deprecated" in text
    assert draft.warnings(GOOD) == draft.warnings(GOOD | {"seed": "x"}) == []


@pytest.mark.parametrize(
    ("name", "before", "lines", "after", "text"),
    [
        ("validation_prompts", "", ["a cat", "a, dog"], "", "a cat | a, dog"),
        ("validation_prompts", "one | ", ["two", "three"], " | four", "one | two | three | four"),
        ("resolution", "256", ["512", "768"], "", "256, 512, 768"),
        ("lora_target_modules", "", ["to_q", "to, k"], "", '["to_q", "to, k"]'),
        ("accelerate_extra_args", "", ["--a", "b c"], "", "--a 'b c'"),
        ("trigger_word", "a", ["b", "c"], "d", "ab cd"),
    ],
)
def test_a_paste_of_several_lines_loses_none(
    name: str, before: str, lines: list[str], after: str, text: str
) -> None:
    assert draft.pasted(name, before, lines, after) == text
