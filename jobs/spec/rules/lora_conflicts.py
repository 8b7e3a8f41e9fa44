"""Adapters that cannot be trained as configured; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.spec.families import FAMILIES
from jobs.spec.rules.averages import SCHEDULE_FREE
from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.strategy import shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.job_spec import JobSpec, RecipeKeys
    from jobs.spec.keys.lora import LoraKeys
    from jobs.spec.values.value_types import BasePrecision

_OF_PATTERNS: Final = (
    "lora_target_modules",
    "lora_exclude_modules",
    "lora_rank_pattern",
    "lora_alpha_pattern",
    "keep_in_full_precision",
)
# Optimizers that do not support a separate learning rate per parameter group.
ONE_RATE: Final = {
    "prodigy": "prodigy finds one rate for everything",
    SCHEDULE_FREE: f"{SCHEDULE_FREE} has one rate for everything",
}


def _placement(spec: RecipeKeys) -> Conflict | None:
    if spec.model_type == "lora" and spec.lora_placement == "sharded" and not shards(spec):
        return Conflict("lora_placement", "sharded needs strategy: fsdp2 or hsdp", named=True)
    return None


def _patterns(key: str, spec: JobSpec) -> Conflict | None:
    for pattern in getattr(spec, key) or ():
        try:
            re.compile(pattern)
        except re.error as error:
            return Conflict(key, f"{pattern} is not a regular expression: {error}", named=True)
    return None


def _whole_ranks(spec: LoraKeys) -> Conflict | None:
    for pattern, rank in (spec.lora_rank_pattern or {}).items():
        if rank != int(rank):
            return Conflict(
                "lora_rank_pattern", f"{pattern}: {rank:g} is not a whole number", named=True
            )
    return None


def _dora(spec: RecipeKeys) -> Conflict | None:
    if spec.model_type != "lora" or spec.lora_variant != "dora":
        return None
    if spec.lora_dropout:
        return Conflict("lora_dropout", "lora_dropout is not supported with lora_variant: dora")
    if spec.base_precision != "none":
        return Conflict("base_precision", "base_precision is not supported with lora_variant: dora")
    if spec.torch_compile:
        return Conflict("torch_compile", "torch_compile is not supported with lora_variant: dora")
    if spec.lora_placement == "sharded" and spec.mixed_precision != "no":
        return Conflict(
            "lora_placement",
            f"sharded would round the magnitudes of lora_variant: dora to "
            f"{spec.mixed_precision}; use lora_placement: replicated",
            named=True,
        )
    return None


def _lokr(spec: RecipeKeys) -> Conflict | None:
    if spec.model_type != "lora" or spec.lora_variant != "lokr":
        return None
    if spec.lokr_factor == 0:
        return Conflict("lokr_factor", "0 divides nothing; use -1, or at least 1", named=True)
    if spec.lora_dropout:
        return Conflict("lora_dropout", "lora_dropout is not supported with lora_variant: lokr")
    if spec.lora_init != "kaiming":
        return Conflict(
            "lora_init", f"{spec.lora_init} is not supported with lora_variant: lokr", named=True
        )
    if spec.optimizer == "muon":
        return Conflict(
            "optimizer",
            "muon has no whole matrices to train in the Kronecker products of lora_variant: lokr; "
            "use adamw",
            named=True,
        )
    return None


def trains_text(spec: RecipeKeys) -> bool:
    """Return whether the job trains a LoRA on text encoders."""
    return spec.model_type == "lora" and spec.text_encoder_lora_rank > 0


def _text_encoders(spec: JobSpec) -> Conflict | None:
    key, family = "text_encoder_lora_rank", FAMILIES.get(spec.model_family)
    if not spec.text_encoder_lora_rank:
        return None
    if spec.model_type != "lora":
        return Conflict(key, f"{key} needs model_type: lora")
    if family is not None and not family.text_lora:
        return Conflict(key, f"{family.title} trains the denoiser only; remove it", named=True)
    if spec.lora_variant != "lora":
        return Conflict(key, f"{key} needs lora_variant: lora, not {spec.lora_variant}")
    for other in ("fsdp_cpu_offload", "swap_blocks", "shard_text_encoders"):
        if getattr(spec, other):
            return Conflict(other, f"{other} is not supported with {key}")
    if spec.text_encoder_precision != "none":
        return Conflict(
            "text_encoder_precision", f"text_encoder_precision is not supported with {key}"
        )
    return None


def _text_rate(spec: RecipeKeys) -> Conflict | None:
    key = "text_encoder_learning_rate"
    given = trains_text(spec) and spec.text_encoder_learning_rate is not None
    if given and spec.optimizer in ONE_RATE:
        return Conflict(key, f"{ONE_RATE[spec.optimizer]}; remove it", named=True)
    return None


def _base_prediction(spec: JobSpec) -> Conflict | None:
    """Reject what needs the base's own prediction where it cannot be had."""
    for key, asked in (
        ("regularization_target", spec.regularization_target == "base"),
        ("preservation", spec.preservation != "none"),
    ):
        named = f"{key}: {getattr(spec, key)}"
        if asked and spec.model_type != "lora":
            return Conflict(
                key,
                f"{named} needs model_type: lora, since full training changes the base that it "
                "would be held to",
            )
        if asked and trains_text(spec):
            return Conflict(
                key,
                f"{named} is not supported with text_encoder_lora_rank, since the base would have "
                "to read captions without that adapter",
            )
    return None


def may_scale(spec: RecipeKeys) -> bool:
    """Return whether the job has a base that can be multiplied in fp8."""
    return spec.model_type == "lora" and spec.base_precision in ("fp8", "fp8_scaled")


def modulation_of(spec: LoraKeys) -> BasePrecision:
    """Return the precision of a packed base's modulation layers: none, int8 or nf4.

    With an nf4 base, int8 adds nothing to the existing error; with an 8-bit base it adds up to a
    third (`tests/bench/quantized.py`).
    """
    if spec.modulation_precision != "auto":
        return spec.modulation_precision
    return "int8" if spec.base_precision == "nf4" else "none"


def _matmul(spec: RecipeKeys) -> Conflict | None:
    if spec.model_type != "lora" or spec.base_matmul != "scaled":
        return None
    if not may_scale(spec):
        return Conflict("base_matmul", "scaled needs base_precision: fp8_scaled or fp8", named=True)
    if spec.mixed_precision == "fp16" or (spec.device != "cpu" and spec.mixed_precision != "bf16"):
        return Conflict("base_matmul", "scaled needs mixed_precision: bf16", named=True)
    return None


def _swapping(spec: RecipeKeys) -> Conflict | None:
    if not spec.swap_blocks or spec.model_type != "lora" or not shards(spec):
        return None
    return Conflict(
        "swap_blocks", "swap_blocks needs strategy: single or ddp, since FSDP shards the base"
    )


LORA_RULES: tuple[Callable[[JobSpec], Conflict | None], ...] = (
    _placement,
    *(partial(_patterns, key) for key in _OF_PATTERNS),
    _whole_ranks,
    _dora,
    _lokr,
    _matmul,
    _swapping,
    _text_encoders,
    _text_rate,
    _base_prediction,
)
