"""Rules for OneTrainer keys that need more than a rename."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import launch, models, training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    chosen,
    is_off,
    is_unset,
    named,
    needless,
    when,
    without,
)
from jobs.imports.common.import_report import Kind
from jobs.spec.families.base import FLUX_LINE
from jobs.spec.values.resolutions import sides_of

if TYPE_CHECKING:
    from jobs.imports.common.draft import Rule

MODELS: Final[dict[str, tuple[str, str | None]]] = {
    "STABLE_DIFFUSION_15": ("stable_diffusion", None),
    **dict.fromkeys(
        ("STABLE_DIFFUSION_20", "STABLE_DIFFUSION_20_BASE", "STABLE_DIFFUSION_21_BASE"),
        ("stable_diffusion", None),
    ),
    "STABLE_DIFFUSION_21": ("stable_diffusion", "2.1"),
    "STABLE_DIFFUSION_3": ("sd3", "3-medium"),
    "STABLE_DIFFUSION_35": ("sd3", None),
    "STABLE_DIFFUSION_XL_10_BASE": ("sdxl", None),
    "PIXART_SIGMA": ("pixart_sigma", None),
    "FLUX_DEV_1": ("flux", None),
    "FLUX_2": ("flux2", None),
    "SANA": ("sana", None),
    "HUNYUAN_VIDEO": ("hunyuanvideo", None),
    "HI_DREAM_FULL": ("hidream", "full"),
    "CHROMA_1": ("chroma", None),
    "QWEN": ("qwen_image", "base"),
    "Z_IMAGE": ("z_image", None),
}
UNETS: Final = ("stable_diffusion", "sdxl")
ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
# How many of them a family has, where it is not one.
SEVERAL: Final = {"sdxl": 2, "flux": 2, "hunyuanvideo": 2, "sd3": 3, "hidream": 4}
TOKENS: Final = {"sd3": 77, "hunyuanvideo": 77, "pixart_sigma": 120}  # of all text encoders
BUCKETS: Final = {"pixart_sigma": 16, "sana": 32}  # pixels, if not 64

# Its optimizers that are here, by our tables' words; and weight decay and second beta unless set.
_OPTIMIZERS: Final = {
    **{name: name for name in ("ADAM", "ADAMW", "LION", "PRODIGY", "ADAFACTOR", "SGD")},
    **{name: name for name in ("ADAM_8BIT", "ADAMW_8BIT")},
    "LION_8BIT": "LION8BIT",
    "SCHEDULE_FREE_ADAMW": "ADAMW_SCHEDULEFREE",
}
DECAYS: Final = dict.fromkeys(("ADAMW", "ADAMW_8BIT", "SCHEDULE_FREE_ADAMW"), 1e-2)
# Details of optimizers that are as here, where they are not off.
_DETAILS: Final = {
    "d0": 1e-6,
    "d_coef": 1.0,
    "growth_rate": float("inf"),
    "eps2": 1e-3,
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "weight_lr_power": 2.0,
    "percentile_clipping": 100,
    "decouple": True,
}
HOW: Final = (
    "foreach capturable differentiable fused fused_back_pass stochastic_rounding min_8bit_size "
    "quant_block_size block_wise is_paged optim_bits compile log_every use_triton fsdp_in_use "
    "split_groups split_groups_mean factored factored_fp32 use_stableadamw d_limiter slice_p "
    "use_schedulefree rms_rescaling weight_decay_by_lr adam_w_mode bias_correction"
)

_SCHEDULES: Final = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_hard_restarts": "cosine_with_restarts",
}
_PRECISIONS: Final[training_keys.Words] = {
    "float_16": ("fp16", ""),
    "bfloat_16": ("bf16", ""),
    "float_32": ("no", ""),
    "tfloat_32": ("no", "with allow_tf32"),
}
_BASES: Final = {
    "FLOAT_8": ("fp8_scaled", ""),
    "FLOAT_W8A8": ("fp8_scaled", "with base_matmul: scaled"),
    "INT_8": ("int8", ""),
    "INT_W8A8": ("int8", "inputs of layers are not rounded"),
    "NFLOAT_4": ("nf4", ""),
}
_WHOLE: Final = ("FLOAT_16", "FLOAT_32", "BFLOAT_16", "TFLOAT_32", "NONE")
_HIDREAM: Final = r"|to_[qkv]_t|to_out(?:_t)?"  # whose outputs are no lists
NO_PART: Final = "not a part of this model"
EVERY_LAYER: Final = (
    "it adapts every layer there; here those of attention and feed-forward, or those that "
    "lora_target_modules names"
)
TIMES: Final = "set checkpointing_steps, which counts steps"
SAMPLED: Final = "set validation_steps, which counts steps"


def model(draft: Draft, key: str, value: Any) -> None:
    models.set_family(draft, key, *MODELS.get(str(value).strip().upper(), (None, None)))


def method(draft: Draft, key: str, value: Any) -> None:
    draft.take(key, "model_type", draft.values["model_type"], "LORA or FINE_TUNE")


# -- parts of the model ------------------------------------------------------------------------


def of_denoiser(part: str, rule: Rule) -> Rule:
    """Make a rule for a part that is the denoiser in some models, and missing in others."""
    return when(lambda draft: part == denoiser(draft), rule, NO_PART)


def denoiser(draft: Draft) -> str:
    """Return what it calls the denoiser."""
    return "unet" if models.family_of(draft).name in UNETS else "transformer"


def weights(draft: Draft, key: str, value: Any) -> None:
    """Take the precision of the denoiser's weights: of the frozen base, for a LoRA."""
    word = str(value).strip().upper().removesuffix("_COMPRESSED")
    if word in _WHOLE and (draft.values["model_type"] == "lora" or word.endswith("FLOAT_32")):
        draft.unneeded(key, "nothing is quantized by default")
    elif word in _WHOLE:
        draft.unsupported(key, "weights that are trained stay in fp32")
    elif (base := _BASES.get(word)) is None or draft.values["model_type"] == "full":
        draft.unsupported(key, "set base_precision: fp8_scaled, int8 or nf4, of a LoRA")
    else:
        draft.take(key, "base_precision", *base)
        if word == "FLOAT_W8A8":
            draft.values["base_matmul"] = "scaled"


