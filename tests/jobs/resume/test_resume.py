"""What going on from a checkpoint with a changed job means: refused, told, or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.resume import (
    ResumeConflicts,
    find_resume_conflicts,
    with_known_length,
)
from jobs.spec.job_spec import JobSpec, field_choices, is_switch, key_facts, takes_many
from jobs.spec.keys.prompts import ValidationPrompt
from jobs.spec.rules.buckets import bucket_sizes, sizes_of
from jobs.spec.rules.steps import global_batch_size, with_total_steps

if TYPE_CHECKING:
    from pathlib import Path

EFFECTS = {key: key_facts(key).resume for key in JobSpec.model_fields}
BASE: dict[str, Any] = {
    "pretrained_model_name_or_path": "/models/flux",
    "dataset": "/data/cats",
    # so that every setting counts
    "optimizer": "adamw",
    "timestep_sampling": "shift",
    "loss_type": "huber",
    "use_ema": True,
    "crop": "random",
    "shuffle_captions": True,
}
_OTHER: dict[str, Any] = {
    "report_to": ["wandb"],
    "slurm_time": "90",
    "slurm_signal_seconds": 60,
    "gpus": [0],
    "fsdp_reshard_after_forward": 2,
    "torch_compile_backend": "eager",
    "validation_prompts": ["a dog"],
    "export_formats": ["kohya"],
    "name": "other",
    "learning_rate": 0.5,
    "lora_dropout": 0.5,
    "caption_dropout_probability": 0.5,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "ema_decay": 0.5,
    "flow_shift": 3.0,
    "snr_gamma": 5.0,
    "sigma_min": 0.25,
    "sigma_max": 0.5,
    "mode_scale": 0.5,
    "validation_fraction": 0.25,
    "resolution": [256, 512],
    "unmasked_weight": 0.5,
    "fsdp_version": 1,
    "validation_resolution": 512,
    "model_family": "sdxl",
    "model_flavour": "2.2-t2v-a14b-low",
    "fsdp_auto_wrap_policy": "NO_WRAP",
    "lora_rank_pattern": {"to_q": 2},
    "lora_alpha_pattern": {"to_q": 2.0},
    "lokr_factor": 4,
    "tread": {"2..-2": 0.5},
    "conditioning_resolution": 512,
    "text_encoder_learning_rate": 0.5,
    "validation_scores": ["clip_t"],
}
# What a setting counts together with.
_WITH: dict[str, dict[str, Any]] = {
    "validation_seed": {"validation_fraction": 0.1},  # else nothing is held out
    "size_conditioning": {"model_family": "sdxl"},
    "keep_in_full_precision": {"base_precision": "nf4"},
    "modulation_precision": {"base_precision": "nf4"},
    "lokr_factor": {"lora_variant": "lokr"},
    "lokr_full_matrix": {"lora_variant": "lokr"},
    "mode_scale": {"timestep_sampling": "mode"},
    "snr_gamma": {"model_family": "sdxl"},
    "resolution_mode": {"resolution": [256, 512]},
    "class_prompt": {"num_class_images": 8},
    "prior_loss_weight": {"num_class_images": 8},
    "regularization_target": {"num_class_images": 8},
    "preservation_class": {"preservation": "class"},
    "preservation_weight": {"preservation": "blank"},
    "unmasked_weight": {"masked_loss": "file"},
    "model_flavour": {"model_family": "wan"},
    "num_frames": {"model_family": "wan"},
    "fps": {"model_family": "wan"},
    "conditioning_resolution": {"model_flavour": "kontext"},
    "mask_variants": {"model_flavour": "fill"},
    # Else other layers train, too.
    "train_audio": {"model_family": "ltx2", "lora_target_modules": ["to_q"]},
    "text_encoder_lora_rank": {"model_family": "sdxl"},
    "text_encoder_learning_rate": {"model_family": "sdxl", "text_encoder_lora_rank": 4},
}


def conflicts(
    old: dict[str, Any] | None = None, new: dict[str, Any] | None = None, *, done: int = 0
) -> ResumeConflicts:
    """What is found when a job of `BASE` and `old` goes on as one of `BASE` and `new`."""
    before = JobSpec(**BASE | (old or {})).to_dict()
    return find_resume_conflicts(before, JobSpec(**BASE | (new or {})), done=done)


def other_value(key: str) -> Any:
    """A value that differs from the one in `BASE`."""
    if key in _OTHER:
        return _OTHER[key]
    now = getattr(JobSpec(**BASE), key)
    if choices := field_choices(key):
        return next(word for word in choices if word != now)
    if is_switch(key):
        return not now
    if takes_many(key):
        return ["other"]
    if isinstance(now, int):
        return now + 1
    if isinstance(now, float):
        return now / 2 + 1.25
    if key == "sweep":
        return "other"
    return 3 if "int" in str(JobSpec.model_fields[key].annotation) else "/other"


def test_the_same_job_goes_on_without_a_word() -> None:
    assert conflicts() == find_resume_conflicts({}, JobSpec(**BASE))
    assert not conflicts().impossible
    assert not conflicts().changes


@pytest.mark.parametrize("key", [key for key, effect in EFFECTS.items() if effect == "same"])
def test_what_changes_nothing_is_not_told(key: str) -> None:
    found = conflicts(new={key: other_value(key)})
    assert (found.impossible, found.changes) == ([], [])


@pytest.mark.parametrize(
    "key",
    [key for key, effect in EFFECTS.items() if effect == "changes"],
)
def test_what_changes_the_result_is_told_in_one_line(key: str) -> None:
    both = _WITH.get(key, {})
    found = conflicts(both, both | {key: other_value(key)})
    assert not found.impossible
    (line,) = found.changes
    assert line.startswith(f"{key}: ")
    assert " → " in line


@pytest.mark.parametrize("key", [key for key, effect in EFFECTS.items() if effect == "impossible"])
def test_what_does_not_fit_is_refused_with_what_to_do(key: str) -> None:
    both = _WITH.get(key, {})
    found = conflicts(both, both | {key: other_value(key)})
    assert any(
        text.startswith(f"{key}: ") and f"set {key} to " in text for text in found.impossible
    )
    assert not any(line.startswith(f"{key}:") for line in found.changes)


@pytest.mark.parametrize("key", ["validation_guidance", "validation_num_inference_steps"])
def test_settings_of_samples_change_class_images(key: str) -> None:
    new = {key: other_value(key)}
    assert conflicts(new=new) == ResumeConflicts()
    made = {"num_class_images": 8, "class_prompt": "a cat"}
    (line,) = conflicts(made, made | new).changes
    assert line.startswith(f"{key}: ")
    assert line.endswith(": other class images")


def test_another_seed_of_samples_changes_nothing_while_nothing_is_held_out() -> None:
    assert conflicts(new={"validation_seed": 5}) == ResumeConflicts()


def test_values_are_written_as_in_a_job_file() -> None:
    found = conflicts(
        {"learning_rate": 1e-3, "random_flip": False, "trigger_word": None},
        {"learning_rate": 5e-4, "random_flip": True, "trigger_word": "sks"},
    )
    assert found.changes == [
        "learning_rate: 0.001 → 0.0005",
        "random_flip: false → true",
        "trigger_word: unset → sks",
    ]


@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"optimizer": "sgd"}, "adam_beta1", 0.5),
        ({"timestep_sampling": "uniform"}, "logit_mean", 1.0),
        ({"loss_type": "mse"}, "huber_c", 0.5),
        ({"use_ema": False}, "ema_decay", 0.5),
        ({"model_type": "full"}, "lora_rank", 4),
        ({"model_type": "full"}, "lora_target_modules", ["to_q"]),
        ({"model_type": "full"}, "lora_alpha", 4),
        ({"lora_variant": "lokr", "lokr_full_matrix": True}, "lora_alpha", 4),
        ({"lora_variant": "lokr", "lokr_full_matrix": True}, "lora_rank", 4),
        ({}, "lokr_factor", 4),
        ({}, "num_frames", 17),
    ],
)
def test_settings_without_effect_are_not_told(
    settings: dict[str, Any], key: str, value: object
) -> None:
    found = conflicts(settings, settings | {key: value})
    assert (found.impossible, found.changes) == ([], [])


# -- the global batch ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"num_processes": 2}, {"gradient_accumulation_steps": 2}),
        (
            {"num_processes": 4},
            {"num_processes": 2, "gradient_accumulation_steps": 2, "strategy": "ddp"},
        ),
        ({"num_processes": 2}, {"num_processes": 4, "context_parallel_size": 2}),
        ({"gpus": [0, 1]}, {"num_processes": 2, "device": "cpu"}),
        ({"num_processes": 8, "global_batch_size": 8}, {"gpus": 2, "global_batch_size": 8}),
        ({"num_processes": 2}, {"global_batch_size": 2}),
    ],
)
def test_who_takes_which_samples_of_a_step_does_not_matter(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    found = conflicts(old, new)
    assert (found.impossible, found.changes) == ([], [])


@pytest.mark.parametrize(
    "new",
    [{"num_processes": 4}, {"gpus": 4}, {"num_processes": 2, "train_batch_size": 2}],
)
def test_another_global_batch_is_told(new: dict[str, Any]) -> None:
    assert conflicts({"num_processes": 2}, new).changes == [
        "the global batch: 2 → 4, so steps train on different samples"
    ]


def test_another_forward_batch_is_told() -> None:
    """It decides which samples wait for others of their shape."""
    found = conflicts({"num_processes": 4}, {"num_processes": 2, "train_batch_size": 2})
    assert found.changes == ["train_batch_size: 1 → 2, so steps train on different samples"]


@given(
    st.tuples(*[st.integers(1, 4)] * 3).map(lambda t: dict(zip(_BATCH, t, strict=True))),
    st.tuples(*[st.integers(1, 4)] * 3).map(lambda t: dict(zip(_BATCH, t, strict=True))),
)
def test_batches_are_told_exactly_when_they_differ(
    old: dict[str, int], new: dict[str, int]
) -> None:
    same = global_batch_size(JobSpec(**BASE | old)) == global_batch_size(JobSpec(**BASE | new))
    same &= old["train_batch_size"] == new["train_batch_size"]
    assert (conflicts(old, new).changes == []) is same


_BATCH = ("num_processes", "train_batch_size", "gradient_accumulation_steps")


def test_jobs_from_before_there_was_a_choice_go_on_with_their_experts() -> None:
    """What they wrote down is whole but for that key."""
    new = JobSpec(**BASE | {"model_family": "hidream"})
    assert not new.lora_experts
    later = ("lora_experts", "size_conditioning", "bucket_step")
    written = {key: value for key, value in new.to_dict().items() if key not in later}
    before = JobSpec(**written)
    assert before.lora_experts
    assert before.size_conditioning == "target"
    assert find_resume_conflicts(written, before, done=1).impossible == []
    (refused,) = find_resume_conflicts(written, new, done=1).impossible
    assert "lora_experts" in refused
    flux = JobSpec(**BASE).to_dict()
    del flux["lora_experts"]
    assert find_resume_conflicts(flux, JobSpec(**BASE), done=1).impossible == []


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({}, True),
        ({"lora_target_modules": ["to_q"]}, False),
        ({"model_type": "full"}, True),
        ({"model_family": "minimax_h3"}, False),  # whose layers are the same for sound
        ({"model_family": "minimax_h3", "model_type": "full"}, True),
    ],
)
def test_sound_is_trained_from_the_start_or_not_at_all(
    values: dict[str, Any], refused: bool
) -> None:
    """By all of the model, or an adapter of the family's layers: there are more with sound."""
    silent = JobSpec(**BASE | {"model_family": "ltx2"} | values)
    heard = silent.model_copy(update={"train_audio": True})
    for old, new in ((silent, heard), (heard, silent)):
        found = find_resume_conflicts(old.to_dict(), new, done=1)
        assert [line.partition(":")[0] for line in found.impossible] == ["train_audio"] * refused
        assert any("train_audio" in line for line in found.changes)


