"""What of a job decides its trace: everything else is arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.memory.tracing.inputs import references, sampled, training_frames, training_size
from jobs.models.blocks.model_config import find_target
from jobs.spec.families import denoiser_config
from jobs.spec.keys.prompts import requests_of
from jobs.spec.rules.strategy import checkpoints_activations, own_policy

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec, RecipeKeys

# Keys whose values change what a forward or backward of a rank does; some of them only sometimes.
_ALWAYS: Final = (
    "pretrained_model_name_or_path",
    "model_family",
    "model_flavour",
    "model_type",
    "mixed_precision",
    "max_sequence_length",
    "attention_backend",
    "fsdp_auto_wrap_policy",
    "torch_compile",
)
_OF_TRAINING: Final = ("train_batch_size", "loss_type", "snr_gamma")
_OF_LORA: Final = (
    "lora_rank",
    "lora_variant",
    "lokr_factor",
    "lokr_full_matrix",
    "lora_rank_pattern",
    "lora_dropout",
    "lora_target_modules",
    "lora_exclude_modules",
    "lora_experts",
    "base_precision",
    "base_matmul",
    "keep_in_full_precision",
    "modulation_precision",
)
_OF_POLICIES: Final = {
    "SIZE_BASED_WRAP": ("fsdp_min_num_params",),
    "TRANSFORMER_BASED_WRAP": ("fsdp_transformer_layer_cls_to_wrap",),
}


@dataclass(frozen=True)
class Shape:
    """A trace's name.

    Attributes:
        key: All that decides it, as a text.
        spec: A job that has it.
        config: The denoiser's config.
        sharded: Whether units gather their weights, in the compute precision.
        size: Width and height of an image in pixels.
        frames: Frames of a video.
        training: Whether it is a step of training; else a forward for a sample.
    """

    key: str
    spec: JobSpec
    config: dict[str, Any]
    sharded: bool
    size: tuple[int, int]
    frames: int
    training: bool = True

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and other.key == self.key


def shape_of(spec: JobSpec, *, sharded: bool, training: bool = True) -> Shape | None:
    """Return the shape of a job's steps or samples; None for samples if it makes none.

    Raises:
        UserError: The model's config is not known, or no image size fits the job.
    """
    target = find_target(spec.model_family, spec.model_flavour, spec.pretrained_model_name_or_path)
    asked = sampled(spec)
    if training:
        size, frames = training_size(spec), training_frames(spec)
    elif asked is not None:
        size, frames = asked
    else:
        return None
    config = denoiser_config(spec, target.config)
    facts = spec.model_dump(mode="json", include=_keys(spec, training=training)) | {
        "cpu": spec.device == "cpu",
        "sharded": sharded,
        "size": size,
        "frames": frames,
        "guided": not training and any(request.guided for request in requests_of(spec)),
        "references": references(spec, training=training)
        and [
            references(spec, training=training),
            spec.conditioning_resolution,
        ],
        "config": config,
    }
    key = json.dumps(facts, sort_keys=True)
    return Shape(key, spec, config, sharded, size, frames, training)


def _keys(spec: RecipeKeys, *, training: bool) -> set[str]:
    """Return the keys that matter to this job."""
    keys = {*_ALWAYS, *_OF_POLICIES.get(spec.fsdp_auto_wrap_policy, ())}
    if training:
        keys.update(_OF_TRAINING)
        if checkpoints_activations(spec):
            keys |= {"gradient_checkpointing_policy", "gradient_checkpointing_interval"}
            keys |= {"gradient_checkpointing", "fsdp_activation_checkpointing"}
    if spec.model_type == "lora":
        keys.update(_OF_LORA)
        if own_policy(spec):  # it is asked without what is not sharded
            keys.add("lora_placement")
    return keys
