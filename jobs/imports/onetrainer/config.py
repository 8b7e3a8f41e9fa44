"""OneTrainer's configurations: the rules of its table that are more than a row."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import models, training_keys
from jobs.imports.common.draft import Draft, as_number, flatten, is_off, is_unset
from jobs.imports.common.places import parse
from jobs.imports.common.table import read_data, read_table, sentence, word_of
from jobs.imports.common.whose import ONETRAINER, refuse_others
from jobs.imports.onetrainer import data
from jobs.imports.onetrainer.older import migrate
from jobs.spec.families.base import FLUX_LINE
from jobs.spec.values.resolutions import sides_of

if TYPE_CHECKING:
    from pathlib import Path

TITLE: Final = ONETRAINER
DATA: Final = read_data(__file__)

_ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
_HIDREAM: Final = r"|to_[qkv]_t|to_out(?:_t)?"  # whose outputs are no lists
_LINES: Final = {
    **dict.fromkeys(("flux", "flux2", "z_image", "anima"), FLUX_LINE),
    "qwen_image": training_keys.QWEN_LINE,
    "krea2": training_keys.KREA_LINE,
}


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, is of another tool, or trains what is not trained here.
    """
    values = parse(path)
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a OneTrainer config: it has no keys")
    theirs = flatten(
        migrate({str(key): value for key, value in values.items()}), keep=("optimizer_defaults",)
    )
    method = str(theirs.get("training_method") or "FINE_TUNE").upper()
    if method not in ("LORA", "FINE_TUNE"):
        raise UserError(f"{path}: training_method {method} is not supported", "LORA, FINE_TUNE")
    draft = Draft(theirs, path.absolute().parent)
    draft.values["model_type"] = "lora" if method == "LORA" else "full"
    draft.defaults = CONFIG.defaults_of(draft)
    CONFIG.apply(draft)
    if method == "LORA" and is_unset(theirs.get("layer_filter")):
        draft.unsupported("layer_filter", sentence("every_layer"))
    family = models.family_of(draft).name
    if tokens := DATA["tokens"].get(family):
        draft.values["max_sequence_length"] = tokens
        draft.assume("text_encoder", "as many tokens", max_sequence_length=tokens)
    step = DATA["buckets"].get(family, 64)
    buckets = {"max_bucket_aspect_ratio": 4, "max_aspect_ratio": 0, "bucket_step": step}
    draft.values |= buckets
    finer = "; there, in steps of 8" if family == "stable_diffusion" else ""
    draft.assume("buckets", f"as it makes them{finer}", **buckets)
    return draft


def model(draft: Draft, key: str, value: Any) -> None:
    family, _, flavour = DATA["models"].get(word_of(value), "").partition(" ")
    models.set_family(draft, key, family or None, flavour or None)
    if flavour == "fill":
        draft.report.to_fill_in.append(
            "datasets: set conditioning_suffix: -masklabel where masks are files; images of other "
            "datasets get random masks"
        )


# -- parts of the model ------------------------------------------------------------------------


def denoiser(draft: Draft, key: str) -> bool:
    """Whether a key is of the part that is the denoiser of the model."""
    return key.startswith(_denoiser(draft))


def _denoiser(draft: Draft) -> str:
    is_unet = models.family_of(draft).name in ("stable_diffusion", "sdxl")
    return "unet" if is_unet else "transformer"


def encoder(draft: Draft, key: str) -> bool:
    """Whether a key is of a text encoder that the model has."""
    digit = key.removeprefix("text_encoder")[1:2]
    return (int(digit) if digit.isdigit() else 1) <= _encoders(draft)


def _encoders(draft: Draft) -> int:
    count: int = DATA["encoders"].get(models.family_of(draft).name, 1)
    return count


def _trains_all(draft: Draft) -> bool:
    """Whether all text encoders are trained; they are, where nothing is set."""
    return all(draft.on(f"{name}.train") for name in _ENCODERS[: _encoders(draft)])