def test_jobs_from_before_there_was_a_choice_keep_their_buckets() -> None:
    new = JobSpec(**BASE)
    written = {key: value for key, value in new.to_dict().items() if key != "bucket_step"}
    before = JobSpec(**written)
    assert (new.bucket_step, before.bucket_step) == (None, 0)
    assert sizes_of(before) == bucket_sizes(1024, 16)
    assert find_resume_conflicts(written, before, done=1).changes == []
    # A new file that begins from its checkpoint has the usual ones, and is told.
    assert find_resume_conflicts(written, new, done=1).changes == ["bucket_step: 0 → unset"]
    assert JobSpec(dataset="d", learning_rate=1e-3).bucket_step is None, "a person's file"


def _before_schedules(**values: Any) -> dict[str, Any]:
    """A job as it was written down before there was `huber_schedule`."""
    written = JobSpec(**BASE | {"model_flavour": None} | values).to_dict()
    del written["huber_schedule"]
    return written


@pytest.mark.parametrize(
    ("family", "shift"),
    [("flux2", "sampler"), ("hidream", "sampler"), ("wan", "sampler"), ("sdxl", None)],
)
def test_jobs_from_before_training_had_its_own_shift_keep_their_samplers(
    family: str, shift: str | None
) -> None:
    """Those that drew by it: a checkpoint's own scheduler may shift in any family's way."""
    written = _before_schedules(model_family=family, timestep_sampling="shift", flow_shift=None)
    before = JobSpec(**written)
    assert before.flow_shift == shift
    assert find_resume_conflicts(written, before, done=1).changes == []
    later = {"model_family": family, "flow_shift": None, "huber_schedule": "constant"}
    new = JobSpec(**BASE | later)
    told = ["flow_shift: sampler → unset"] if shift else []
    assert find_resume_conflicts(written, new, done=1).changes == told


