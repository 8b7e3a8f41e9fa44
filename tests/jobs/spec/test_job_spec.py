"""The job's fields: defaults, limits, forgiving spelling, and what is said about each of them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from jobs.spec.job_spec import (
    JobSpec,
    field_choices,
    field_group,
    field_names,
    is_switch,
    takes_many,
)
from jobs.spec.values.spellings import (
    as_bool,
    as_choice,
    as_list,
    as_none,
    did_you_mean,
    nearest,
    normal_key,
)


def read(**values: Any) -> JobSpec:
    return JobSpec.model_validate(values)


@pytest.mark.parametrize("name", field_names())
def test_every_field_explains_itself(name: str) -> None:
    field = JobSpec.model_fields[name]
    assert field.description
    assert field.description.endswith(".") or "`" in field.description
    assert field_group(name) in {
        "job",
        "training",
        "lora",
        "devices",
        "fsdp",
        "slurm",
        "data",
        "output",
        "validation",
        "export",
        "hub",
        "tracking",
        "running",
    }


def test_the_defaults_are_a_valid_job() -> None:
    job = JobSpec()
    assert JobSpec.model_validate(job.to_dict()) == job
    assert job.to_dict(only_set=True) == {}


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("gradient_checkpointing", "yes", True),
        ("gradient_checkpointing", "Off", False),
        ("gradient_checkpointing", 1, True),
        ("fsdp_enable", "TRUE", True),
        ("fsdp_enable", "none", None),
        ("fsdp_enable", "", None),
        ("mixed_precision", "no", "no"),
        ("mixed_precision", False, "no"),
        ("mixed_precision", "BF16", "bf16"),
        ("lr_scheduler", "constant-with-warmup", "constant_with_warmup"),
        ("lr_scheduler", " Cosine ", "cosine"),
        ("fsdp_state_dict_type", "sharded", "SHARDED_STATE_DICT"),
        ("fsdp_state_dict_type", "full_state_dict", "FULL_STATE_DICT"),
        ("fsdp_auto_wrap_policy", "transformer_based", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_auto_wrap_policy", "no-wrap", "NO_WRAP"),
        ("fsdp_auto_wrap_policy", "none", "NO_WRAP"),
        ("fsdp_auto_wrap_policy", "transformerbased", "TRANSFORMER_BASED_WRAP"),
        ("fsdp_state_dict_type", "shard", "SHARDED_STATE_DICT"),
        ("context_parallel_comm_strategy", "all-gather", "allgather"),
        ("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "SIZE_BASED_WRAP"),
        ("fsdp_transformer_layer_cls_to_wrap", "A, B", ["A", "B"]),
        ("fsdp_transformer_layer_cls_to_wrap", "A", ["A"]),
        ("fsdp_transformer_layer_cls_to_wrap", "none", None),
        ("gpus", "4", 4),
        ("gpus", 4, 4),
        ("gpus", "0,1", [0, 1]),
        ("gpus", "0,", [0]),
        ("gpus", "[0, 1]", [0, 1]),
        ("gpus", ["0", "GPU-ab"], [0, "GPU-ab"]),
        ("gpus", "GPU-ab,GPU-cd", ["GPU-ab", "GPU-cd"]),
        ("gpus", "none", None),
        ("num_processes", "2", 2),
        ("num_processes", "null", None),
        ("report_to", "none", []),
        ("report_to", "tensorboard, WandB", ["tensorboard", "wandb"]),
        ("report_to", ["comet", "comet_ml", "none"], ["comet_ml"]),
        ("lora_alpha", "none", None),
        ("lora_alpha", "8", 8.0),
        ("checkpoints_total_limit", "", None),
        ("checkpoints_keep_best", "true", True),
        ("checkpoints_keep_best", 0, False),
        ("checkpoints_keep_best", "1", True),
        ("checkpoints_keep_best", 3, 3),
        ("checkpointing_steps", "250", 250),
        ("checkpointing_steps", "epoch", "1 epoch"),
        ("validation_steps", "2.50 Epochs", "2.5 epochs"),
        ("validation_steps", 0, 0),
        ("validation_loss_steps", ".5epochs", "0.5 epochs"),
        ("validation_loss_steps", "", None),
        ("model_flavour", "none", None),
        ("learning_rate", "1e-3", 1e-3),
        ("max_train_steps", "20", 20),
    ],
)
def test_values_may_be_written_as_people_write_them(key: str, written: Any, meant: Any) -> None:
    value = getattr(read(**{key: written}), key)
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize("key", field_names())
def test_a_key_without_a_value_means_the_default(key: str) -> None:
    assert getattr(read(**{key: None}), key) == getattr(JobSpec(), key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ""),
        ("name", "a b"),
        ("name", "../up"),
        ("name", "-x"),
        ("name", "x" * 65),
        ("model_type", "lokr"),
        ("report_to", "tensorbord"),
        ("report_to", "all"),
        ("resolution", 15),
        ("resolution", 8193),
        ("train_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("max_train_steps", 0),
        ("max_train_steps", 1.5),
        ("learning_rate", 0),
        ("learning_rate", -1e-4),
        ("learning_rate", "fast"),
        ("learning_rate", float("nan")),
        ("adam_beta1", 1.0),
        ("adam_epsilon", 0),
        ("max_grad_norm", -1),
        ("mixed_precision", "fp8"),
        ("mixed_precision", True),
        ("seed", -1),
        ("seed", 2**31),
        ("lora_rank", 0),
        ("lora_alpha", 0),
        ("lora_dropout", 1.0),
        ("gradient_checkpointing", "maybe"),
        ("num_processes", 0),
        ("gpus", [1.5]),
        ("gpus", {"a": 1}),
        ("strategy", "fsdp1"),
        ("fsdp_version", 3),
        ("checkpoints_total_limit", 0),
        ("checkpoints_keep_best", -1),
        ("checkpointing_steps", -1),
        ("checkpointing_steps", 1.5),
        ("checkpointing_steps", "5 minutes"),
        ("validation_steps", "0 epochs"),
        ("validation_loss_steps", 0),
        ("checkpoints_keep_best", "some"),
        ("validation_prompts", 3),
        ("stop_grace_seconds", 0),
        ("bogus", 1),
    ],
)
def test_values_outside_their_limits_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        read(**{key: value})
    assert {str(error["loc"][0]) for error in caught.value.errors()} == {key}


@pytest.mark.parametrize(
    "key",
    [name for name, field in JobSpec.model_fields.items() if "float" in str(field.annotation)],
)
def test_no_number_may_be_infinite_or_not_a_number(key: str) -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            read(**{key: value})


def test_assignment_is_checked_too() -> None:
    job = JobSpec()
    with pytest.raises(ValidationError):
        job.resolution = 3
    assert job.resolution == 1024
    job.lora_alpha = 4.0
    job.mixed_precision = "NO"  # type: ignore[assignment]
    assert (job.lora_alpha, job.mixed_precision) == (4.0, "no")


def test_the_digest_follows_every_value() -> None:
    assert read(seed=1).digest() == read(seed=1).digest()
    assert read(seed=1).digest() != read(seed=2).digest()
    assert len(read().digest()) == 16


def test_only_what_was_changed_is_listed_as_set() -> None:
    assert read(seed=7, lora_rank=16).to_dict(only_set=True) == {"seed": 7}


def test_the_choices_of_a_field() -> None:
    assert field_choices("mixed_precision") == ("no", "bf16", "fp16")
    assert field_choices("strategy") == ("auto", "single", "ddp", "fsdp2", "hsdp")
    for name in ("name", "seed", "lora_alpha", "gradient_checkpointing", "gpus", "fsdp_enable"):
        assert field_choices(name) == (), name


def test_switches_and_lists_are_known_as_such() -> None:
    switches = {"gradient_checkpointing", "fsdp_enable", "fsdp_reshard_after_forward"}
    lists = {"gpus", "lora_target_modules", "validation_prompts"}
    others = {"name", "seed", "lora_alpha", "mixed_precision", "num_processes", "bogus"}
    assert {name for name in switches | lists | others if is_switch(name)} == switches
    assert {name for name in switches | lists | others if takes_many(name)} == lists


def test_the_contract_with_outside_checks_has_all_its_keys() -> None:
    """The keys of the job file in the design."""
    promised = {
        "name",
        "model_type",
        "model_family",
        "model_flavour",
        "pretrained_model_name_or_path",
        "dataset",
        "resolution",
        "train_batch_size",
        "gradient_accumulation_steps",
        "max_train_steps",
        "learning_rate",
        "optimizer",
        "lr_scheduler",
        "max_grad_norm",
        "mixed_precision",
        "seed",
        "lora_rank",
        "lora_placement",
        "num_processes",
        "gpus",
        "strategy",
        "fsdp_enable",
        "checkpointing_steps",
        "checkpoints_total_limit",
        "validation_prompts",
        "validation_steps",
        "gradient_checkpointing",
        "cache_text_embeddings",
        "unload_text_encoder",
        "fsdp_version",
        "fsdp_reshard_after_forward",
        "fsdp_state_dict_type",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap",
    }
    assert promised <= set(field_names())
    assert set(field_choices("optimizer")) >= {"adamw", "sgd"}
    assert set(field_choices("lora_placement")) == {"replicated", "sharded"}


# -- spelling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        "--Train-Batch-Size",
        "train.batch.size",
        "train_batch_size",
        " TRAIN_batch-size ",
        "-train-batch-size",
    ],
)
def test_one_key_has_many_spellings(written: str) -> None:
    assert normal_key(written) == "train_batch_size"


def test_words_for_yes_no_and_nothing() -> None:
    assert [as_bool(w) for w in ("true", "1", "YES", " on ", "y", "T")] == [True] * 6
    assert [as_bool(w) for w in ("false", "0", "No", "off", "n", "F")] == [False] * 6
    assert as_bool("maybe") == "maybe"
    assert as_bool(3) == 3
    assert [as_none(w) for w in ("none", "NULL", "~", "  ")] == [None] * 4
    assert as_none("nothing") == "nothing"
    assert as_none(0) == 0


def test_a_choice_is_matched_whatever_its_case_and_dashes() -> None:
    assert as_choice("Full-State-Dict", ("FULL_STATE_DICT",)) == "FULL_STATE_DICT"
    assert as_choice("all-gather", ("allgather", "alltoall")) == "allgather"
    assert as_choice("all", ("allgather", "alltoall")) == "all", "a part may be of several"
    assert as_choice(False, ("no", "bf16")) == "no"
    assert as_choice(False, ("a", "b")) is False
    assert as_choice("c", ("a", "b")) == "c"


def test_a_comma_separated_text_becomes_a_list() -> None:
    assert as_list("a, b ,,c") == ["a", "b", "c"]
    assert as_list("[\"a\", 'b']") == ["a", "b"]
    assert as_list("") == []
    assert as_list(["a, b"]) == ["a, b"]


def test_a_near_miss_is_suggested_and_a_far_one_is_not() -> None:
    known = ["learning_rate", "lr_scheduler"]
    assert nearest("Learning_rat", known) == "learning_rate"
    assert did_you_mean("lr_schedular", known) == ' (did you mean "lr_scheduler"?)'
    assert did_you_mean("zzzz", known) == ""


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (True, True),
        ("yes", True),
        ("false", False),
        (1, True),
        (0, False),
        ("1", True),
        ("0", False),
        (2, 2),
        ("4", 4),
    ],
)
def test_reshard_is_a_switch_or_a_number_of_shards(written: Any, read: bool | int) -> None:
    value = JobSpec(fsdp_reshard_after_forward=written).fsdp_reshard_after_forward
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize(
    ("written", "units"), [(True, 1), ("off", 0), ("true", 1), (3, 3), ("backward_pre", 0)]
)
def test_prefetch_is_a_number_of_units(written: Any, units: int) -> None:
    assert JobSpec(fsdp_forward_prefetch=written).fsdp_forward_prefetch == units


def test_l2_is_another_word_for_mse() -> None:
    assert JobSpec(loss_type="L2").loss_type == "mse"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "shift"), [("Sampler", "sampler"), ("3", 3.0), (2, 2.0), ("none", None), ("", None)]
)
def test_a_shift_is_a_number_or_the_samplers(written: Any, shift: Any) -> None:
    assert JobSpec(timestep_sampling="shift", flow_shift=written).flow_shift == shift


@pytest.mark.parametrize("written", ["samplr", 0, -1.0, 1e39, "nan", float("inf"), True, [1]])
def test_any_other_shift_is_refused_in_one_sentence(written: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec(timestep_sampling="shift", flow_shift=written)
    (error,) = caught.value.errors()
    assert "is not a number above 0 and up to 1,000,000, or sampler" in error["msg"]


@pytest.mark.parametrize("c", [1e-46, 1e30])
def test_thresholds_whose_gradients_fp32_cannot_hold_are_refused(c: float) -> None:
    with pytest.raises(ValidationError):
        JobSpec(loss_type="huber", huber_c=c)


@pytest.mark.parametrize(
    ("family", "flavour", "guidance", "steps"),
    [
        ("wan", "2.2-t2v-a14b-high", 4.0, 40),
        ("wan", "2.2-t2v-a14b-low", 4.0, 40),
        ("wan", "2.2-i2v-a14b-low", 3.5, 40),
        ("wan", "2.2-ti2v-5b", 5.0, 50),
        ("wan", "2.1-t2v-14b", 5.0, 30),
        ("flux", "kontext", 2.5, 20),
        ("flux", "dev", 3.5, 20),
    ],
)
def test_samples_are_made_as_published(
    family: str, flavour: str, guidance: float, steps: int
) -> None:
    spec = JobSpec(model_family=family, model_flavour=flavour)
    made = (spec.validation_guidance, spec.validation_num_inference_steps)
    assert made == (guidance, steps)
