"""Keys for the adapter."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import LORA
from jobs.spec.rules.no_effect import (
    chosen_by_name,
    no_experts,
    no_text_lora,
    not_fp8,
    not_lokr,
    not_lora,
    not_quantized,
    not_sharded,
    sharded,
    text_not_trained,
    with_full_matrix,
    with_one_rate,
)
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    BaseMatmul,
    BasePrecision,
    Bool,
    LoraInit,
    LoraVariant,
    ModulationPrecision,
    NumberByCard,
    OptionalNumbers,
    OptionalText,
    OptionalTextList,
    Placement,
    choice,
)


class LoraKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    lora_rank: int = field(
        16,
        LORA,
        "Rank of the adapter.",
        resume="impossible",
        mismatch="the adapter's weights have a different shape",
        no_effect=(not_lora, with_full_matrix),
        ge=1,
        le=4096,
    )
    lora_alpha: Annotated[float | None, BeforeValidator(as_none)] = field(
        None,
        LORA,
        "LoRA alpha; the scale is alpha / rank (default: the rank).",
        resume="ruled",
        blank="as LoRA rank",
        no_effect=(not_lora, with_full_matrix),
        memory=False,
        gt=0,
    )
    lora_variant: Annotated[LoraVariant, choice(LoraVariant)] = field(
        "lora",
        LORA,
        "lora; rslora, which divides alpha by the root of the rank; dora, which also trains the "
        "length of each row of the weights; or lokr, whose adapters are Kronecker products of two "
        "small matrices (LyCORIS).",
        resume="impossible",
        mismatch="the adapter's weights mean something else",
        no_effect=not_lora,
    )
    lokr_factor: int = field(
        -1,
        LORA,
        "Side of lokr's first matrix, where it divides the layer's sides: larger means fewer "
        "weights; -1 makes both matrices about as large.",
        resume="impossible",
        mismatch="the adapter's weights have a different shape",
        no_effect=(not_lora, not_lokr),
        ge=-1,
        le=4096,
    )
    lokr_full_matrix: Bool = field(
        False,
        LORA,
        "Train lokr's second matrix whole, not as a product of rank lora_rank. lora_rank and "
        "lora_alpha then have no effect.",
        resume="impossible",
        mismatch="the adapter's weights have a different shape",
        no_effect=(not_lora, not_lokr),
    )
    lora_rank_pattern: OptionalNumbers = field(
        None,
        LORA,
        "Ranks of single layers: suffixes or regular expressions of module names, each with its "
        "rank.",
        resume="impossible",
        mismatch="the adapter's weights have a different shape",
        no_effect=(not_lora, with_full_matrix),
        public=True,
    )
    lora_alpha_pattern: OptionalNumbers = field(
        None,
        LORA,
        "Alphas of single layers, like lora_rank_pattern (default: lora_alpha; where that is not "
        "set, the layer's rank).",
        resume="changes",
        no_effect=(not_lora, with_full_matrix),
        memory=False,
        public=True,
    )
    lora_dropout: float = field(
        0.0,
        LORA,
        "Dropout on the adapter's input.",
        resume="changes",
        no_effect=not_lora,
        ge=0,
        lt=1,
    )
    lora_init: Annotated[LoraInit, choice(LoraInit)] = field(
        "kaiming",
        LORA,
        "How matrix A is initialized: kaiming (peft's default) or gaussian (standard deviation "
        "1 / rank, as in diffusers' scripts). B starts at zero.",
        resume="same",
        no_effect=not_lora,
        memory=False,
    )
    lora_placement: Annotated[Placement, choice(Placement)] = field(
        "replicated",
        LORA,
        "replicated: a full copy on every rank, gradients averaged in one bucket; sharded: split "
        "like the base weights.",
        resume="same",
        no_effect=(not_lora, not_sharded),
    )
    text_encoder_lora_rank: int = field(
        0,
        LORA,
        "Rank of a LoRA on the CLIP text encoders (query, key, value and output of attention); 0: "
        "they are not trained. Its scale is that of the denoiser's adapter. Captions are then "
        "encoded in every step, and not cached.",
        resume="impossible",
        no_effect=(not_lora, no_text_lora),
        ge=0,
        le=4096,
    )
    text_encoder_learning_rate: Annotated[float | None, BeforeValidator(as_none)] = field(
        None,
        LORA,
        "Peak learning rate of the text encoders' LoRA (default: learning_rate).",
        resume="changes",
        blank="as learning rate",
        no_effect=(not_lora, no_text_lora, text_not_trained, with_one_rate),
        memory=False,
        gt=0,
        le=10,
    )
    base_precision: Annotated[BasePrecision, choice(BasePrecision)] = field(
        "none",
        LORA,
        "Precision that the frozen weights of the blocks are kept and sharded in: none "
        "(mixed_precision), fp8 (E4M3 without scales), fp8_scaled or int8 (a scale for each row), "
        "or nf4 (4 bits, a scale for each 64 weights). They are computed with in mixed_precision.",
        resume="changes",
        no_effect=not_lora,
    )
    base_matmul: Annotated[BaseMatmul, choice(BaseMatmul)] = field(
        "auto",
        LORA,
        "How layers of an fp8 base compute forward: dequantize (weights to mixed_precision), "
        "scaled (inputs are rounded to fp8 too, with a scale for each row, and multiplied in fp8; "
        "faster, less exact) or auto (scaled where the GPUs have it; a resumed job keeps what it "
        "had).",
        resume="ruled",
        no_effect=(not_lora, not_fp8),
    )
    keep_in_full_precision: OptionalTextList = field(
        None,
        LORA,
        "Regular expressions of the names of layers that base_precision leaves as they are, and "
        "no others: [] packs every linear layer of the blocks in it (default: modulation_precision "
        "decides).",
        resume="changes",
        no_effect=(not_lora, not_quantized),
        public=True,
    )
    modulation_precision: Annotated[ModulationPrecision, choice(ModulationPrecision)] = field(
        "auto",
        LORA,
        "Precision that a packed base keeps its modulation layers in, which scale everything after "
        "them: none (mixed_precision), int8, nf4, or auto (int8 beside nf4, else none).",
        resume="ruled",
        no_effect=(not_lora, not_quantized, chosen_by_name),
    )
    swap_blocks: NumberByCard = field(
        0,
        LORA,
        "Blocks whose frozen weights stay in host memory and are copied to the GPU when they "
        "compute; with strategy: single or ddp. A number, or one for each size of GPU: {16GB: 24, "
        "24GB: 8} is 24 blocks on GPUs of up to 16 GB, 8 on those of up to 24, and none on larger "
        "ones.",
        resume="same",
        no_effect=(not_lora, sharded),
        public=True,
    )
    lora_experts: Bool = field(
        False,
        LORA,
        "Also adapt the routed experts of mixture-of-experts families.",
        resume="ruled",
        no_effect=(not_lora, no_experts),
    )
    lora_target_modules: OptionalTextList = field(
        None,
        LORA,
        "Suffixes of module names that get an adapter (default: the family's). What contains one "
        "of * + ? | ( [ is a regular expression of the whole name.",
        resume="ruled",
        blank="the family's",
        no_effect=not_lora,
        public=True,
    )
    lora_exclude_modules: OptionalTextList = field(
        None,
        LORA,
        "Suffixes or regular expressions of module names that get no adapter, though "
        "lora_target_modules or the family names them.",
        resume="ruled",
        no_effect=not_lora,
        public=True,
    )
    init_lora: OptionalText = field(
        None,
        LORA,
        "A LoRA to begin from: a .safetensors file with the key names of diffusers, ComfyUI or "
        "kohya's scripts, or a job's export directory. It must fit the job's layers and ranks.",
        resume="same",
        blank="file.safetensors",
        no_effect=not_lora,
        memory=False,
        path=True,
    )
    training_adapter: OptionalText = field(
        None,
        LORA,
        "A frozen LoRA that is added to the base while training, not while sampling, and is not "
        "exported: a .safetensors file or its directory. Those published for turbo and schnell "
        "models undo the distillation.",
        resume="changes",
        blank="file.safetensors",
        no_effect=not_lora,
        path=True,
    )
