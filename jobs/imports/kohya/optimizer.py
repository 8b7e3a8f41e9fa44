"""Optimizers and schedules of sd-scripts and musubi-tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common.draft import as_number, is_off
from jobs.imports.common.table import translation

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_DECAY: Final = ("adamw", "adamw_8bit")
_LIKE_HERE: Final[dict[str, dict[str, Any]]] = {
    "adafactor": {"relative_step": False, "scale_parameter": False, "warmup_init": False},
    "muon": {
        "adjust_lr_fn": "match_rms_adamw",
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
    },
    "prodigy": {
        **dict.fromkeys(("decouple", "use_bias_correction", "safeguard_warmup"), True),
        "d_coef": 1,
    },
}
# What these optimizers do if no argument says so.
_THEIRS: Final[dict[str, dict[str, Any]]] = {
    "adafactor": {"relative_step": True, "scale_parameter": True},
    "muon": {"adjust_lr_fn": "original"},
    "prodigy": {"use_bias_correction": False, "safeguard_warmup": False},
}


def _optimizer_of(draft: Draft) -> tuple[str, tuple[Any, str] | None]:
    """Return the optimizer's name there, and what it is here; None for nothing."""
    word = str(draft.get("optimizer_type") or "").strip()
    if not word:
        word = "adamw8bit" if draft.on("use_8bit_adam") else "adamw"
        word = "lion" if draft.on("use_lion_optimizer") else word
    plain = word.rpartition(".")[2].lower()
    paged = plain.startswith("paged")
    plain = plain.removeprefix("paged").replace("schedulefree", "_schedulefree").replace("__", "_")
    plain = "adamw" if plain == "adamw32bit" else plain
    ours = ("came", "") if plain == "came" else translation("optimizer", plain)
    why = "state is not paged to host memory" if paged else ""
    return plain, ours and (ours[0], why or ours[1])


def optimizer_defaults(draft: Draft) -> dict[str, Any]:
    """Return the optimizer, and what it is made with there."""
    name, ours = _optimizer_of(draft)
    defaults: dict[str, Any] = {}
    if "optimizer_type" not in draft.theirs and not draft.on("use_8bit_adam"):
        defaults["optimizer_type"] = "AdamW"
    if ours and ours[0] in _DECAY:
        defaults["optimizer_args.weight_decay"] = 1e-2
    if ours and ours[0] == "muon":
        defaults["optimizer_args.weight_decay"] = 0.1
    arguments = _THEIRS.get(name, {})
    return defaults | {f"optimizer_args.{name}": value for name, value in arguments.items()}


def optimizer(draft: Draft, key: str, value: Any) -> None:
    name, ours = _optimizer_of(draft)
    if key != "optimizer_type" and is_off(value):
        draft.unneeded(key, "off is the default")
    elif ours is None:
        draft.unsupported(key, f"{name} is not supported; adamw is used")
        draft.report.to_fill_in.append(f"learning_rate: check it; {name} is not supported")
    else:
        draft.take(key, "optimizer", *ours)


def argument(draft: Draft, key: str, value: Any) -> None:
    """Take an argument of the optimizer that is fixed here, and perhaps otherwise there."""
    name, argument = draft.values.get("optimizer", "adamw"), key.rpartition(".")[2]
    fixed = _LIKE_HERE.get(name, {})
    text = str(value).strip().lower()
    if argument in fixed and text in (str(fixed[argument]).lower(), f"{fixed[argument]}.0"):
        draft.unneeded(key, "always so here")
        return
    draft.unsupported(key, f"{argument} is {str(fixed.get(argument, 'not set')).lower()} here")
    if argument == "relative_step":
        draft.report.to_fill_in.append("learning_rate: set it; there, adafactor finds its own")
    if argument == "adjust_lr_fn":
        draft.report.to_fill_in.append(
            "learning_rate: set adamw's; there, muon's updates are of another size"
        )


def epsilon(draft: Draft, key: str, value: Any) -> None:
    if as_number(value) is None:
        draft.unneeded(key, "the optimizer's own")
    else:
        draft.take(key, "adam_epsilon", value, "the equivalent key")


def least_rate(draft: Draft, key: str, value: Any) -> None:
    """Take a cosine that ends at a share of the rate."""
    if draft.take(key, "lr_scheduler", "cosine", "it ends at lr_end"):
        rate = draft.number("unet_lr") or draft.number("learning_rate") or 0.0
        draft.values["lr_end"] = rate * (draft.number("lr_scheduler_min_lr_ratio") or 0.0)


def warm_up(draft: Draft, key: str, value: Any) -> None:
    """Take steps, or a share of all steps."""
    text, number = str(value).strip(), as_number(value)
    share = as_number(text[:-1]) if text.endswith("%") else None
    share = share / 100 if share is not None else number if number and number < 1 else None
    steps = draft.number("max_train_steps")
    constant = draft.values.get("lr_scheduler", "constant") == "constant"
    if number == 0 or (constant and (number or share)):
        draft.unneeded(key, "a constant rate has none" if number else "off is the default")
    elif share is None:
        draft.take(key, "lr_warmup_steps", value)
    elif steps is None or not is_off(draft.get("max_train_epochs")):
        draft.unsupported(key, "a share of the steps; set lr_warmup_steps")
    else:
        draft.take(key, "lr_warmup_steps", int(share * steps), "of max_train_steps")