@pytest.mark.parametrize(
    ("values", "shift"),
    [({"flow_shift": 2.0}, 2.0), ({"timestep_sampling": "uniform", "flow_shift": None}, None)],
)
def test_jobs_that_drew_by_no_samplers_shift_get_none(
    values: dict[str, Any], shift: float | None
) -> None:
    assert JobSpec(**_before_schedules(model_family="flux2", **values)).flow_shift == shift


def test_jobs_from_before_there_were_schedules_keep_a_constant_threshold() -> None:
    written = _before_schedules(loss_type="huber")
    before = JobSpec(**written)
    assert before.huber_schedule == "constant"
    assert find_resume_conflicts(written, before, done=1).changes == []
    new = JobSpec(**BASE | {"loss_type": "huber"})
    assert "huber_schedule: constant → snr" in find_resume_conflicts(written, new, done=1).changes


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({}, {"bucket_step": 64}, []),
        ({}, {"bucket_step": 32}, ["bucket_step: unset → 32"]),
        ({"bucket_step": 16}, {"bucket_step": 0}, []),
        ({"crop": "square"}, {"crop": "square", "bucket_step": 128}, []),
    ],
)
def test_a_step_is_told_where_it_makes_other_buckets(
    old: dict[str, Any], new: dict[str, Any], told: list[str]
) -> None:
    assert conflicts(old, new).changes == told


