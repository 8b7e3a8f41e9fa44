"""Which keys mean nothing beside the rest of a job, and what follows the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec, field_names
from jobs.spec.rules.cascade import FOLLOWING, follow_ranks
from jobs.spec.rules.no_effect import find_inapplicable

TWO = {"num_processes": 2}
FSDP = TWO | {"strategy": "fsdp2"}


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({}, "fsdp_cpu_offload", "no effect on 1 rank"),
        (TWO, "fsdp_cpu_offload", ""),
        (TWO | {"strategy": "ddp"}, "fsdp_cpu_offload", "needs strategy: fsdp2 or hsdp"),
        (TWO | {"strategy": "ddp"}, "fsdp_enable", ""),
        (FSDP, "fsdp_limit_all_gathers", "always on with FSDP2"),
        (FSDP, "fsdp_min_num_params", "needs fsdp_auto_wrap_policy: SIZE_BASED_WRAP"),
        (FSDP | {"fsdp_auto_wrap_policy": "size"}, "fsdp_min_num_params", ""),
        (
            FSDP | {"fsdp_auto_wrap_policy": "size"},
            "fsdp_transformer_layer_cls_to_wrap",
            "needs fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        ),
        (FSDP, "dp_replicate_size", "needs strategy: hsdp"),
        (TWO | {"strategy": "hsdp"}, "dp_replicate_size", ""),
        (FSDP, "context_parallel_size", ""),
        ({}, "context_parallel_size", "no effect on 1 rank"),
        (FSDP | {"device": "cpu"}, "context_parallel_size", "needs GPUs, not device: cpu"),
        (
            FSDP | {"model_family": "sdxl"},
            "context_parallel_size",
            f"{FAMILIES['sdxl'].title} has no context-parallel plan in diffusers",
        ),
        (FSDP, "context_parallel_comm_strategy", "needs context_parallel_size > 1"),
        (FSDP | {"context_parallel_size": 2}, "context_parallel_comm_strategy", ""),
        (
            FSDP | {"context_parallel_size": 2},
            "attention_backend",
            "context parallelism chooses its own",
        ),
        ({"device": "cpu"}, "gpus", "needs GPUs, not device: cpu"),
        ({}, "main_process_ip", "a local job runs on one machine"),
        ({}, "shard_text_encoders", "no effect on 1 rank"),
        ({"model_type": "full"}, "lora_rank", "needs model_type: lora"),
        ({}, "text_encoder_lora_rank", "FLUX.1 trains the denoiser only"),
        ({"model_family": "sdxl"}, "text_encoder_lora_rank", ""),
        (
            {"model_family": "sdxl"},
            "text_encoder_learning_rate",
            "needs text_encoder_lora_rank",
        ),
        (
            {"model_family": "sdxl", "text_encoder_lora_rank": 4},
            "unload_text_encoder",
            "text encoders are trained and stay",
        ),
        ({}, "lokr_factor", "needs lora_variant: lokr"),
        ({"lora_variant": "lokr"}, "lokr_full_matrix", ""),
        (
            {"lora_variant": "lokr", "lokr_full_matrix": True},
            "lora_rank",
            "no effect with lokr_full_matrix",
        ),
        (TWO | {"strategy": "ddp"}, "lora_placement", "needs strategy: fsdp2 or hsdp"),
        ({"optimizer": "sgd"}, "adam_beta1", "optimizer: sgd has none"),
        ({"lr_scheduler": "cosine"}, "lr_warmup_steps", ""),
        ({}, "lr_warmup_steps", "lr_scheduler: constant has no warm-up"),
        ({}, "lr_end", "lr_scheduler: constant does not decay"),
        ({"lr_scheduler": "linear"}, "lr_end", ""),
        ({"lr_scheduler": "cosine"}, "lr_num_cycles", "needs lr_scheduler: cosine_with_restarts"),
        ({"lr_scheduler": "polynomial"}, "lr_power", ""),
        ({}, "gradient_checkpointing_policy", "needs gradient_checkpointing: yes"),
        (FSDP | {"fsdp_activation_checkpointing": True}, "gradient_checkpointing_policy", ""),
        ({}, "flow_shift", "needs timestep_sampling: shift, uniform_shift or stretched"),
        ({}, "mode_scale", "needs timestep_sampling: mode"),
        (
            {"timestep_sampling": "uniform"},
            "logit_std",
            "needs timestep_sampling: logit_normal, shift or stretched",
        ),
        (
            {"model_family": "sdxl"},
            "logit_std",
            f"{FAMILIES['sdxl'].title} draws discrete timesteps",
        ),
        ({"model_family": "sdxl"}, "snr_gamma", ""),
        ({}, "snr_gamma", "FLUX.1 is a flow-matching model"),
        ({"loss_type": "huber"}, "huber_c", ""),
        (FSDP | {"use_ema": True}, "ema_device", "sharded with the model under FSDP"),
        ({"use_ema": True}, "ema_device", ""),
        ({"model_family": "wan"}, "num_frames", ""),
        ({}, "num_frames", "FLUX.1 trains on images"),
        ({}, "validation_num_frames", "FLUX.1 makes images"),
        ({"model_family": "wan"}, "validation_num_frames", "needs validation_prompts"),
        ({"validation_prompts": ["a"]}, "validation_num_frames", "FLUX.1 makes images"),
        ({"validation_fraction": 0.1}, "validation_steps", ""),
        ({"datasets": ["a", "b"]}, "dataset", "set by datasets"),
        ({}, "caption_shuffles", "needs shuffle_captions: yes"),
        ({}, "crop_variants", "needs crop: random"),
        ({"model_family": "sdxl"}, "train_guidance", "only for guidance-distilled models"),
    ],
)
def test_a_key_that_means_nothing_says_why(values: dict[str, Any], key: str, reason: str) -> None:
    assert find_inapplicable(JobSpec(**values)).get(key, "") == reason


def test_every_reason_is_about_a_key_that_there_is() -> None:
    assert set(find_inapplicable(JobSpec())) <= set(field_names())


# -- ranks ---------------------------------------------------------------------------------

ALONE = {"strategy": "auto", "fsdp_enable": None}
ON = {"strategy": "fsdp2", "unload_text_encoder": True, "cache_text_embeddings": True}


@pytest.mark.parametrize(
    ("values", "before", "after", "changes"),
    [
        (ALONE, 1, 2, ON),
        (ALONE, 1, 8, ON),
        ({"strategy": "single"}, 1, 2, ON),
        (ALONE | {"unload_text_encoder": False}, 1, 2, ON),
        (
            ALONE | {"fsdp_enable": False},
            1,
            2,
            {"unload_text_encoder": True, "cache_text_embeddings": True},
        ),
        ({"strategy": "hsdp"}, 1, 4, {"unload_text_encoder": True, "cache_text_embeddings": True}),
        (ALONE, 2, 8, {}),
        (ALONE, 1, 1, {}),
        (ON, 2, 1, {"strategy": "auto"}),
        (ON | {"fsdp_enable": True}, 2, 1, {"strategy": "auto", "fsdp_enable": None}),
    ],
)
def test_several_ranks_turn_fsdp_on(
    values: dict[str, Any], before: int, after: int, changes: dict[str, Any]
) -> None:
    assert follow_ranks(values, before, after) == changes


@pytest.mark.parametrize("first", [ALONE, {"strategy": "single", "unload_text_encoder": False}])
def test_what_was_there_before_comes_back(first: dict[str, Any]) -> None:
    there = first | follow_ranks(first, 1, 2)
    kept = {key: first.get(key) for key in FOLLOWING}
    back = there | follow_ranks(there, 2, 1, kept)
    assert {key: back.get(key) for key in FOLLOWING} == kept
    by_hand = there | {"strategy": "ddp"}  # what a person changed among several comes back too
    again = back | follow_ranks(back, 1, 2, {key: by_hand.get(key) for key in FOLLOWING})
    assert again["strategy"] == "ddp"
