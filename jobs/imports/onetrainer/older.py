"""Older configurations of OneTrainer, as the tool itself migrates them."""

from __future__ import annotations

import re
from typing import Any, Final

from jobs.imports.common.draft import as_number

_OLDER: Final = {
    "save_after": "save_every",
    "save_after_unit": "save_every_unit",
    "lora_layers": "layer_filter",
    "lora_layer_preset": "layer_filter_preset",
    "lora_layers_regex": "layer_filter_regex",
    "enable_async_offloading": "async_offloading",
}
_OLDER_PART: Final = re.compile(
    r"(?:(?P<train>train)_)?(?P<part>unet|prior|text_encoder(?:_2)?|vae)"
    r"(?:_(?P<name>learning_rate|weight_dtype|model_name|epochs))?"
)
_DENOISERS: Final = ("unet", "prior", "transformer")


def migrate(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys that the newest version has, as the tool migrates it."""
    new: dict[str, Any] = {}
    for key, value in values.items():
        match = _OLDER_PART.fullmatch(key)
        if key == "optimizer" and not isinstance(value, dict):
            _put(new, "optimizer", "optimizer", value)
        elif key.startswith("optimizer_") and key != "optimizer_defaults":
            _put(new, "optimizer", key.removeprefix("optimizer_"), value)
        elif match and not isinstance(value, dict) and (match["train"] or match["name"]):
            if match["name"] == "epochs":
                _put(new, match["part"], "stop_training_after", value)
                _put(new, match["part"], "stop_training_after_unit", "EPOCH")
            else:
                _put(new, match["part"], match["name"] or "train", value)
        elif isinstance(value, dict) and isinstance(new.get(_OLDER.get(key, key)), dict):
            new[_OLDER.get(key, key)] |= value
        else:
            new[_OLDER.get(key, key)] = dict(value) if isinstance(value, dict) else value
    _migrate_noise(new, values)
    if isinstance(new.get("prior"), dict) and "transformer" not in new:
        new["transformer"] = new.pop("prior")
    checkpointing = new.pop("gradient_checkpointing", None)
    if checkpointing is not None:
        on = str(checkpointing).upper() not in ("OFF", "FALSE")
        for part in _DENOISERS:
            if part in new or part == "transformer":
                _put(new, part, "gradient_checkpointing", on)
    offloaded = str(checkpointing).upper() == "CPU_OFFLOADED"
    for old, name in (
        ("layer_offload_fraction", "offload_fraction"),
        ("enable_activation_offloading", "activation_offloading"),
    ):
        if (value := new.pop(old, None)) is not None and offloaded:
            for part in [part for part in _DENOISERS if part in new]:
                _put(new, part, name, value)
    for part in [part for part in (*_DENOISERS, "text_encoder", "text_encoder_2") if part in new]:
        if isinstance(new[part], dict) and new[part].get("weight_dtype") == "NONE":
            new[part]["weight_dtype"] = values.get("weight_dtype", "FLOAT_32")
    return new


def _migrate_noise(new: dict[str, Any], values: dict[str, Any]) -> None:
    if (gamma := new.pop("min_snr_gamma", None)) and "loss_weight_fn" not in new:
        new |= {"loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": gamma}
    if "timestep_distribution" not in values and as_number(values.get("noising_weight")):
        new["timestep_distribution"] = "SIGMOID"


def _put(values: dict[str, Any], part: str, key: str, value: Any) -> None:
    inner = values.setdefault(part, {})
    if isinstance(inner, dict):
        inner[key] = value
    else:  # a file that says both
        values[part] = {key: value}