def test_jobs_from_before_modulation_was_packed_keep_their_base() -> None:
    """A job that was written down, and the checkpoint's."""
    new = JobSpec(**BASE | {"base_precision": "nf4"})
    written = new.to_dict()
    del written["modulation_precision"]
    assert JobSpec(**written).modulation_precision == "none"
    assert find_resume_conflicts(written, JobSpec(**written)) == conflicts()
    (change,) = find_resume_conflicts(written, new).changes
    assert change == "modulation_precision: none → int8"
    eight = JobSpec(**BASE | {"base_precision": "int8"})
    assert find_resume_conflicts(eight.to_dict() | {"modulation_precision": "none"}, eight) == (
        conflicts()
    )


# -- the schedule --------------------------------------------------------------------------


def test_more_steps_change_nothing_where_the_rate_is_constant() -> None:
    assert conflicts({"max_train_steps": 10}, {"max_train_steps": 20}).changes == []


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_more_steps_stretch_a_schedule_that_ends_with_them(kind: str) -> None:
    found = conflicts(
        {"max_train_steps": 10, "lr_scheduler": kind}, {"max_train_steps": 20, "lr_scheduler": kind}
    )
    assert found.changes == [f"max_train_steps: 10 → 20, which stretches the {kind} schedule"]
    back = conflicts(
        {"max_train_steps": 20, "lr_scheduler": kind}, {"max_train_steps": 10, "lr_scheduler": kind}
    )
    assert back.changes == [f"max_train_steps: 20 → 10, which shortens the {kind} schedule"]


COSINE: Final = {"lr_scheduler": "cosine", "global_batch_size": 8}


def saved(epochs: float, draws: int = 200, **job: Any) -> dict[str, Any]:
    """The state of a checkpoint: its ranks had settled how many steps the epochs were."""
    spec = with_total_steps(JobSpec(**BASE | COSINE | {"num_train_epochs": epochs} | job), draws)
    return {"spec": spec.to_dict(), "data": {"draws_per_epoch": draws}}


