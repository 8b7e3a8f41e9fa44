"""Combinations that cannot run, as a table, and which strategy is chosen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import pytest

from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.strategy import Room, chosen_strategy, data_parallel_size, world_size
from jobs.spec.rules.warnings import find_warnings
from jobs.spec.values.value_types import Optimizer

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion


def read(**values: Any) -> JobSpec:
    paths = {"pretrained_model_name_or_path": "m", "dataset": "d"}
    return JobSpec.model_validate(paths | values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_processes": 2},
        {"gpus": 4},
        {"gpus": [0, 1]},
        {"gpus": ["GPU-a", "GPU-b"], "num_processes": 2},
        {"gpus": [0], "strategy": "single"},
        {"device": "cpu", "num_processes": 2, "strategy": "fsdp2"},
        {"num_processes": 2, "fsdp_enable": True, "strategy": "fsdp2"},
        {"num_processes": 2, "fsdp_enable": False, "strategy": "ddp"},
        {"num_processes": 1, "fsdp_enable": False},
        {"fsdp_transformer_layer_cls_to_wrap": ["A"]},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 5},
        {"lr_scheduler": "cosine", "lr_warmup_steps": 10, "max_train_steps": 10},
        {"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 2},
        {"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 2, "fsdp_enable": True},
        {"num_processes": 4, "strategy": "fsdp2", "context_parallel_size": 4},
        {"num_processes": 4, "context_parallel_size": 2},
        {
            "num_processes": 2,
            "context_parallel_size": 2,
            "dataset": None,
            "model_family": "ltx2",
            "model_flavour": "2.5-22b",
            "train_audio": True,
            "datasets": [{"path": "d", "first_frame": True}],
        },
        {
            "num_processes": 2,
            "context_parallel_size": 2,
            "dataset": None,
            "model_family": "wan",
            "model_flavour": "2.1-vace-1.3b",
            "datasets": [{"path": "d", "conditioning_path": "c"}],
        },
        # Only texts have masks, and each rank has them whole.
        {"num_processes": 2, "context_parallel_size": 2, "model_family": "ltxvideo"},
        {
            "num_processes": 2,
            "context_parallel_size": 2,
            "mixed_precision": "no",
            "context_parallel_comm_strategy": "alltoall",
        },
        {"num_processes": 4, "fsdp_reshard_after_forward": 2},
        {"num_processes": 2, "fsdp_cpu_offload": True, "fsdp_activation_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"},
        {"use_ema": True, "ema_device": "cpu"},
        {"num_processes": 2, "optimizer": "prodigy", "learning_rate": 1.0},
        {"num_processes": 2, "optimizer": "prodigy", "model_type": "full"},
        {"num_processes": 2, "optimizer": "adafactor", "model_type": "full"},
        {"num_processes": 2, "optimizer": "lion", "model_type": "full"},
        {"num_processes": 2, "optimizer": "adamw_schedule_free", "model_type": "full"},
        {"num_processes": 2, "use_ema": True},
        {"timestep_sampling": "shift", "flow_shift": 3.0},
        {"mixed_precision": "fp16"},
        {"attention_backend": "flash"},
        {"attention_backend": "cudnn", "model_family": "hunyuanvideo"},
        {"attention_backend": "flash", "model_family": "qwen_image", "validation_prompts": ["a"]},
        {"attention_backend": "flash3", "model_family": "z_image"},
        {"attention_backend": "flash", "model_family": "ltxvideo"},
        {"attention_backend": "flash", "model_family": "chroma", "validation_prompts": ["a"]},
        {
            "attention_backend": "flash",
            "model_family": "hunyuanvideo",
            "validation_prompts": [{"prompt": "a", "num_frames": 5}],
        },
        {
            "attention_backend": "flash",
            "model_family": "hunyuanvideo15",
            "validation_prompts": [{"prompt": "a", "num_frames": 5}],
        },
    ],
)
def test_what_can_run_has_no_conflict(values: dict[str, Any]) -> None:
    assert find_conflicts(read(**values)) == []


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"dataset": ""}, "dataset", "dataset is missing"),
        ({"pretrained_model_name_or_path": ""}, "pretrained_model_name_or_path", "is missing"),
        ({"gpus": 2, "device": "cpu"}, "gpus", "cannot be combined"),
        ({"gpus": 0}, "gpus", "selects no GPU"),
        ({"gpus": []}, "gpus", "selects no GPU"),
        ({"gpus": -1}, "gpus", "selects no GPU"),
        ({"gpus": [1, 1]}, "gpus", "the same GPU twice"),
        ({"gpus": [0, 1], "num_processes": 3}, "num_processes", "3 but gpus names 2"),
        ({"gpus": 4, "num_processes": 2}, "num_processes", "2 but gpus names 4"),
        ({"num_processes": 2, "fsdp_enable": True, "strategy": "ddp"}, "strategy", "contradict"),
        ({"num_processes": 2, "fsdp_enable": False, "strategy": "fsdp2"}, "strategy", "contradict"),
        ({"num_processes": 2, "strategy": "single"}, "strategy", "runs one rank, not 2"),
        ({"strategy": "fsdp2"}, "strategy", "two or more ranks"),
        ({"strategy": "ddp", "gpus": [3]}, "strategy", "two or more ranks"),
        ({"fsdp_enable": True}, "strategy", "two or more ranks"),
        (
            {"num_processes": 2, "strategy": "fsdp2", "deepspeed_config": "ds.json"},
            "deepspeed_config",
            "FSDP and DeepSpeed cannot be enabled simultaneously.",
        ),
        (
            {"num_processes": 2, "fsdp_enable": True, "deepspeed_config": "ds.json"},
            "deepspeed_config",
            "FSDP and DeepSpeed cannot be enabled simultaneously.",
        ),
        ({"deepspeed_config": "ds.json"}, "deepspeed_config", "DeepSpeed is not supported"),
        ({"num_processes": 4, "strategy": "hsdp"}, "dp_replicate_size", "number of replicas"),
        (
            {"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 1},
            "dp_replicate_size",
            "use strategy: fsdp2",
        ),
        (
            {"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 3},
            "dp_replicate_size",
            "3 does not divide the 4 ranks",
        ),
        (
            {"num_processes": 4, "strategy": "hsdp", "dp_replicate_size": 4},
            "dp_replicate_size",
            "use strategy: ddp",
        ),
        (
            {"num_processes": 4, "strategy": "fsdp2", "dp_replicate_size": 2},
            "dp_replicate_size",
            "needs strategy: hsdp",
        ),
        ({"strategy": "hsdp", "dp_replicate_size": 2}, "strategy", "hsdp needs two or more ranks"),
        (
            {
                "num_processes": 8,
                "strategy": "hsdp",
                "dp_replicate_size": 2,
                "context_parallel_size": 8,
            },
            "dp_replicate_size",
            "2 x context_parallel_size 8 does not divide the 8 ranks",
        ),
        (
            {"num_processes": 2, "strategy": "ddp", "context_parallel_size": 2},
            "context_parallel_size",
            "Context parallelism requires FSDP2.",
        ),
        (
            {"context_parallel_size": 2},
            "context_parallel_size",
            "Context parallelism requires FSDP2.",
        ),
        (
            {"num_processes": 2, "fsdp_enable": False, "context_parallel_size": 2},
            "context_parallel_size",
            "Context parallelism requires FSDP2.",
        ),
        (
            {
                "num_processes": 2,
                "strategy": "fsdp2",
                "fsdp_version": 1,
                "context_parallel_size": 2,
            },
            "context_parallel_size",
            "Context parallelism requires FSDP2.",
        ),
        (
            {"num_processes": 3, "strategy": "fsdp2", "context_parallel_size": 2},
            "context_parallel_size",
            "2 does not divide the 3 ranks",
        ),
        (
            {"num_processes": 2, "device": "cpu", "context_parallel_size": 2},
            "context_parallel_size",
            "CUDA GPUs only",
        ),
        (
            {"num_processes": 2, "context_parallel_size": 2, "torch_compile": True},
            "torch_compile",
            "not tested",
        ),
        (
            {"num_processes": 2, "context_parallel_size": 2, "attention_backend": "math"},
            "attention_backend",
            "chooses its own",
        ),
        (
            {"num_processes": 2, "context_parallel_size": 2, "mixed_precision": "no"},
            "context_parallel_comm_strategy",
            "flash attention, which does not support fp32",
        ),
        (
            {"num_processes": 3, "context_parallel_size": 3},
            "max_sequence_length",
            "3 does not divide max_sequence_length 512",
        ),
        (
            {"num_processes": 4, "strategy": "fsdp2", "fsdp_reshard_after_forward": 3},
            "fsdp_reshard_after_forward",
            "divisor of the 4 ranks",
        ),
        (
            {"num_processes": 4, "strategy": "fsdp2", "fsdp_reshard_after_forward": 4},
            "fsdp_reshard_after_forward",
            "divisor of the 4 ranks",
        ),
        (
            {
                "num_processes": 4,
                "strategy": "hsdp",
                "dp_replicate_size": 2,
                "fsdp_reshard_after_forward": 2,
            },
            "fsdp_reshard_after_forward",
            "divisor of the 2 ranks",
        ),
        (
            {"num_processes": 4, "fsdp_reshard_after_forward": 2, "fsdp_cpu_offload": True},
            "fsdp_reshard_after_forward",
            "fsdp_cpu_offload moves them off",
        ),
        (
            {"num_processes": 2, "strategy": "ddp", "fsdp_cpu_offload": True},
            "fsdp_cpu_offload",
            "needs strategy: fsdp2 or hsdp",
        ),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload", "needs strategy: fsdp2 or hsdp"),
        ({"lora_placement": "sharded"}, "lora_placement", "needs strategy: fsdp2 or hsdp"),
        (
            {"num_processes": 2, "strategy": "ddp", "lora_placement": "sharded"},
            "lora_placement",
            "needs strategy: fsdp2 or hsdp",
        ),
        ({"model_family": "sdxl", "attention_backend": "math"}, "attention_backend", "no choice"),
        (
            {"model_family": "ltxvideo", "attention_backend": "flash", "validation_prompts": ["a"]},
            "attention_backend",
            "samples of LTX-Video have one",
        ),
        (
            {"model_family": "z_image", "attention_backend": "flash3", "train_batch_size": 2},
            "attention_backend",
            "train_batch_size: 1",
        ),
        ({"device": "cpu", "attention_backend": "efficient"}, "attention_backend", "needs a GPU"),
        (
            {"attention_backend": "cudnn", "mixed_precision": "no"},
            "attention_backend",
            "cudnn does not support fp32",
        ),
        (
            {"base_matmul": "scaled", "base_precision": "int8"},
            "base_matmul",
            "needs base_precision: fp8_scaled or fp8",
        ),
        (
            {"base_matmul": "scaled", "base_precision": "fp8", "mixed_precision": "fp16"},
            "base_matmul",
            "needs mixed_precision: bf16",
        ),
        ({"lora_variant": "dora", "lora_dropout": 0.1}, "lora_dropout", "lora_variant: dora"),
        ({"lora_variant": "lokr", "lora_dropout": 0.1}, "lora_dropout", "lora_variant: lokr"),
        ({"lora_variant": "lokr", "lora_init": "gaussian"}, "lora_init", "lora_variant: lokr"),
        ({"lora_variant": "lokr", "lokr_factor": 0}, "lokr_factor", "0 divides nothing"),
        (
            {"text_encoder_lora_rank": 4},
            "text_encoder_lora_rank",
            "FLUX.1 trains the denoiser only; remove it",
        ),
        (
            {"model_family": "sdxl", "model_type": "full", "text_encoder_lora_rank": 4},
            "text_encoder_lora_rank",
            "needs model_type: lora",
        ),
        (
            {"model_family": "sdxl", "lora_variant": "dora", "text_encoder_lora_rank": 4},
            "text_encoder_lora_rank",
            "needs lora_variant: lora, not dora",
        ),
        (
            {"model_family": "sdxl", "text_encoder_precision": "int8", "text_encoder_lora_rank": 4},
            "text_encoder_precision",
            "text_encoder_precision is not supported with text_encoder_lora_rank",
        ),
        (
            {"model_family": "sdxl", "swap_blocks": 2, "text_encoder_lora_rank": 4},
            "swap_blocks",
            "swap_blocks is not supported with text_encoder_lora_rank",
        ),
        (
            {"batch_shares": {16: 0, 24: 3}, "num_processes": 2, "global_batch_size": 4},
            "batch_shares",
            "each share is 1 or more",
        ),
        (
            {"optimizer": "muon", "lora_variant": "lokr"},
            "optimizer",
            "muon has no whole matrices to train",
        ),
        ({"batch_shares": "16GB:0"}, "batch_shares", "each share is 1 or more"),
        (
            {"batch_shares": {16: 1}, "num_processes": 2, "strategy": "fsdp2"},
            "batch_shares",
            "batch_shares needs strategy: ddp, since ranks of FSDP wait for each other",
        ),
        (
            {"batch_shares": {16: 1}, "num_processes": 2, "train_batch_size": 3},
            "batch_shares",
            "more than one forward for each rank; set global_batch_size: 12 or more",
        ),
        (
            {"model_family": "sana", "tread": {"2..-2": 0.5}},
            "tread",
            "tread does not support Sana: its blocks mix neighboring tokens by convolution",
        ),
        (
            {
                "tread": {"2..-2": 0.5},
                "num_processes": 2,
                "strategy": "fsdp2",
                "context_parallel_size": 2,
            },
            "tread",
            "tread is not supported with context parallelism",
        ),
        (
            {"swap_blocks": 2, "num_processes": 2, "strategy": "fsdp2"},
            "swap_blocks",
            "swap_blocks needs strategy: single or ddp, since FSDP shards the base",
        ),
        (
            {
                "model_family": "sdxl",
                "optimizer": "prodigy",
                "text_encoder_lora_rank": 4,
                "text_encoder_learning_rate": 1.0,
            },
            "text_encoder_learning_rate",
            "prodigy finds one rate for everything",
        ),
        (
            {
                "model_family": "sdxl",
                "optimizer": "adamw_schedule_free",
                "text_encoder_lora_rank": 4,
                "text_encoder_learning_rate": 1.0,
            },
            "text_encoder_learning_rate",
            "adamw_schedule_free has one rate for everything",
        ),
        (
            {
                "model_family": "sdxl",
                "num_processes": 2,
                "strategy": "fsdp2",
                "mixed_precision": "fp16",
                "lora_placement": "sharded",
                "text_encoder_lora_rank": 4,
            },
            "mixed_precision",
            "which fp16's loss scale cannot handle",
        ),
        ({"lora_variant": "dora", "torch_compile": True}, "torch_compile", "lora_variant: dora"),
        (
            {
                "num_processes": 2,
                "strategy": "fsdp2",
                "lora_variant": "dora",
                "lora_placement": "sharded",
            },
            "lora_placement",
            "would round the magnitudes",
        ),
        ({"lora_exclude_modules": ["(to_q"]}, "lora_exclude_modules", "not a regular expression"),
        ({"lora_rank_pattern": {"to_q": 2.5}}, "lora_rank_pattern", "2.5 is not a whole number"),
        (
            {"num_processes": 2, "mixed_precision": "fp16", "fsdp_cpu_offload": True},
            "mixed_precision",
            "not tested",
        ),
        (
            {"fsdp_activation_checkpointing": True},
            "fsdp_activation_checkpointing",
            "use gradient_checkpointing",
        ),
        (
            {"gradient_checkpointing_policy": "selective"},
            "gradient_checkpointing_policy",
            "needs gradient_checkpointing",
        ),
        (
            {"gradient_checkpointing_interval": 2},
            "gradient_checkpointing_interval",
            "needs gradient_checkpointing",
        ),
        ({"device": "cpu", "attention_backend": "flash"}, "attention_backend", "needs a GPU"),
        (
            {"attention_backend": "flash3", "mixed_precision": "no"},
            "attention_backend",
            "flash3 does not support fp32",
        ),
        (
            {"num_processes": 2, "use_ema": True, "ema_device": "cpu"},
            "ema_device",
            "cannot be used with FSDP",
        ),
        ({"snr_gamma": 5.0}, "snr_gamma", "FLUX.1 is a flow-matching model"),
        ({"lr_end": 1e-3, "learning_rate": 1e-3}, "lr_end", "not below learning_rate"),
        ({"sigma_min": 0.5, "sigma_max": 0.5}, "sigma_min", "not below sigma_max"),
        ({"sigma_min": 0.6, "sigma_max": 0.5}, "sigma_min", "(0.6) is not below sigma_max (0.5)"),
        ({"flow_shift": 3.0}, "flow_shift", "needs timestep_sampling: shift"),
        (
            {"optimizer": "adamw_schedule_free", "use_ema": True},
            "use_ema",
            "averages the weights itself",
        ),
        (
            {"optimizer": "adamw_schedule_free", "adam_beta1": 0.0},
            "adam_beta1",
            "needs adam_beta1 above 0",
        ),
        (
            {"fsdp_state_dict_type": "full", "optimizer": "adamw_8bit"},
            "fsdp_state_dict_type",
            "cannot hold the 8-bit state",
        ),
        (
            {"fsdp_state_dict_type": "full", "checkpointing_async": True},
            "checkpointing_async",
            "cannot be written in the background",
        ),
        (
            {"fsdp_transformer_layer_cls_to_wrap": ["A"], "fsdp_auto_wrap_policy": "NO_WRAP"},
            "fsdp_transformer_layer_cls_to_wrap",
            "needs fsdp_auto_wrap_policy",
        ),
        ({"shard_text_encoders": True}, "shard_text_encoders", "two or more ranks"),
        ({"caption_shuffles": 3}, "caption_shuffles", "needs shuffle_captions"),
        ({"keep_tags": 1}, "keep_tags", "needs shuffle_captions"),
        ({"crop_variants": 2}, "crop_variants", "needs crop: random"),
        ({"num_frames": 5}, "num_frames", "trains on images"),
        (
            {"num_frames": 10, "model_family": "minimax_h3"},
            "num_frames",
            "takes 17n + 22 frames, such as 22",
        ),
        ({"datasets": []}, "datasets", "empty list"),
        ({"datasets": ["a"]}, "datasets", "cannot be combined"),
        ({"lr_warmup_steps": 5}, "lr_warmup_steps", "use constant_with_warmup"),
        (
            {"lr_warmup_steps": 11, "lr_scheduler": "linear", "max_train_steps": 10},
            "lr_warmup_steps",
            "is more than max_train_steps (10)",
        ),
        (
            {"num_processes": 2, "strategy": "hsdp", "dp_replicate_size": 2},
            "dp_replicate_size",
            "leaves nothing to shard",
        ),
        (
            {"num_processes": 2, "context_parallel_size": 2, "model_family": "sdxl"},
            "context_parallel_size",
            "no context-parallel plan",
        ),
        (
            {
                "num_processes": 2,
                "model_family": "wan",
                "model_type": "full",
                "mixed_precision": "fp16",
            },
            "mixed_precision",
            "some weights of Wan are not sharded",
        ),
        (
            {
                "num_processes": 2,
                "model_family": "qwen_image",
                "context_parallel_size": 2,
                "context_parallel_comm_strategy": "allgather",
            },
            "context_parallel_comm_strategy",
            "masks padded captions",
        ),
        (
            {"optimizer": "adamw_8bit", "checkpointing_async": True},
            "checkpointing_async",
            "the 8-bit state",
        ),
        (
            {
                "num_processes": 2,
                "checkpointing_async": True,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
            },
            "checkpointing_async",
            "FULL_STATE_DICT cannot be written in the background",
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,  # as it is stored by
)
def test_what_cannot_run_is_one_conflict(
    values: dict[str, Any], key: str, said: str, snapshot: SnapshotAssertion
) -> None:
    (conflict,) = find_conflicts(read(**values))
    assert conflict.key == key
    assert said in conflict.message
    assert "\n" not in conflict.message
    assert conflict.message == snapshot  # `pytest --snapshot-update` writes what was reworded


def test_several_conflicts_are_all_found() -> None:
    spec = read(dataset="", snr_gamma=5, lr_warmup_steps=3)
    assert [c.key for c in find_conflicts(spec)] == ["dataset", "snr_gamma", "lr_warmup_steps"]


def test_an_old_fsdp_version_runs_as_the_new_one_and_is_warned_about() -> None:
    old = read(num_processes=2, fsdp_version=1)
    assert find_conflicts(old) == []
    (warning,) = find_warnings(old)
    assert "FSDP v1 is deprecated" in warning
    assert find_warnings(read(num_processes=2)) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_training_a_model_of_few_steps_is_warned_about(name: str) -> None:
    family = FAMILIES[name]
    for flavour, facts in family.flavours.items():
        warned = [
            warning
            for warning in find_warnings(read(model_family=name, model_flavour=flavour))
            if warning.startswith("model_flavour: ")
        ]
        steps = facts.defaults.get("validation_num_inference_steps", 50)
        assert len(warned) == (facts.undistilled is not None), flavour
        assert facts.undistilled or steps >= 20, flavour
        if facts.undistilled:
            assert facts.undistilled in family.flavours
            assert f"train {facts.undistilled}," in warned[0]
            what = "few steps" if steps < 50 else "need no guidance"
            assert f"is distilled to {what}, and" in warned[0]
            assert "training_adapter" in warned[0]
            values = {"model_family": name, "model_flavour": flavour, "training_adapter": "a"}
            assert not any("distilled" in text for text in find_warnings(read(**values)))
            prompted: dict[str, Any] = values | {"validation_prompts": ["a"]}
            assert not any("guidance" in text for text in find_warnings(read(**prompted)))
            scaled = find_warnings(read(**prompted, validation_guidance=5.0))
            unguided = facts.defaults.get("validation_guidance", 5.0) <= family.guided_above
            guided = family.guidance_of(flavour) == "classifier_free" and unguided
            assert any("makes its samples worse" in text for text in scaled) == guided
            full = find_warnings(read(**values, model_type="full"))
            assert [text for text in full if "distilled" in text and "set training" not in text]


@pytest.mark.parametrize("name", FAMILIES)
def test_fp16_is_warned_about_where_it_is_known_to_be_too_narrow(name: str) -> None:
    overflowing = FAMILIES[name].overflows_fp16
    for precision in ("fp16", "bf16", "no"):
        warned = [
            warning
            for warning in find_warnings(read(model_family=name, mixed_precision=precision))
            if warning.startswith("mixed_precision: ")
        ]
        assert len(warned) == (precision == "fp16" and bool(overflowing))
        assert all(overflowing in text and "use bf16" in text for text in warned)
    known = {"qwen_image", "sana", "lumina2", "z_image", "anima"}
    assert bool(overflowing) is (name in known), "its source is in the family's file"


# Rates that people train with, and one that is another optimizer's.
RATES = {
    **dict.fromkeys(
        ("adamw", "adamw_8bit", "adafactor", "came", "muon"), ((1e-6, 1e-4, 5e-3), 1.0)
    ),
    "adamw_schedule_free": ((1e-5, 1e-3, 1e-2), 1.0),
    "lion": ((1e-7, 3e-5, 1e-3), 0.1),
    "prodigy": ((0.1, 1.0, 2.0), 10.0),
    "sgd": ((1e-6, 0.1, 10.0), None),
}


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_rate_of_another_optimizer_is_warned_about(optimizer: str) -> None:
    usual, high = RATES[optimizer]
    for rate in usual:
        assert find_warnings(read(optimizer=optimizer, learning_rate=rate)) == []
    if high is None:
        return
    (warning,) = find_warnings(read(optimizer=optimizer, learning_rate=high))
    assert warning.startswith(f"learning_rate: {optimizer} ")
    assert f"{high:g} ruins the model" in warning
    least = 1e-4 if optimizer == "prodigy" else 1e-10
    (warning,) = find_warnings(read(optimizer=optimizer, learning_rate=least))
    assert "trains almost nothing" in warning


def test_the_rate_of_text_encoders_is_warned_about_where_they_train() -> None:
    values = {"model_family": "sdxl", "text_encoder_learning_rate": 1.0}
    (warning,) = find_warnings(read(**values, text_encoder_lora_rank=4))
    assert warning.startswith("text_encoder_learning_rate: adamw ")
    assert not any("ruins" in text for text in find_warnings(read(**values)))


def test_a_rate_that_is_far_too_low_for_prodigy_is_warned_about() -> None:
    (warning,) = find_warnings(read(optimizer="prodigy"))
    assert "use 1.0" in warning
    assert find_warnings(read(optimizer="prodigy", learning_rate=1.0)) == []
    assert find_warnings(read(optimizer="prodigy", learning_rate=0.05)) == []
    assert find_warnings(read(optimizer="prodigy", learning_rate=0.0499)) != []


def test_a_schedule_for_an_optimizer_that_needs_none_is_warned_about() -> None:
    (warning,) = find_warnings(read(optimizer="adamw_schedule_free", lr_scheduler="cosine"))
    assert warning.startswith("lr_scheduler: adamw_schedule_free averages weights")
    for fits in ("constant", "constant_with_warmup"):
        assert find_warnings(read(optimizer="adamw_schedule_free", lr_scheduler=fits)) == []


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 1),
        ({"num_processes": 3}, 3),
        ({"gpus": 4}, 4),
        ({"gpus": [5, 7]}, 2),
        ({"gpus": [5, 7], "num_processes": 2}, 2),
    ],
)
def test_the_number_of_ranks(values: dict[str, Any], ranks: int) -> None:
    assert world_size(read(**values)) == ranks


@pytest.mark.parametrize(
    ("values", "strategy", "why"),
    [
        ({}, "single", "1 rank"),
        ({"num_processes": 2}, "fsdp2", "1/2 of the weights"),
        ({"num_processes": 2, "fsdp_enable": True}, "fsdp2", "fsdp_enable is on"),
        ({"num_processes": 2, "fsdp_enable": False}, "ddp", "fsdp_enable is off"),
        ({"num_processes": 1, "fsdp_enable": False}, "single", "1 rank"),
        ({"gpus": 2, "strategy": "ddp"}, "ddp", "set in job"),
        ({"num_processes": 4, "strategy": "hsdp"}, "hsdp", "set in job"),
        ({"num_processes": 4, "context_parallel_size": 2}, "fsdp2", "context parallelism"),
        ({"num_processes": 2, "swap_blocks": 4}, "ddp", "swap_blocks needs it"),
        ({"num_processes": 2, "batch_shares": {16: 1}}, "ddp", "batch_shares needs it"),
    ],
)
def test_the_strategy_and_why(values: dict[str, Any], strategy: str, why: str) -> None:
    chosen, reason = chosen_strategy(read(**values))
    assert chosen == strategy
    assert why in reason


GIB = 1 << 30


@pytest.mark.parametrize(
    ("values", "room", "strategy", "why"),
    [
        # FLUX.1's 12 B parameters in bf16 are 22 GiB.
        ({}, Room(12_000_000_000, 80 * GIB), "ddp", "frozen weights: about 22.4 of 80.0 GiB"),
        ({}, Room(12_000_000_000, 24 * GIB), "fsdp2", "would fill a GPU"),
        ({"mixed_precision": "no"}, Room(12_000_000_000, 72 * GIB), "fsdp2", "44.7 of 72.0 GiB"),
        ({"model_type": "full"}, Room(12_000_000_000, 80 * GIB), "fsdp2", "201.2 of 80.0 GiB"),
        ({"model_type": "full"}, Room(2_000_000_000, 80 * GIB), "ddp", "fits on every GPU"),
        ({"fsdp_enable": True}, Room(1, 80 * GIB), "fsdp2", "fsdp_enable is on"),
        ({"strategy": "fsdp2"}, Room(1, 80 * GIB), "fsdp2", "set in job"),
        ({"context_parallel_size": 2}, Room(1, 80 * GIB), "fsdp2", "context parallelism"),
        ({"fsdp_cpu_offload": True}, Room(1, 80 * GIB), "fsdp2", "fsdp_cpu_offload needs it"),
        ({"lora_placement": "sharded"}, Room(1, 80 * GIB), "fsdp2", "sharded needs it"),
    ],
)
def test_auto_copies_the_model_where_it_fits_and_shards_it_where_not(
    values: dict[str, Any], room: Room, strategy: str, why: str
) -> None:
    chosen, reason = chosen_strategy(read(**{"num_processes": 2} | values), room)
    assert chosen == strategy
    assert why in reason


def test_context_parallel_ranks_train_on_the_same_sample() -> None:
    assert data_parallel_size(read(num_processes=8, context_parallel_size=4)) == 2
    assert data_parallel_size(read()) == 1


@pytest.mark.parametrize(
    ("ranks", "values", "instead"),
    [
        (6, {"dp_replicate_size": 4}, "use 2 or 3"),
        (7, {"dp_replicate_size": 2}, "use strategy: fsdp2"),
        (12, {"dp_replicate_size": 5, "context_parallel_size": 2}, "use 2, 3 or 6"),
    ],
)
def test_a_number_of_replicas_that_does_not_divide_is_answered_with_those_that_do(
    ranks: int, values: dict[str, Any], instead: str
) -> None:
    spec = read(num_processes=ranks, strategy="hsdp", **values)
    (conflict,) = (one for one in find_conflicts(spec) if one.key == "dp_replicate_size")
    assert conflict.message.endswith(instead)


def test_more_ranks_to_a_sample_than_there_are_is_said_once() -> None:
    spec = read(num_processes=3, strategy="hsdp", dp_replicate_size=2, context_parallel_size=4)
    (conflict,) = find_conflicts(spec)
    assert conflict.message == "context_parallel_size 4 does not divide the 3 ranks; use 1 or 3"


def test_what_is_refused_is_not_warned_about_too() -> None:
    spec = read(lr_warmup_steps=5)
    assert [one.key for one in find_conflicts(spec)] == ["lr_warmup_steps"]
    assert find_warnings(spec) == []


def test_keys_of_fsdp_that_do_nothing_are_warned_about() -> None:
    (warning,) = find_warnings(read(fsdp_forward_prefetch=2, fsdp_min_num_params=5))
    assert warning == "fsdp_forward_prefetch, fsdp_min_num_params: no effect on 1 rank"
    assert find_warnings(read(num_processes=2, fsdp_forward_prefetch=2)) == []


def test_a_whole_model_has_no_kohya_names() -> None:
    (warning,) = find_warnings(read(model_type="full", export_formats=["diffusers", "kohya"]))
    assert warning.startswith("export_formats: kohya names are for LoRAs only")
    assert find_warnings(read(export_formats=["kohya"])) == []