def encoders(draft: Draft) -> int:
    """Return how many text encoders the model has."""
    return SEVERAL.get(models.family_of(draft).name, 1)


def encoder(number: int, rule: Rule) -> Rule:
    """Make a rule for a text encoder, which not all models have."""
    return when(lambda draft: number < encoders(draft), rule, NO_PART)


def trains_all(draft: Draft) -> bool:
    """Whether all text encoders are trained; they are, where nothing is set."""
    return all(draft.on(f"{name}.train") for name in ENCODERS[: encoders(draft)])


def trains_text(draft: Draft) -> bool:
    """Whether the job trains LoRAs on the text encoders."""
    is_lora = draft.values["model_type"] == "lora"
    return is_lora and bool(models.family_of(draft).text_lora) and trains_all(draft)


def encoder_trains(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "off is the default")
    elif not trains_all(draft):
        draft.unsupported(key, "text encoders are trained together, or not at all")
    else:
        training_keys.text_encoder_lora(draft, key, draft.number("lora_rank") or 16)


def encoder_rate(draft: Draft, key: str, value: Any) -> None:
    """Take the rate of the text encoders, which have one together."""
    rates = [
        as_number(draft.get("learning_rate") if is_unset(own) else own)
        for own in (draft.get(f"{name}.learning_rate") for name in ENCODERS[: encoders(draft)])
    ]
    if not trains_text(draft):
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
    if late or not trains_text(draft):
        draft.unneeded(key, "they are not trained, or to the end")
    else:
        draft.unsupported(key, "text encoders are trained to the end")


def denoiser_stops(draft: Draft, key: str, value: Any) -> None:
    unit = str(draft.get(f"{key.partition('.')[0]}.stop_training_after_unit") or "NEVER").upper()
    if unit == "NEVER" or is_off(value):
        draft.unneeded(key, "it is trained to the end")
    else:
        draft.unsupported(key, "the denoiser is trained to the end: set num_train_epochs")


def tokens(family: str) -> Rule:
    """Make a rule for a number of tokens, which only one family is given there."""
    return when(
        lambda draft: models.family_of(draft).name == family,
        named("max_sequence_length"),
        "not used for this model there",
    )


# -- adapter -----------------------------------------------------------------------------------


def lora(rule: Rule) -> Rule:
    """Make a rule for a key of the adapter."""
    return when(
        lambda draft: draft.values["model_type"] == "lora", rule, "only for training_method: LORA"
    )


rank: Final = when(
    lambda draft: not training_keys.is_lokr(draft), training_keys.lora_rank, "lokr_dim is used"
)


def layers(draft: Draft, key: str, value: Any) -> None:
    """Layers whose names contain one of some words, or fit one of some expressions."""
    words = [word.strip() for word in str(value).split(",") if word.strip()]
    patterns = words if draft.on("layer_filter_regex") else [f".*{re.escape(w)}" for w in words]
    if not words or any("{" in word for word in words):
        draft.unsupported(key, EVERY_LAYER)
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