@pytest.mark.parametrize(
    ("new", "told"),
    [
        ({"num_train_epochs": 4}, []),
        ({"num_train_epochs": 4, "num_processes": 4}, []),
        (
            {"num_train_epochs": 6},
            ["max_train_steps: 100 → 150, which stretches the cosine schedule"],
        ),
        ({"max_train_steps": 100}, []),
        (
            {"max_train_steps": 50},
            ["max_train_steps: 100 → 50, which shortens the cosine schedule"],
        ),
        ({"num_train_epochs": 4, "dataset": "/b"}, ["dataset: /data/cats → /b"]),
        (
            {"num_train_epochs": 6, "resolution": 512},
            [
                "resolution: 1024 → 512",
                "num_train_epochs: 4 → num_train_epochs: 6, which changes the cosine schedule",
            ],
        ),
    ],
)
def test_epochs_are_compared_in_steps_where_the_data_is_the_same(
    new: dict[str, Any], told: list[str]
) -> None:
    state = saved(4)
    spec = with_known_length(JobSpec(**BASE | COSINE | new), state)
    assert find_resume_conflicts(state["spec"], spec, done=1).changes == told


def test_a_checkpoint_that_does_not_tell_leaves_the_length_open() -> None:
    spec = JobSpec(**BASE, num_train_epochs=3)
    for state in ({}, {"data": None}, {"data": {"draws_per_epoch": "9"}, "spec": {}}):
        assert with_known_length(spec, state) == spec


def test_another_schedule_is_told() -> None:
    assert conflicts(new={"lr_scheduler": "cosine"}).changes == ["lr_scheduler: constant → cosine"]
    assert conflicts(new={"lr_scheduler": "constant_with_warmup"}).changes == []
    warm = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 5}
    assert conflicts(new=warm, done=4).changes == [
        "lr_scheduler: constant → constant_with_warmup",
        "lr_warmup_steps: 0 → 5",
    ]
    assert conflicts(new=warm, done=5).changes == [], "the warm-up would be over"
    cosine = {"lr_scheduler": "cosine", "lr_warmup_steps": 5}
    assert conflicts(cosine, cosine | {"lr_warmup_steps": 6}, done=9).changes == [
        "lr_warmup_steps: 5 → 6"
    ], "the rest of a cosine begins where the warm-up ends"
    assert conflicts(cosine, cosine | {"lr_end": 1e-6, "lr_power": 2.0}).changes == [
        "lr_end: 0 → 1e-06"
    ], "a cosine has no power"
    assert conflicts(new={"lr_end": 1e-6}).changes == [], "a constant rate has no end"


# -- the model, the adapter, the average -----------------------------------------------------


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    for name in ("one/model", "other/model"):
        (tmp_path / name).mkdir(parents=True)
    key = "pretrained_model_name_or_path"
    (text,) = conflicts(
        {key: str(tmp_path / "one/model")}, {key: str(tmp_path / "other/model")}
    ).impossible
    assert "was trained on" in text
    assert conflicts({key: "/gone/flux-dev"}, {key: str(tmp_path / "one/model")}).impossible


