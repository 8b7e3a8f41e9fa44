"""Keys for samples during training, and for the validation loss."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import BeforeValidator

from jobs.run.judging import Score
from jobs.spec.keys.groups import VALIDATION, VALIDATION_LOSS, VALIDATION_SCORES
from jobs.spec.keys.prompts import LARGEST_SEED, Size, ValidationPrompt, read_prompts
from jobs.spec.rules.no_effect import (
    no_clip,
    no_dino,
    no_prompts,
    no_true_cfg,
    no_validation,
    no_validation_fraction,
    no_video_samples,
    nothing_sampled,
)
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import Bool, Interval, OptionalInterval, read_scores


class ValidationKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    # -- samples ---------------------------------------------------------------------------
    validation_prompts: Annotated[list[ValidationPrompt], BeforeValidator(read_prompts)] = field(
        [],
        VALIDATION,
        "Prompts to sample while training: texts, or mappings with prompt, "
        "negative_prompt, resolution, steps, guidance, seed, true_cfg_scale, num_frames, "
        "conditioning_image (a path or several), conditioning_roles (what each of them is).",
        resume="same",
        blank="a fox in snow | a drawing of a fox",
        label="prompts",
    )
    validation_steps: Interval = field(
        0,
        VALIDATION,
        "Steps between samples, or epochs; 0: only at the end.",
        resume="same",
        no_effect=no_validation,
        words=("1 epoch",),
        public=True,
    )
    validation_on_startup: Bool = field(
        False,
        VALIDATION,
        "Also sample and measure the validation loss before the first step.",
        resume="same",
        no_effect=no_validation,
    )
    validation_num_inference_steps: int = field(
        20,
        VALIDATION,
        "Denoising steps per sample.",
        resume="ruled",
        no_effect=nothing_sampled,
        ge=1,
        le=10_000,
    )
    validation_guidance: float = field(
        3.5,
        VALIDATION,
        "Guidance scale of samples: classifier-free guidance, or the guidance input of "
        "guidance-distilled models.",
        resume="ruled",
        no_effect=nothing_sampled,
        ge=0,
    )
    validation_resolution: Size = field(
        None,
        VALIDATION,
        "Side of the samples in pixels, or WIDTHxHEIGHT (default: the training resolution).",
        resume="same",
        blank="as in training",
        no_effect=no_prompts,
        public=True,
    )
    validation_seed: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        VALIDATION,
        "Seed of samples and of the validation loss (default: the job's seed). Every prompt "
        "starts from the same noise, as torch.Generator().manual_seed(seed) draws it.",
        resume="ruled",
        blank="as seed",
        no_effect=no_validation,
        memory=False,
        ge=0,
        le=LARGEST_SEED,
    )
    validation_negative_prompt: str | None = field(
        None,
        VALIDATION,
        "Negative prompt; guidance-distilled models need validation_true_cfg_scale too.",
        resume="ruled",
        no_effect=nothing_sampled,
    )
    validation_true_cfg_scale: float = field(
        1.0,
        VALIDATION,
        "Classifier-free guidance scale of guidance-distilled models; above 1 sampling takes "
        "twice the time.",
        resume="ruled",
        no_effect=no_true_cfg,
        ge=0,
    )
    validation_num_frames: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        VALIDATION,
        "Frames per sampled video (default: num_frames; if that is not set either, one image).",
        resume="same",
        no_effect=no_video_samples,
        ge=1,
        le=4096,
    )

    # -- loss ------------------------------------------------------------------------------
    validation_fraction: float = field(
        0.0,
        VALIDATION_LOSS,
        "Fraction of samples to hold out for the validation loss, at least one sample.",
        resume="changes",
        ge=0,
        le=0.5,
    )
    validation_loss_steps: OptionalInterval = field(
        None,
        VALIDATION_LOSS,
        "Steps between validation losses, or epochs (default: validation_steps). Always measured "
        "at the end.",
        resume="same",
        blank="as validation steps",
        no_effect=no_validation_fraction,
        words=("1 epoch",),
        public=True,
    )
    validation_timesteps: int = field(
        4,
        VALIDATION_LOSS,
        "Number of noise levels at which the validation loss is measured.",
        resume="same",
        no_effect=no_validation_fraction,
        memory=False,
        ge=1,
        le=1000,
    )

    # -- scores ----------------------------------------------------------------------------
    validation_scores: Annotated[list[Score], BeforeValidator(read_scores)] = field(
        [],
        VALIDATION_SCORES,
        "Scores of each step's samples: clip_t (how well they match their prompts), clip_i and "
        "dino_i (how alike they are to the held-out images).",
        resume="same",
        blank="none",
        no_effect=no_prompts,
        label="scores",
        words=get_args(Score),
        public=True,
    )
    validation_clip_model: str = field(
        "openai/clip-vit-large-patch14",
        VALIDATION_SCORES,
        "The CLIP model of clip_t and clip_i: a directory, or a name of the hub.",
        resume="same",
        no_effect=no_clip,
        min_length=1,
    )
    validation_dino_model: str = field(
        "facebook/dinov2-base",
        VALIDATION_SCORES,
        "The DINO or DINOv2 model of dino_i: a directory, or a name of the hub.",
        resume="same",
        no_effect=no_dino,
        min_length=1,
    )
