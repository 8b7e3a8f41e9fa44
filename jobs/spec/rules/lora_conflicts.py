"""Adapters that cannot be trained as described; a part of `jobs.spec.rules.conflicts`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.strategy import shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.job_spec import JobSpec


def _placement(spec: JobSpec) -> Conflict | None:
    if spec.model_type == "lora" and spec.lora_placement == "sharded" and not shards(spec):
        return Conflict("lora_placement", "lora_placement: sharded needs strategy: fsdp2 or hsdp")
    return None


def _patterns(spec: JobSpec) -> Conflict | None:
    for key in (
        "lora_target_modules",
        "lora_exclude_modules",
        "lora_rank_pattern",
        "lora_alpha_pattern",
    ):
        for pattern in getattr(spec, key) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return Conflict(key, f"{key}: {pattern} is not a regular expression: {error}")
    for pattern, rank in (spec.lora_rank_pattern or {}).items():
        if rank != int(rank):
            return Conflict(
                "lora_rank_pattern", f"lora_rank_pattern: {pattern}: {rank:g} is not a whole number"
            )
    return None


def _dora(spec: JobSpec) -> Conflict | None:
    if spec.model_type != "lora" or spec.lora_variant != "dora":
        return None
    if spec.lora_dropout:
        return Conflict("lora_dropout", "lora_dropout is not supported with lora_variant: dora")
    if spec.torch_compile:
        return Conflict("torch_compile", "torch_compile is not supported with lora_variant: dora")
    if spec.lora_placement == "sharded" and spec.mixed_precision != "no":
        return Conflict(
            "lora_placement",
            f"lora_placement: sharded would round the magnitudes of lora_variant: dora to "
            f"{spec.mixed_precision}; use lora_placement: replicated",
        )
    return None


LORA_RULES: tuple[Callable[[JobSpec], Conflict | None], ...] = (_placement, _patterns, _dora)