def test_a_copy_of_the_model_is_taken_for_it_and_that_is_told(tmp_path: Path) -> None:
    key = "pretrained_model_name_or_path"
    for name, weights in (("one", b"1234"), ("copy", b"1234"), ("other", b"12345")):
        part = tmp_path / name / "transformer"
        part.mkdir(parents=True)
        (tmp_path / name / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
        (part / "config.json").write_text('{"num_layers": 2}')
        (part / "model.safetensors").write_bytes(weights)
    same = conflicts({key: str(tmp_path / "one")}, {key: str(tmp_path / "copy")})
    assert not same.impossible
    assert "assumed to be the same model" in same.changes[0]
    assert conflicts({key: str(tmp_path / "one")}, {key: str(tmp_path / "other")}).impossible
    (tmp_path / "copy/transformer/config.json").write_text('{"num_layers": 3}')
    assert conflicts({key: str(tmp_path / "one")}, {key: str(tmp_path / "copy")}).impossible


def test_a_model_that_has_moved_is_the_same(tmp_path: Path) -> None:
    key = "pretrained_model_name_or_path"
    new = tmp_path / "new" / "model"
    new.mkdir(parents=True)
    moved = conflicts({key: "/gone/model"}, {key: str(new)})
    assert not moved.impossible
    assert moved.changes == [
        f"{key}: /gone/model → {new}, assumed to be the same model in a new place"
    ]
    link = tmp_path / "link"
    link.symlink_to(new)
    assert conflicts({key: str(link)}, {key: str(new)}) == conflicts()


def test_the_order_of_target_modules_does_not_matter() -> None:
    key = "lora_target_modules"
    assert conflicts({key: ["to_q", "to_k"]}, {key: ["to_k", "to_q", "to_q"]}) == conflicts()
    for was, now in ((["to_q"], ["to_q", "to_k"]), (None, ["to_q"]), (["to_q"], None)):
        (text,) = conflicts({key: was}, {key: now}).impossible
        assert "other modules would be trained" in text


def test_alpha_scales_what_is_trained_already() -> None:
    assert conflicts({"lora_alpha": None}, {"lora_alpha": 16}) == conflicts(), "the rank is meant"
    assert conflicts({"lora_alpha": 8}, {"lora_alpha": 12}).changes == [
        "lora_alpha: 8 → 12, so the adapter becomes 1.5 times as strong"
    ]


def test_the_average_may_be_turned_on_and_off() -> None:
    (on,) = conflicts({"use_ema": False}, {"use_ema": True}).changes
    assert "starts from the checkpoint's weights" in on
    (off,) = conflicts({"use_ema": True}, {"use_ema": False}).changes
    assert "the moving average stops" in off


def test_auto_goes_on_as_the_checkpoint_computed() -> None:
    fp8 = {"base_precision": "fp8_scaled"}
    scaled, dequantized = (fp8 | {"base_matmul": one} for one in ("scaled", "dequantize"))
    assert conflicts(scaled, dequantized).changes == ["base_matmul: scaled → dequantize"]
    assert conflicts(dequantized, scaled).changes == ["base_matmul: dequantize → scaled"]
    for before in (scaled, dequantized, fp8):
        assert conflicts(before, fp8) == conflicts()
    assert conflicts(fp8, scaled).changes, "a version without the key dequantized"
    assert conflicts({"base_matmul": "dequantize"}, {"base_matmul": "auto"}) == conflicts()


# -- the data --------------------------------------------------------------------------------


def test_a_list_of_one_dataset_is_the_dataset() -> None:
    listed = {"dataset": "", "datasets": ["/data/cats"]}
    assert conflicts({}, listed) == conflicts()
    assert conflicts({}, {"dataset": "/data/dogs"}).changes == ["dataset: /data/cats → /data/dogs"]
    both = {"dataset": "", "datasets": ["/data/cats", "/data/dogs"]}
    assert conflicts({}, both).changes == ["datasets: /data/cats → /data/cats, /data/dogs"]
    thrice = {"dataset": "", "datasets": [{"path": "/data/cats", "repeats": 3}]}
    assert conflicts(listed, thrice).changes == ["datasets: same datasets, other settings"]


# -- checkpoints of other versions -----------------------------------------------------------


def test_a_checkpoint_of_another_version_is_compared_as_far_as_it_can_be() -> None:
    before = {"dataset": "/data/cats", "pretrained_model_name_or_path": "/models/flux"}
    spec = JobSpec(**before)
    assert find_resume_conflicts(before | {"forgotten_key": [1]}, spec) == conflicts()
    found = find_resume_conflicts(before | {"optimizer": "sophia", "crop": 7}, spec)
    assert found.impossible[0].startswith("optimizer: the checkpoint was written with sophia, not")
    assert found.changes == ["crop: 7 → center"]
    assert find_resume_conflicts({"seed": 42}, spec) == conflicts(), "missing keys: the defaults"


def test_prompts_with_settings_do_not_matter() -> None:
    prompts = [ValidationPrompt(prompt="a dog", seed=3)]
    assert conflicts(new={"validation_prompts": prompts}) == conflicts()


def test_the_other_of_two_denoisers_is_refused_and_another_word_for_the_same_is_not() -> None:
    wan = {"model_family": "wan"}
    high, low = ({**wan, "model_flavour": f"2.2-t2v-a14b-{noise}"} for noise in ("high", "low"))
    (refusal,) = conflicts(high, low).impossible
    assert "model_flavour" in refusal
    assert "a different denoiser of the model" in refusal
    assert conflicts(low, wan).impossible
    assert not conflicts(low, low).impossible
    assert not conflicts(high, wan).impossible
    assert not conflicts({"model_flavour": "dev"}, {"model_flavour": "krea"}).impossible
