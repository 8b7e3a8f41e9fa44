"""The adapter."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    BaseMatmul,
    BasePrecision,
    Bool,
    LoraInit,
    LoraVariant,
    OptionalNumbers,
    OptionalText,
    OptionalTextList,
    Placement,
    choice,
    field,
)


class LoraKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    lora_rank: int = field(16, "lora", "Rank of the adapter.", ge=1, le=4096)
    lora_alpha: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "lora", "LoRA alpha; the scale is alpha / rank (default: the rank).", gt=0
    )
    lora_variant: Annotated[LoraVariant, choice(LoraVariant)] = field(
        "lora",
        "lora",
        "lora; rslora, which divides alpha by the root of the rank; or dora, which also trains the "
        "length of each row of the weights.",
    )
    lora_rank_pattern: OptionalNumbers = field(
        None,
        "lora",
        "Ranks of single layers: suffixes or regular expressions of module names, each with its "
        "rank.",
    )
    lora_alpha_pattern: OptionalNumbers = field(
        None,
        "lora",
        "Alphas of single layers, like lora_rank_pattern (default: lora_alpha; where that is not "
        "set, the layer's rank).",
    )
    lora_dropout: float = field(0.0, "lora", "Dropout on the adapter's input.", ge=0, lt=1)
    lora_init: Annotated[LoraInit, choice(LoraInit)] = field(
        "kaiming",
        "lora",
        "How matrix A is initialized: kaiming (peft's default) or gaussian (standard deviation "
        "1 / rank, as in diffusers' scripts). B starts at zero.",
    )
    lora_placement: Annotated[Placement, choice(Placement)] = field(
        "replicated",
        "lora",
        "replicated: a full copy on every rank, gradients averaged in one bucket; sharded: split "
        "like the base weights.",
    )
    base_precision: Annotated[BasePrecision, choice(BasePrecision)] = field(
        "none",
        "lora",
        "Precision that the frozen weights of the blocks are kept and sharded in: none "
        "(mixed_precision), fp8 (E4M3 without scales), fp8_scaled or int8 (a scale for each row), "
        "or nf4 (4 bits, a scale for each 64 weights). They are computed with in mixed_precision.",
    )
    base_matmul: Annotated[BaseMatmul, choice(BaseMatmul)] = field(
        "auto",
        "lora",
        "How layers of an fp8 base compute forward: dequantize (weights to mixed_precision), "
        "scaled (inputs are rounded to fp8 too, with a scale for each row, and multiplied in fp8; "
        "faster, less exact) or auto (scaled where the GPUs have it; a resumed job keeps what it "
        "had).",
    )
    keep_in_full_precision: OptionalTextList = field(
        None,
        "lora",
        "Regular expressions of the names of layers that base_precision leaves as they are "
        "(default: the family's modulation layers; []: none).",
    )
    swap_blocks: int = field(
        0,
        "lora",
        "Blocks whose frozen weights stay in host memory and are copied to the GPU when they "
        "compute; for one GPU.",
        ge=0,
        le=1000,
    )
    lora_experts: Bool = field(
        False, "lora", "Also adapt the routed experts of mixture-of-experts families."
    )
    lora_target_modules: OptionalTextList = field(
        None,
        "lora",
        "Suffixes of module names that get an adapter (default: the family's). What contains one "
        "of * + ? | ( [ is a regular expression of the whole name.",
    )
    lora_exclude_modules: OptionalTextList = field(
        None,
        "lora",
        "Suffixes or regular expressions of module names that get no adapter, though "
        "lora_target_modules or the family names them.",
    )
    init_lora: OptionalText = field(
        None,
        "lora",
        "A LoRA to begin from: a .safetensors file with the key names of diffusers, ComfyUI or "
        "kohya's scripts, or a job's export directory. It must fit the job's layers and ranks.",
    )