# -- training ----------------------------------------------------------------------------------


def optimizer(draft: Draft, key: str, value: Any) -> None:
    training_keys.optimizer(draft, key, _OPTIMIZERS.get(str(value).strip().upper(), value))


def detail(draft: Draft, key: str, value: Any) -> None:
    """Report a setting of an optimizer that is not here: no loss where it is as here, or off."""
    name = key.rpartition(".")[2]
    usual = _DETAILS.get(name)
    prodigy = str(draft.get("optimizer.optimizer")).upper() == "PRODIGY"
    if str(draft.get("optimizer.optimizer")).upper() not in _OPTIMIZERS:
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
    part = denoiser(draft)
    if key == "learning_rate" and not is_unset(draft.theirs.get(f"{part}.learning_rate")):
        own = any(not is_unset(draft.theirs.get(f"{name}.learning_rate")) for name in ENCODERS)
        if trains_text(draft) and not own:
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


def schedule(draft: Draft, key: str, value: Any) -> None:
    """Take the schedule; warm-up is apart from it there, and of all of them."""
    word = str(value).strip().lower()
    if str(draft.get("optimizer.optimizer")).upper().startswith("SCHEDULE_FREE"):
        draft.take(key, "lr_scheduler", "constant_with_warmup", "always, of such optimizers")
    elif word in _SCHEDULES:
        draft.take(key, "lr_scheduler", _SCHEDULES[word])
    else:
        draft.values["lr_scheduler"] = "constant_with_warmup"
        draft.unsupported(key, "not supported; the rate stays constant after its warm-up")


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


cycles: Final = when(
    lambda draft: draft.values.get("lr_scheduler") == "cosine_with_restarts",
    named("lr_num_cycles"),
    "only for schedules with restarts",
)


