"""Warn about settings that run, but perhaps not as the user expects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from jobs.spec.families import FAMILIES
from jobs.spec.rules.averages import SCHEDULE_FREE
from jobs.spec.rules.cascade import find_overruled
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.no_effect import ONE_RANK, counts, find_inapplicable
from jobs.spec.rules.validation_conflicts import validation_warnings

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec, RecipeKeys

# The lowest and highest useful learning rates of each optimizer. All but two change a weight by
# about the rate in a step, whatever its gradient is, and weights are about 0.02. Prodigy multiplies
# the rate by its own estimate; a schedule-free optimizer averages larger steps out. With sgd the
# change depends on the gradients, so any rate may be right.
_RATES: Final = {
    **dict.fromkeys(("adamw", "adamw_8bit", "adafactor", "came", "muon"), (1e-8, 1e-2)),
    "lion": (1e-9, 3e-3),
    SCHEDULE_FREE: (1e-8, 5e-2),
    "prodigy": (0.05, 5.0),
}
_USUAL: Final = {"prodigy": "1.0", "lion": "1e-5 to 1e-4", SCHEDULE_FREE: "1e-4 to 3e-3"}
# Keys that stay on whatever a job says, and why.
_ALWAYS: Final = {
    "fsdp_cpu_ram_efficient_loading": "every rank always reads only its own shard from disk",
    "fsdp_limit_all_gathers": "FSDP2 always limits how many units it gathers ahead",
}
# Keys that configs of other tools often set without need.
_NO_WARNING: Final = ("fsdp_enable", "fsdp_version")


def find_warnings(spec: JobSpec) -> list[str]:
    """List the settings that work, but not as the user may expect; one sentence each."""
    warnings = []
    if spec.fsdp_version == 1:
        warnings.append("fsdp_version: FSDP v1 is deprecated; the job runs with FSDP v2")
    warnings += [
        f"{key}: false has no effect; {always}"
        for key, always in _ALWAYS.items()
        if not getattr(spec, key)
    ]
    warnings += _odd_rates(spec)
    if spec.optimizer == SCHEDULE_FREE and "constant" not in spec.lr_scheduler:
        warnings.append(
            f"lr_scheduler: {SCHEDULE_FREE} averages weights instead of lowering the rate; use "
            "constant_with_warmup or constant"
        )
    family = FAMILIES.get(spec.model_family)
    if spec.mixed_precision == "fp16" and family is not None and family.overflows_fp16:
        warnings.append(
            f"mixed_precision: fp16 is known to overflow in {family.title} "
            f"({family.overflows_fp16}), which may then return NaN; use bf16, or no on GPUs "
            "without bf16"
        )
    if spec.attention_backend == "cudnn":
        warnings.append(
            "attention_backend: cudnn had NaN gradients on an H200 (torch 2.11, cuDNN 9.19); "
            "use auto, or flash3 on Hopper GPUs"
        )
    if distilled := _distilled(spec):
        warnings.append(distilled)
    if family is not None and spec.train_audio and family.rate not in (None, spec.fps):
        warnings.append(
            f"fps: {family.title} places sound beside frames at {family.rate:g} per second, so "
            f"with {spec.fps:g} it learns sound that does not fit the frames; use {family.rate:g}"
        )
    warnings += _without_effect(spec)
    named = [name for name in spec.export_formats or () if name != "diffusers"]
    if spec.model_type == "full" and named:
        warnings.append(
            f"export_formats: {' and '.join(named)} names are for LoRAs only; a full model is "
            "exported as a diffusers pipeline"
        )
    return warnings + validation_warnings(spec) + find_overruled(spec)


def _odd_rates(spec: JobSpec) -> list[str]:
    """Warn about learning rates that train almost nothing or ruin any model."""
    least, most = _RATES.get(spec.optimizer, (0.0, math.inf))
    rates: dict[str, float | None] = {"learning_rate": spec.learning_rate}
    if counts("text_encoder_learning_rate", spec):
        rates["text_encoder_learning_rate"] = spec.text_encoder_learning_rate
    odd = {
        key: rate for key, rate in rates.items() if rate is not None and not least <= rate <= most
    }
    usual = _USUAL.get(spec.optimizer, "1e-5 to 1e-3")
    why = (
        "prodigy multiplies it by its own estimate"
        if spec.optimizer == "prodigy"
        else f"{spec.optimizer} moves each weight by about this much in a step"
    )
    return [
        f"{key}: {why}; {rate:g} "
        f"{'trains almost nothing' if rate < least else 'ruins the model'}, use {usual}"
        for key, rate in odd.items()
    ]


def _distilled(spec: RecipeKeys) -> str:
    """Warn about training a model that is distilled to few steps or to need no guidance."""
    family = FAMILIES.get(spec.model_family)
    flavour = family.flavours.get(spec.model_flavour or "") if family else None
    if family is None or flavour is None or flavour.undistilled is None:
        return ""
    if spec.model_type == "lora" and spec.training_adapter:
        return ""
    adapter = (
        "set training_adapter if one is published for it, " if spec.model_type == "lora" else ""
    )
    fewer = "validation_num_inference_steps" in flavour.defaults
    what = "few steps" if fewer else "need no guidance"
    return (
        f"model_flavour: {family.title} {spec.model_flavour} is distilled to {what}, and "
        f"training gradually undoes that; train {flavour.undistilled}, whose LoRAs often work with "
        f"both, {adapter}or stop as soon as samples are good"
    )


def _without_effect(spec: JobSpec) -> list[str]:
    """Warn about keys that the job sets without effect, one line for each reason."""
    reasons = find_inapplicable(spec)
    refused = {conflict.key for conflict in find_conflicts(spec)}
    keys: dict[str, list[str]] = {}
    for key in spec.to_dict(only_set=True):
        if key in reasons and key not in (*_NO_WARNING, *_ALWAYS, *refused):
            keys.setdefault(reasons[key], []).append(key)
    return [
        f"{', '.join(named)}: {'' if why == ONE_RANK else 'no effect; '}{why}"
        for why, named in keys.items()
    ]
