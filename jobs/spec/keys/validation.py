"""Samples while training, and the loss on what is held out."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.keys.prompts import LARGEST_SEED, Size, ValidationPrompt, read_prompts
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import Bool, field


class ValidationKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    # -- pictures --------------------------------------------------------------------------
    validation_prompts: Annotated[list[ValidationPrompt], BeforeValidator(read_prompts)] = field(
        [],
        "validation",
        "Prompts to sample while training: texts, or mappings with prompt, "
        "negative_prompt, resolution, steps, guidance, seed, true_cfg_scale, num_frames, "
        "conditioning_image (a path or several).",
    )
    validation_steps: int = field(
        0, "validation", "Steps between samples; 0: only at the end.", ge=0
    )
    validation_on_startup: Bool = field(
        False, "validation", "Also sample and measure the validation loss before the first step."
    )
    validation_num_inference_steps: int = field(
        20, "validation", "Denoising steps per sample.", ge=1, le=10_000
    )
    validation_guidance: float = field(
        3.5,
        "validation",
        "Guidance scale of samples: classifier-free guidance, or the guidance input of "
        "guidance-distilled models.",
        ge=0,
    )
    validation_resolution: Size = field(
        None,
        "validation",
        "Side of the samples in pixels, or WIDTHxHEIGHT (default: the training resolution).",
    )
    validation_seed: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "validation",
        "Seed of samples and of the validation loss (default: the job's seed). Every prompt "
        "starts from the same noise, as torch.Generator().manual_seed(seed) draws it.",
        ge=0,
        le=LARGEST_SEED,
    )
    validation_negative_prompt: str | None = field(
        None,
        "validation",
        "Negative prompt; guidance-distilled models need validation_true_cfg_scale too.",
    )
    validation_true_cfg_scale: float = field(
        1.0,
        "validation",
        "Classifier-free guidance scale of guidance-distilled models; above 1 sampling takes "
        "twice the time.",
        ge=0,
    )
    validation_num_frames: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "validation",
        "Frames per sampled video (default: num_frames; if that is not set either, one image).",
        ge=1,
        le=4096,
    )

    # -- loss ------------------------------------------------------------------------------
    validation_fraction: float = field(
        0.0,
        "validation",
        "Fraction of samples to hold out for the validation loss, at least one sample.",
        ge=0,
        le=0.5,
    )
    validation_loss_steps: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "validation",
        "Steps between validation losses (default: validation_steps). Always measured at the end.",
        ge=1,
    )
    validation_timesteps: int = field(
        4,
        "validation",
        "Number of noise levels at which the validation loss is measured.",
        ge=1,
        le=1000,
    )