def _trains_text(draft: Draft) -> bool:
    """Whether the job trains LoRAs on the text encoders."""
    is_lora = draft.values["model_type"] == "lora"
    return is_lora and bool(models.family_of(draft).text_lora) and _trains_all(draft)


def encoder_trains(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "off is the default")
    elif not _trains_all(draft):
        draft.unsupported(key, "text encoders are trained together, or not at all")
    else:
        training_keys.text_encoder_lora(draft, key, draft.number("lora_rank") or 16)


def encoder_rate(draft: Draft, key: str, value: Any) -> None:
    """Take the rate of the text encoders, which have one together."""
    rates = [
        as_number(draft.get("learning_rate") if is_unset(own) else own)
        for own in (draft.get(f"{name}.learning_rate") for name in _ENCODERS[: _encoders(draft)])
    ]
    if not _trains_text(draft):
        draft.unneeded(key, training_keys.NO_TEXT_ENCODERS)
        return
    if draft.values.get("text_encoder_learning_rate") is None:
        _take_rate(draft, key, "text_encoder_learning_rate", value)
    if len(set(rates)) > 1:
        why = "all text encoders have the same rate; there, learning_rate is that of one without"
        draft.unsupported(key, why)


def encoder_stops(draft: Draft, key: str, value: Any) -> None:
    """When a text encoder is no longer trained; after 30 epochs where nothing is set."""
    name = key.partition(".")[0]
    number = draft.number(f"{name}.stop_training_after") or 0
    unit = str(draft.get(f"{name}.stop_training_after_unit") or "EPOCH").upper()
    epochs = draft.number("epochs") or 0
    late = unit == "NEVER" or number == 0 or (unit == "EPOCH" and number >= epochs)
    if late or not _trains_text(draft):
        draft.unneeded(key, "they are not trained, or to the end")
    else:
        draft.unsupported(key, "text encoders are trained to the end")


def denoiser_stops(draft: Draft, key: str, value: Any) -> None:
    unit = str(draft.get(f"{key.partition('.')[0]}.stop_training_after_unit") or "NEVER").upper()
    if unit == "NEVER" or is_off(value):
        draft.unneeded(key, "it is trained to the end")
    else:
        draft.unsupported(key, "the denoiser is trained to the end: set num_train_epochs")


# -- adapter and training ----------------------------------------------------------------------


def layers(draft: Draft, key: str, value: Any) -> None:
    """Layers whose names contain one of some words, or fit one of some expressions."""
    words = [word.strip() for word in str(value).split(",") if word.strip()]
    patterns = words if draft.on("layer_filter_regex") else [f".*{re.escape(w)}" for w in words]
    if not words or any("{" in word for word in words):
        draft.unsupported(key, sentence("every_layer"))
        return
    more = _HIDREAM if models.family_of(draft).name == "hidream" else ""
    leaves = models.LINEAR + more
    both = "|".join(p if p.startswith(("^", ".*")) else f".*{p}" for p in patterns)
    draft.take(
        key,
        "lora_target_modules",
        [rf"(?=(?:{both})).*\.(?:{leaves})"],
        "linear layers whose names fit",
    )


def detail(draft: Draft, key: str, value: Any) -> None:
    """Report a setting of an optimizer that is not here: no loss where it is as here, or off."""
    name = key.rpartition(".")[2]
    usual = DATA["details"].get(name)
    prodigy = str(draft.get("optimizer.optimizer")).upper() == "PRODIGY"
    if word_of(draft.get("optimizer.optimizer")) not in DATA["optimizers"]:
        draft.unneeded(key, "of an optimizer that is not supported")
    elif prodigy and name in ("use_bias_correction", "safeguard_warmup") and is_off(value):
        draft.unsupported(key, "prodigy has bias correction and safeguard_warmup on")
    elif prodigy and name in ("use_bias_correction", "safeguard_warmup"):
        draft.unneeded(key, "always on")
    elif is_off(value) or value == usual or str(value) == str(usual):
        draft.unneeded(key, "as here")
    else:
        draft.unsupported(key, "optimizers have only betas, eps and weight decay here")


