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
        [], "validation",
        "Prompts that are sampled while training: texts, or mappings with prompt, "
        "negative_prompt, resolution, steps, guidance, seed, true_cfg_scale, num_frames.",
    )  # fmt: skip
    validation_steps: int = field(
        0, "validation", "Sample every so many steps; 0 samples at the end only.", ge=0
    )
    validation_on_startup: Bool = field(
        False, "validation", "Also sample, and measure the validation loss, before the first step."
    )
    validation_num_inference_steps: int = field(
        20, "validation", "Denoising steps of samples.", ge=1, le=10_000
    )
    validation_guidance: float = field(
        3.5, "validation",
        "Guidance scale of samples: away from the negative prompt, or of guidance-distilled "
        "models the scale that they take as an input.", ge=0,
    )  # fmt: skip
    validation_resolution: Size = field(
        None, "validation",
        "Side of the sampled pictures, or WIDTHxHEIGHT; the training resolution when left out.",
    )  # fmt: skip
    validation_seed: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "validation",
        "Seed of samples and of the validation loss; the job's seed when left out. Every prompt "
        "begins with the same noise, as torch.Generator().manual_seed(seed) draws it.",
        ge=0, le=LARGEST_SEED,
    )  # fmt: skip
    validation_negative_prompt: str | None = field(
        None, "validation",
        "What samples should not be like; of guidance-distilled models with "
        "validation_true_cfg_scale only.",
    )  # fmt: skip
    validation_true_cfg_scale: float = field(
        1.0, "validation",
        "Of guidance-distilled models: classifier-free guidance away from the negative prompt; "
        "above 1, which takes twice the time.", ge=0,
    )  # fmt: skip
    validation_num_frames: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "validation",
        "Frames of sampled videos; num_frames when left out, and one picture without that.",
        ge=1, le=4096,
    )  # fmt: skip

    # -- loss ------------------------------------------------------------------------------
    validation_fraction: float = field(
        0.0, "validation",
        "Hold out this share of the samples, at least one, and measure the loss on them.",
        ge=0, le=0.5,
    )  # fmt: skip
    validation_loss_steps: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "validation",
        "Measure the validation loss every so many steps; as often as samples are made when left "
        "out. The end always does.", ge=1,
    )  # fmt: skip
    validation_timesteps: int = field(
        4, "validation", "Noise levels at which the validation loss is measured.", ge=1, le=1000
    )
