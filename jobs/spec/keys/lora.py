"""The adapter."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import Bool, LoraInit, OptionalTextList, Placement, choice, field


class LoraKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    lora_rank: int = field(16, "lora", "Rank of the adapter.", ge=1, le=4096)
    lora_alpha: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "lora", "Scale numerator; the rank when left out.", gt=0
    )
    lora_dropout: float = field(0.0, "lora", "Dropout in front of the adapter.", ge=0, lt=1)
    lora_init: Annotated[LoraInit, choice(LoraInit)] = field(
        "kaiming", "lora",
        "How A is drawn, as peft calls it: kaiming, uniform and its own default; or gaussian with "
        "deviation 1 / rank, as diffusers' scripts have it. B is zero.",
    )  # fmt: skip
    lora_placement: Annotated[Placement, choice(Placement)] = field(
        "replicated", "lora",
        "replicated: whole on every rank, gradients averaged in one bucket; sharded: split "
        "like the base weights.",
    )  # fmt: skip
    lora_experts: Bool = field(
        False, "lora", "Also adapt the experts that tokens are routed to, where a family has them."
    )
    lora_target_modules: OptionalTextList = field(
        None, "lora", "Module name endings that get an adapter; the family's choice when left out."
    )