def rate(draft: Draft, key: str, value: Any) -> None:
    """Take the denoiser's rate; that of the configuration is text encoders', too."""
    part = _denoiser(draft)
    if key == "learning_rate" and not is_unset(draft.theirs.get(f"{part}.learning_rate")):
        own = any(not is_unset(draft.theirs.get(f"{name}.learning_rate")) for name in _ENCODERS)
        if _trains_text(draft) and not own:
            _take_rate(draft, key, "text_encoder_learning_rate", value)
        else:
            draft.unneeded(key, f"{part}.learning_rate is used")
        return
    _take_rate(draft, key, "learning_rate", value)
    if str(draft.get("learning_rate_scaler") or "").upper().startswith("GLOBAL"):
        draft.unsupported(key, "multiply it by the square root of the number of GPUs, too")


def _take_rate(draft: Draft, key: str, ours: str, value: Any) -> None:
    """Take a rate, multiplied as learning_rate_scaler says, which is of all parts."""
    number, word = as_number(value), str(draft.get("learning_rate_scaler") or "NONE").upper()
    factor = 1.0
    if word.endswith(("BATCH", "BOTH")):
        factor *= draft.number("batch_size") or 1
    if word.endswith(("ACCUMULATION", "BOTH")):
        factor *= draft.number("gradient_accumulation_steps") or 1
    if number is None or factor <= 0 or factor == 1:
        draft.take(key, ours, value)
    else:
        why = f"times the square root of {factor:g}, as learning_rate_scaler does"
        draft.take(key, ours, number * factor**0.5, why)


def warm_up(draft: Draft, key: str, value: Any) -> None:
    number = as_number(value)
    steps = draft.number("gradient_accumulation_steps") or 1
    if number is None or number <= 0:
        draft.take(key, "lr_warmup_steps", 0)
    elif number <= 1:
        draft.unsupported(key, "a part of all steps: set lr_warmup_steps, which counts steps")
    else:
        why = "optimizer steps" if steps > 1 else ""
        draft.take(key, "lr_warmup_steps", int(number / steps), why)


def epochs(draft: Draft, key: str, value: Any) -> None:
    """Take the epochs; in one, an image is trained at one of several resolutions there."""
    number, sides = as_number(value), draft.values.get("resolution")
    if number is not None and isinstance(sides, list):
        why = f"divided by {len(sides)}: an epoch is at each resolution here"
        draft.take(key, "num_train_epochs", number / len(sides), why)
    else:
        draft.take(key, "num_train_epochs", value)
    draft.values["max_train_steps"] = None


def decay(draft: Draft, key: str, value: Any) -> None:
    """Take the average's decay, which is of every step here."""
    number, every = as_number(value), draft.number("ema_update_step_interval") or 1
    if number is None or number <= 0 or every <= 1:
        draft.take(key, "ema_decay", value)
    else:
        each = round(number ** (1 / every), 8)
        draft.take(key, "ema_decay", each, f"of every step; there, {number:g} of {every:g} steps")


def every(draft: Draft, key: str, value: Any, *, unit: str, ours: str) -> None:
    """Take a number of steps, or of something else that another key names."""
    word = str(draft.get(unit) or "").strip().upper()
    if word == "STEP":
        draft.take(key, ours, value)
    elif word == "EPOCH":
        draft.take(key, ours, f"{value} epochs")
    elif word == "NEVER":
        draft.take(key, ours, 0, "never")
    else:
        draft.unsupported(key, f"set {ours}, which counts steps or epochs")


def destination(draft: Draft, key: str, value: Any) -> None:
    training_keys.job_name(draft, key, str(value).removesuffix(".safetensors"))