def precision(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    chosen("mixed_precision", _PRECISIONS, "bf16 is used; others: fp16, no")(draft, key, value)
    if word == "tfloat_32":
        draft.values["allow_tf32"] = True


def epochs(draft: Draft, key: str, value: Any) -> None:
    """Take the epochs; in one, an image is trained at one of several resolutions there."""
    number, sides = as_number(value), draft.values.get("resolution")
    if number is not None and isinstance(sides, list):
        why = f"divided by {len(sides)}: an epoch is at each resolution here"
        draft.take(key, "num_train_epochs", number / len(sides), why)
    else:
        draft.take(key, "num_train_epochs", value)
    draft.values["max_train_steps"] = None


def clip(draft: Draft, key: str, value: Any) -> None:
    """Take the largest norm of gradients; 0 and null are none."""
    draft.take(key, "max_grad_norm", 0 if is_off(value) else value)


def ema(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().upper()
    if word == "OFF":
        draft.unneeded(key, "off is the default")
    else:
        draft.take(key, "use_ema", True, f"on the {word}")
        draft.values["ema_device"] = "cpu" if word == "CPU" else "accelerator"


def decay(draft: Draft, key: str, value: Any) -> None:
    """Take the average's decay, which is of every step here."""
    number, every = as_number(value), draft.number("ema_update_step_interval") or 1
    if number is None or number <= 0 or every <= 1:
        draft.take(key, "ema_decay", value)
    else:
        each = round(number ** (1 / every), 8)
        draft.take(key, "ema_decay", each, f"of every step; there, {number:g} of {every:g} steps")


def of_ema(rule: Rule) -> Rule:
    """Make a rule for a key of the average."""
    return when(lambda draft: draft.values.get("use_ema"), rule, "ema is off")


def every(unit: str, ours: str, why: str) -> Rule:
    """Make a rule for a number of steps, or of something else that another key names."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        word = str(draft.get(unit) or "").strip().upper()
        if word == "STEP":
            draft.take(key, ours, value)
        elif word == "NEVER":
            draft.take(key, ours, 0, "never")
        else:
            draft.unsupported(key, why)

    return rule


def destination(draft: Draft, key: str, value: Any) -> None:
    training_keys.job_name(draft, key, str(value).removesuffix(".safetensors"))


kept: Final = when(
    lambda draft: draft.on("rolling_backup"),
    named("checkpoints_total_limit"),
    "rolling_backup is off",
)


def devices(draft: Draft, key: str, value: Any) -> None:
    if not draft.on("multi_gpu"):
        draft.unneeded(key, "multi_gpu is off")
    elif is_unset(value):
        draft.unneeded(key, "gpus: N uses any N free GPUs")
    else:
        launch.gpus(draft, key, value)


def several_gpus(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "off is the default")
    elif is_unset(draft.theirs.get("device_indexes")):
        draft.unsupported(key, "set gpus to the number of GPUs")
    else:
        draft.record(Kind.TRANSLATED, key, why="device_indexes says which")


# -- noise and loss ----------------------------------------------------------------------------

# Models whose shift may follow the resolution; the others ignore it.
_LINES: Final = {
    **dict.fromkeys(("flux", "flux2", "z_image"), FLUX_LINE),
    "qwen_image": training_keys.QWEN_LINE,
}


def _moves(draft: Draft) -> bool:
    """Whether sigma is shifted."""
    dynamic = draft.on("dynamic_timestep_shifting") and models.family_of(draft).name in _LINES
    return dynamic or (draft.number("timestep_shift") or 1) != 1


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


def shift(draft: Draft, key: str, value: Any) -> None:
    """Take the shift of sigma; one by resolution is used instead, in models that have one."""
    dynamic = draft.on("dynamic_timestep_shifting") and models.family_of(draft).name in _LINES
    if as_number(value) == 1 or dynamic:
        draft.unneeded(key, "no shift, or one by resolution")
    elif models.family_of(draft).objective != "flow":
        draft.unsupported(key, "timesteps of such models are drawn evenly")
    else:
        draft.take(key, "flow_shift", value)


def dynamic_shift(draft: Draft, key: str, value: Any) -> None:
    name = models.family_of(draft).name
    if is_off(value) or name not in _LINES:
        draft.unneeded(key, "off, or ignored for this model there")
        return
    training_keys.take_shift_by_size(
        draft, key, sides_of(draft.values.get("resolution") or 512), line=_LINES[name]
    )


def strength(ours: str, end: float) -> Rule:
    """Make a rule for an end of what is drawn, into which the whole distribution is squeezed."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        even = str(draft.get("timestep_distribution")).upper() == "UNIFORM" and not _moves(draft)
        if as_number(value) == end:
            draft.unneeded(key, "all noise levels are trained")
        elif even and models.family_of(draft).objective == "flow":
            draft.take(key, ours, value)
        else:
            draft.unsupported(key, f"{ours} cuts off what is drawn, and does not squeeze it")

    return rule


_SQUARE: Final = "use loss_type: mse, huber or smooth_l1"


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
        draft.unsupported(key, f"one loss, of strength 1: {_SQUARE}")
    elif word == "mse":
        draft.take(key, "loss_type", "mse")
    elif word == "mae":
        training_keys.mean_absolute(draft, key)
    else:
        draft.take(key, "loss_type", "huber", "the nearest, twice as large")
        draft.values["huber_schedule"] = "constant"
        draft.values["huber_c"] = draft.number("huber_delta") or 1.0


def weight(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().upper()
    if word == "CONSTANT":
        draft.unneeded(key, "all noise levels weigh the same")
    elif word == "MIN_SNR_GAMMA" and models.family_of(draft).objective != "flow":
        draft.take(key, "snr_gamma", draft.number("loss_weight_strength") or 5.0)
    else:
        draft.unsupported(key, "set snr_gamma, or loss_weighting")


epsilon: Final = when(
    lambda draft: (
        str(draft.get("optimizer.optimizer")).upper()
        not in ("ADAFACTOR", "LION", "LION_8BIT", "SGD")
    ),
    named("adam_epsilon"),
    "not used by this optimizer here",
)


NOISE: Final[dict[str, Rule]] = {
    "timestep_distribution": distribution,
    "timestep_shift": shift,
    "dynamic_timestep_shifting": dynamic_shift,
    "min_noising_strength": strength("sigma_min", 0),
    "max_noising_strength": strength("sigma_max", 1),
    **all_of("mse_strength mae_strength log_cosh_strength huber_strength", loss),
    **all_of(
        "huber_delta vb_loss_strength noising_weight noising_bias loss_weight_strength "
        "generalized_offset_noise",
        needless("part of another key"),
    ),
    "loss_weight_fn": weight,
    **all_of(
        "offset_noise_weight perturbation_noise_weight",
        without(training_keys.NOISE),
    ),
    "rescale_noise_scheduler_to_zero_terminal_snr": without(
        "change the model's scheduler_config.json"
    ),
    "force_v_prediction": without("set prediction_type in the model's scheduler_config.json"),
    "force_epsilon_prediction": without("set prediction_type in the model's scheduler_config.json"),
}
