"""Jobs read from YAML and flags: what is understood, and what is said when it is not."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec.file.flags import parse_flags
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.file.old_keys import FOREIGN
from jobs.spec.job_spec import JobSpec, field_choices, field_names
from jobs.spec.rules.cascade import settle
from jobs.spec.values.datasets import with_folder_repeats
from tests.support.jobs.spec_strategies import REQUIRED, VALUES

if TYPE_CHECKING:
    from pathlib import Path

PATHS = "pretrained_model_name_or_path: m\ndataset: d\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(path: Path | None, overrides: dict[str, Any] | None = None) -> str:
    """The message of the `SpecError` that reading must raise; always a single line."""
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def read_or_refuse(path: Path | None, overrides: dict[str, Any] | None = None) -> JobSpec | str:
    """The job, or why it is none; nothing else may happen."""
    try:
        return load_spec(path, overrides)
    except SpecError as error:
        return str(error)


# -- what is understood --------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    job = load_spec(write(tmp_path, PATHS + "learning_rate: 1e-3\nmixed_precision: no\n"))
    assert (job.learning_rate, job.mixed_precision) == (1e-3, "no")
    assert (job.pretrained_model_name_or_path, job.dataset) == ("m", "d")


def test_the_job_file_of_the_design_is_read(tmp_path: Path) -> None:
    text = """
        name: demo
        model_type: lora            # lora | full
        model_family: flux
        model_flavour: dev
        pretrained_model_name_or_path: toy/model
        dataset: toy/data
        resolution: 64
        train_batch_size: 1
        gradient_accumulation_steps: 1
        max_train_steps: 20
        learning_rate: 1.0e-3
        optimizer: adamw
        lr_scheduler: constant
        max_grad_norm: 1.0
        mixed_precision: "no"
        seed: 42
        lora_rank: 8
        lora_placement: replicated
        num_processes: 2
        gpus: [0, 1]
        strategy: fsdp2
        fsdp_enable: true
        checkpointing_steps: 10
        checkpoints_total_limit: 3
        validation_prompts: ["a red circle"]
        validation_steps: 10
        gradient_checkpointing: false
        cache_text_embeddings: true
        unload_text_encoder: true
    """
    job = load_spec(write(tmp_path, text.replace("\n        ", "\n")))
    assert (job.gpus, job.to_dict()["validation_prompts"]) == ([0, 1], ["a red circle"])


def test_keys_may_be_spelt_as_flags_are(tmp_path: Path) -> None:
    job = load_spec(write(tmp_path, PATHS + "Train-Batch-Size: 3\nlora.rank: 5\n"))
    assert (job.train_batch_size, job.lora_rank) == (3, 5)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, PATHS + "seed: 1\nlora_rank: 4\n")
    job = load_spec(path, {"--seed": "2"})
    assert (job.seed, job.lora_rank) == (2, 4)


def test_overrides_alone_may_say_everything() -> None:
    job = load_spec(None, {"pretrained_model_name_or_path": "m", "dataset": "d"})
    assert job.dataset == "d"


def test_relative_paths_are_looked_up_here_and_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here / "both", beside / "both", beside / "only"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    path = write(beside, "pretrained_model_name_or_path: both\ndataset: only\n")
    job = load_spec(path)
    assert job.pretrained_model_name_or_path == str(here / "both")
    assert job.dataset == str(beside / "only")
    job = load_spec(path, base=beside)
    assert job.pretrained_model_name_or_path == str(beside / "both")


def test_a_hub_id_stays_what_it_is_and_a_dotted_path_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_spec(
        None, {"pretrained_model_name_or_path": "org/name", "dataset": "./gone", "cache_dir": "c"}
    )
    assert job.pretrained_model_name_or_path == "org/name"
    assert job.dataset == str(tmp_path / "gone")
    assert job.cache_dir == str(tmp_path / "c")


# -- what is refused -----------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = write(tmp_path, PATHS + "\n# a remark\nlearning_rat: 1e-3\n")
    assert complaint(path) == (
        f'{path}: line 5: unknown key "learning_rat" (did you mean "learning_rate"?)'
    )


def test_an_unknown_flag_has_no_line(tmp_path: Path) -> None:
    path = write(tmp_path, PATHS + "seed: 1\n")
    text = complaint(path, {"sead": "2"})
    assert 'unknown key "sead" (did you mean "seed"?)' in text
    assert "line" not in text


@pytest.mark.parametrize("flag", FOREIGN)
def test_a_flag_of_another_trainer_gets_what_a_job_says_instead(flag: str) -> None:
    text = complaint(None, {flag: "1"})
    assert f'unknown key "{flag}": {FOREIGN[flag]}' in text
    assert flag not in field_names()
    if meant := re.match(r"set (\w+)", FOREIGN[flag]):
        assert meant[1] in field_names()


def test_a_flag_that_replaces_a_key_takes_its_line_away(tmp_path: Path) -> None:
    path = write(tmp_path, PATHS + "seed: 1\n")
    assert "line" not in complaint(path, {"seed": "-4"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("resolution: tall", "resolution: expected a whole number"),
        ("resolution: 4", "resolution: input should be greater than or equal to 16 (got 4)"),
        (
            "optimizer: adam",
            'optimizer: "adam" is not one of adamw, sgd, adafactor, adamw_8bit, '
            'adamw_schedule_free, prodigy, lion, came, muon (did you mean "adamw"?)',
        ),
        ("crop: off", 'crop: "false" is not one of center, random, square'),
        ("swap_blocks: {16GB: 2, 16: 3}", "a size is there twice"),
        ("use_ema: none", '"none" is not true or false (did you mean "no"?)'),
        ("strategy: fsdp", '(did you mean "fsdp2"?)'),
        ("name: a b", "name: use letters, digits, dot, dash and underscore"),
        ("gradient_checkpointing: 7", 'gradient_checkpointing: "7" is not true or false'),
        ("model_family: fluxx", 'unknown model_family "fluxx" (did you mean "flux"?); known: flux'),
        ("model_flavour: def", 'unknown model_flavour "def" of flux (did you mean "dev"?)'),
        ("fsdp_version: 3", "less than or equal to 2"),
        (
            "fsdp_reshard_after_forward: maybe",
            '"maybe" is not true, false or a number of shards',
        ),
        ("fsdp_forward_prefetch: far", '"far" is not a number of units, true or false'),
        ("loss_type: l3", 'loss_type: "l3" is not one of mse, huber, smooth_l1'),
        ("attention_backend: flash4", 'attention_backend: "flash4" is not one of auto, flash, '),
        ("attention_backend: SageAttention", "SageAttention has no backward"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(tmp_path: Path, line: str, said: str) -> None:
    assert said in complaint(write(tmp_path, PATHS + line + "\n"))


def test_a_bad_value_and_a_conflict_name_the_line(tmp_path: Path) -> None:
    assert ": line 3: resolution" in complaint(write(tmp_path, PATHS + "resolution: 4\n"))
    assert ": line 4: flow_shift" in complaint(write(tmp_path, PATHS + "seed: 1\nflow_shift: 3"))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = complaint(write(tmp_path, "lerning_rate: 1\nresolution: 4\nseed: x\n"))
    assert text.count("line ") == 3
    assert "lerning_rate" in text
    assert "resolution" in text
    assert "seed" in text


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, PATHS + "seed: 1\nSEED: 2\n")
    assert complaint(path) == f'{path}: line 4: "seed" is set twice (first on line 3)'


@pytest.mark.parametrize("word", ["off", "no", "false", "none", "'off'", "'No'"])
def test_every_word_for_no_turns_off_what_can_be_off(tmp_path: Path, word: str) -> None:
    keys = [key for key in field_names() if {"none", "no"} & set(field_choices(key))]
    keys += ["tread", "swap_blocks", "validation_scores", "report_to"]
    job = load_spec(write(tmp_path, PATHS + "".join(f"{key}: {word}\n" for key in keys)))
    off = {key: getattr(job, key) for key in keys}
    assert off == dict.fromkeys(keys, "none") | {
        "mixed_precision": "no",
        "tread": None,
        "swap_blocks": 0,
        "validation_scores": [],
        "report_to": [],
    }


def test_a_word_for_yes_is_no_number(tmp_path: Path) -> None:
    numbers = (int, float, int | None, float | None)
    keys = [key for key, info in JobSpec.model_fields.items() if info.annotation in numbers]
    kept = {"fsdp_forward_prefetch", "fsdp_backward_prefetch"}  # which are switches elsewhere
    for key in sorted({*keys} - kept):
        said = complaint(write(tmp_path, f"{PATHS}{key}: yes\n"))
        assert re.search(f"{key}: expected a .*number \\(got 'true'\\)", said)
    said = complaint(write(tmp_path, f"{PATHS}trigger_word: no\n"))
    assert "trigger_word: expected text (got false; in YAML, put words such as" in said
    said = complaint(write(tmp_path, f"{PATHS}fps: '0'\n"))  # as a flag's value is given
    assert "fps: input should be greater than 0 (got '0')" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: [1\n", "line 2 is not valid YAML"),
        ("a: b: c\n", "line 1 is not valid YAML"),
        ("\tseed: 1\n", "line 1 is not valid YAML"),
        ("seed: \x01\n", "is not valid YAML"),
        ("seed: !!python/object:os.system 1\n", "line 1 is not valid YAML"),
        ("", "expected `key: value` lines, found none"),
        ("# nothing\n", "expected `key: value` lines, found none"),
        ("- a\n- b\n", "expected `key: value` lines, found none"),
        ("just words\n", "expected `key: value` lines, found none"),
        ("seed: 1\n---\nseed: 2\n", "is not valid YAML"),
    ],
)
def test_what_is_not_yaml_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in complaint(write(tmp_path, text))


@pytest.mark.parametrize(
    "value",
    ["2024-02-30", "!!int twelve", "!!float much", "9" * 5000, "[" * 3000],
    ids=["no such day", "int", "float", "many digits", "deep nesting"],
)
def test_a_value_that_yaml_itself_cannot_build_is_refused(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, f"seed: {value}\n")
    assert complaint(path).startswith(f"{path}:")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path / "gone.yaml") == f"no such job file: {tmp_path / 'gone.yaml'}"
    assert complaint(tmp_path) == f"{tmp_path} is a directory, not a job file"
    binary = tmp_path / "weights.safetensors"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert complaint(binary).startswith(f"cannot read the job file {binary}")
    assert "weights.safetensors/job.yaml" in complaint(binary / "job.yaml")


@pytest.mark.parametrize("key", ["dataset", "pretrained_model_name_or_path", "cache_dir"])
@pytest.mark.parametrize(
    "path",
    ["~no_such_user_here/x", "x" * 5000, "a\0b"],
    ids=["unknown user", "too long", "null byte"],
)
def test_a_path_that_no_system_takes_is_no_crash(key: str, path: str) -> None:
    values = {"pretrained_model_name_or_path": "m", "dataset": "d"} | {key: path}
    outcome = read_or_refuse(None, values)
    assert isinstance(outcome, JobSpec) or "\n" not in outcome


# -- flags ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "values", "others"),
    [
        (["--seed=3"], {"seed": "3"}, []),
        (["--seed", "3"], {"seed": "3"}, []),
        (["--seed", "-3"], {"seed": "-3"}, []),
        (["--seed=3", "job.yaml"], {"seed": "3"}, ["job.yaml"]),
        (["job.yaml", "--seed", "3"], {"seed": "3"}, ["job.yaml"]),
        (["--Train-Batch-Size=2"], {"train_batch_size": "2"}, []),
        (["--fsdp_enable"], {"fsdp_enable": "true"}, []),
        (["--fsdp-enable", "job.yaml"], {"fsdp_enable": "true"}, ["job.yaml"]),
        (["--fsdp_enable", "no"], {"fsdp_enable": "no"}, []),
        (["--fsdp_enable", "--seed=1"], {"fsdp_enable": "true", "seed": "1"}, []),
        (["--dataset=a=b"], {"dataset": "a=b"}, []),
        (["--cache_dir="], {"cache_dir": ""}, []),
        (["--seed=1", "--seed=2"], {"seed": "2"}, []),
        (["--gpus=0", "--gpus=1"], {"gpus": ["0", "1"]}, []),
        (
            ["--validation_prompts", "a, b", "--validation_prompts", "c", "--validation-prompts=d"],
            {"validation_prompts": ["a, b", "c", "d"]},
            [],
        ),
        (["--mixed_precision", "no"], {"mixed_precision": "no"}, []),
        ([], {}, []),
    ],
)
def test_flags(words: list[str], values: dict[str, Any], others: list[str]) -> None:
    assert parse_flags(words) == (values, others)


def test_flags_mean_what_the_file_means() -> None:
    words = [
        "--pretrained_model_name_or_path=m",
        "--dataset",
        "d",
        "--gpus=0",
        "--gpus=1",
        "--mixed_precision=no",
        "--fsdp_enable",
        "--lora-alpha",
        "none",
        "--fsdp_transformer_layer_cls_to_wrap=A,B",
    ]
    job = load_spec(None, parse_flags(words)[0])
    assert job.gpus == [0, 1]
    assert job.mixed_precision == "no"
    assert job.fsdp_enable is True
    assert job.lora_alpha is None
    assert job.fsdp_transformer_layer_cls_to_wrap == ["A", "B"]


# -- there and back ------------------------------------------------------------------------


@given(values=VALUES)
@example(values={"validation_prompts": ["\x85", "\u2028 a\u2029", "\ufeff", "é\n\r\t x"]})
@settings(max_examples=60)
@pytest.mark.parametrize("only_set", [False, True])
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], only_set: bool
) -> None:
    job = load_spec(None, REQUIRED | values)
    path = tmp_path_factory.getbasetemp() / f"round-trip-{only_set}.yaml"
    path.write_text(dump_spec(job, only_set=only_set), encoding="utf-8")
    again = load_spec(path)
    assert again == job
    assert again.digest() == job.digest()


@given(values=VALUES)
@settings(max_examples=25)  # all keys are written and read back above
def test_a_job_on_kohya_s_folders_is_read_back_as_it_was_planned(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    root = tmp_path_factory.getbasetemp() / "folders"
    for name in ("10_cat person", "2_dog", "others"):
        (root / name).mkdir(parents=True, exist_ok=True)
    job = load_spec(None, REQUIRED | values | {"dataset": str(root), "datasets": None})
    planned = settle(with_folder_repeats(job)[0])
    assert [entry.caption for entry in planned.datasets or []] == ["cat person", "dog"]
    path = tmp_path_factory.getbasetemp() / "planned.yaml"
    path.write_text(dump_spec(planned), encoding="utf-8")
    assert load_spec(path) == planned


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.binary(max_size=3),
)
_ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SCALARS, inner, max_size=2),
    max_leaves=4,
)


@given(data=st.dictionaries(st.sampled_from(list(JobSpec.model_fields)), _ANYTHING, max_size=6))
@settings(max_examples=150)
def test_no_file_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    outcome = read_or_refuse(path)
    if isinstance(outcome, JobSpec):
        numbers = [v for v in outcome.to_dict().values() if isinstance(v, float)]
        assert all(map(math.isfinite, numbers))
    else:
        assert "\n" not in outcome


@given(text=st.text(max_size=60))
@settings(max_examples=200)
def test_no_text_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(SpecError):
        load_spec(path)