# -- noise and loss ----------------------------------------------------------------------------


def by_size(draft: Draft, key: str) -> bool:
    """Whether the shift follows the resolution, which other models ignore."""
    return draft.on("dynamic_timestep_shifting") and models.family_of(draft).name in _LINES


def _moves(draft: Draft) -> bool:
    """Whether sigma is shifted."""
    return by_size(draft, "") or (draft.number("timestep_shift") or 1) != 1


def distribution(draft: Draft, key: str, value: Any) -> None:
    """How sigma is drawn."""
    word = str(value).strip().upper()
    if models.family_of(draft).objective != "flow":
        if word == "UNIFORM":
            draft.unneeded(key, "timesteps are drawn evenly")
        else:
            draft.unsupported(key, "timesteps of such models are drawn evenly")
    elif word in ("UNIFORM", "LOGIT_NORMAL"):
        plain, moved = (
            ("uniform", "uniform_shift") if word == "UNIFORM" else ("logit_normal", "shift")
        )
        draft.take(key, "timestep_sampling", moved if _moves(draft) else plain)
        if word == "LOGIT_NORMAL":
            weight = draft.number("noising_weight") or 0
            draft.values |= {} if weight <= -1 else {"logit_std": 1 + weight}
            draft.values["logit_mean"] = draft.number("noising_bias") or 0.0
    elif word == "HEAVY_TAIL" and not _moves(draft):
        draft.take(key, "timestep_sampling", "mode")
        draft.values["mode_scale"] = draft.number("noising_weight") or 0.0
    else:
        draft.unsupported(key, "set timestep_sampling: uniform, logit_normal, shift, or another")


def dynamic_shift(draft: Draft, key: str, value: Any) -> None:
    """Take the shift at the resolution of the job."""
    sides, line = sides_of(draft.values.get("resolution") or 512), models.family_of(draft).name
    training_keys.take_shift_by_size(draft, key, sides, line=_LINES[line])


def strength(draft: Draft, key: str, value: Any, *, ours: str, end: float) -> None:
    """Take an end of what is drawn, into which the whole distribution is squeezed."""
    even = word_of(draft.get("timestep_distribution")) == "uniform" and not _moves(draft)
    if as_number(value) == end:
        draft.unneeded(key, "all noise levels are trained")
    elif even and models.family_of(draft).objective == "flow":
        draft.take(key, ours, value)
    else:
        draft.unsupported(key, f"{ours} cuts off what is drawn, and does not squeeze it")


def loss(draft: Draft, key: str, value: Any) -> None:
    """Take the strengths of losses, of which one may be other than 0."""
    names = ("mse", "mae", "log_cosh", "huber")
    strengths = {
        name: draft.number(f"{name}_strength") if f"{name}_strength" in draft.theirs else None
        for name in names
    }
    strengths["mse"] = 1.0 if strengths["mse"] is None else strengths["mse"]
    used = {name: number for name, number in strengths.items() if number}
    word = key.partition("_strength")[0]
    if word not in used:
        draft.unneeded(key, "off")
    elif len(used) > 1 or used[word] != 1 or word == "log_cosh":
        draft.unsupported(key, "one loss, of strength 1: use loss_type: mse, huber or smooth_l1")
    elif word == "mse":
        draft.take(key, "loss_type", "mse")
    elif word == "mae":
        draft.take(key, "loss_type", "smooth_l1", "the nearest, twice as large")
        draft.values |= {"huber_c": 1e-3, "huber_schedule": "constant"}
    else:
        draft.take(key, "loss_type", "huber", "the nearest, twice as large")
        draft.values["huber_schedule"] = "constant"
        draft.values["huber_c"] = draft.number("huber_delta") or 1.0


def snr(draft: Draft, key: str, value: Any) -> None:
    draft.take(key, "snr_gamma", draft.number("loss_weight_strength") or 5.0)


CONFIG: Final = read_table(__file__, "config", vars(data) | globals())
