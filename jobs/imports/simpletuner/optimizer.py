"""SimpleTuner's optimizer, its settings, and the course of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import training_keys
from jobs.imports.common.draft import is_off, read
from jobs.imports.common.import_report import Kind
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

# What its optimizers are made with: beta 1, beta 2, epsilon, weight decay.
_SETTINGS: Final = ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
_OPTIMIZER_SETTINGS: Final = {
    **dict.fromkeys(
        (
            *("adamw_bf16", "ao_adamw8bit", "ao_adamw4bit", "ao_adamfp8", "ao_adamwfp8"),
            *("bnb_adamw", "bnb_adamw8bit", "bnb_adamw_paged", "bnb_adamw8bit_paged"),
        ),
        (0.9, 0.999, 1e-6, 1e-2),
    ),
    "adamw_schedulefree": (0.9, 0.999, 1e-8, 1e-2),
    **dict.fromkeys(
        ("adamw_schedulefree+aggressive", "adamw_schedulefree+no_kahan"), (0.9, 0.999, 1e-6, 1e-3)
    ),
    "torch_adamw": (0.9, 0.999, 1e-8, 1e-2),
    **dict.fromkeys(("torch_adam", "bnb_adam", "bnb_adam8bit"), (0.9, 0.999, 1e-8, 0.0)),
    "optimi_stableadamw": (0.9, 0.99, 1e-6, 1e-2),
    **dict.fromkeys(("optimi_adamw", "optimi_adam"), (0.9, 0.99, 1e-6, 0.0)),
    "prodigy": (0.9, 0.99, 1e-8, 0.0),
}
_OPTIMIZER: Final = "adamw_bf16"  # where none is named

_CURVES: Final = ("cosine", "sine", "cosine_with_restarts")
_CURVE: Final = (
    "over the whole training; that tool's curve takes lr_warmup_steps steps to fall to lr_end"
)


def rate(draft: Draft, key: str, value: Any) -> None:
    if _optimizer_of(draft) == "prodigy":
        draft.take(key, "learning_rate", 1.0, "that tool always gives prodigy a rate of 1")
        return
    training_keys.rate(
        draft,
        key,
        value,
        scaled=draft.on("lr_scale") or draft.on("lr_scale_sqrt"),
        root=draft.on("lr_scale_sqrt"),
    )


def _optimizer_of(draft: Draft) -> str:
    return str(draft.get("optimizer") or _OPTIMIZER).strip().lower().replace("-", "_")


def _is_schedule_free(draft: Draft) -> bool:
    return _optimizer_of(draft).startswith("adamw_schedulefree")


def of_deepspeed(draft: Draft, key: str, value: Any) -> None:
    """Take a setting that only DeepSpeed's optimizer uses."""
    if draft.on("deepspeed_config"):
        draft.take(key, "weight_decay" if key == "adam_weight_decay" else key, value)
    else:
        draft.unneeded(key, "only used with DeepSpeed there; the optimizer's own value applies")


def settings(draft: Draft, key: str, value: Any) -> None:
    """Parse settings of the optimizer in one text: `eps=1e-6,weight_decay=0`."""
    parts = [part.partition("=")[::2] for part in str(value).split(",")]
    names = {"eps": "adam_epsilon", "weight_decay": "weight_decay"}
    ours: dict[str, Any] = {}
    other = []
    for name, text in parts:
        try:
            setting = names[name.strip()]
            ours[setting] = read(setting, text.strip())
        except (KeyError, UserError):
            other.append(name.strip())
    if other:
        draft.unsupported(key, f"not supported: {', '.join(other)}; set adam_* and weight_decay")
    else:
        draft.values |= ours
        draft.record(Kind.TRANSLATED, key, **ours)


def use_own_settings(draft: Draft) -> None:
    """Set that tool's defaults of the optimizer, where nothing else is set."""
    values = _OPTIMIZER_SETTINGS.get(_optimizer_of(draft))
    if values is None or draft.on("deepspeed_config"):
        return
    own = dict(zip(_SETTINGS, values, strict=True))
    missing = {name: value for name, value in own.items() if name not in draft.values}
    draft.values |= missing
    usual = {name: JobSpec.model_fields[name].default for name in missing}
    if others := {name: value for name, value in missing.items() if value != usual[name]}:
        draft.assume("optimizer_config", "the optimizer's own settings", **others)


def schedule(draft: Draft, key: str, value: Any) -> None:
    """Convert the schedule; there, a constant rate has a warm-up if one is set."""
    word = str(value).strip().lower().replace("-", "_")
    word = "cosine" if word == "cosine_with_warmup" else word
    if _is_schedule_free(draft):
        warms_up = (draft.number("lr_warmup_steps") or 0) > 0
        ours = "constant_with_warmup" if warms_up else "constant"
        draft.take(key, "lr_scheduler", ours, "that tool's schedule-free optimizer has no other")
    elif word == "constant" and (draft.number("lr_warmup_steps") or 0) > 0:
        draft.take(key, "lr_scheduler", "constant_with_warmup", "lr_warmup_steps is set")
    elif word in _CURVES:
        draft.take(key, "lr_scheduler", training_keys.SCHEDULES[word][0], _CURVE)
    else:
        training_keys.schedule(draft, key, value)


def warm_up(draft: Draft, key: str, value: Any) -> None:
    word = str(draft.get("lr_scheduler")).strip().lower().replace("-", "_")
    curve = word in (*_CURVES, "cosine_with_warmup") and not _is_schedule_free(draft)
    if not is_off(value) and curve:
        draft.unsupported(key, f"{word} has no warm-up there: it is the period of the curve")
    else:
        draft.take(key, "lr_warmup_steps", value)
