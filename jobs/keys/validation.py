"""Samples while training."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.fields import TextList, field
from jobs.spellings import as_none


class ValidationKeys(BaseModel):
    """A part of `jobs.spec.JobSpec`."""

    validation_prompts: TextList = field([], "output", "Prompts that are sampled while training.")
    validation_steps: int = field(
        0, "output", "Sample every so many steps; 0 samples at the end only.", ge=0
    )
    validation_num_inference_steps: int = field(20, "output", "Denoising steps.", ge=1)
    validation_guidance: float = field(3.5, "output", "Guidance scale of samples.", ge=0)
    validation_resolution: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "output", "Side of the sampled pictures; the training resolution when left out.",
        ge=16,
    )  # fmt: skip
