"""Rules for ai-toolkit keys that need more than a rename."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import launch, models, training_keys
from jobs.imports.common.draft import as_number, is_off
from jobs.imports.common.import_report import Kind
from jobs.spec.values.resolutions import sides_of
from jobs.spec.values.spellings import as_bool

if TYPE_CHECKING:
    from jobs.imports.common.draft import Draft

_TRAINERS: Final = ("sd_trainer", "ui_trainer", "diffusion_trainer")

# Its architectures: family and flavour here.
_ARCHITECTURES: Final[dict[str, tuple[str, str | None]]] = {
    "flux": ("flux", None),
    "flex1": ("flux", None),
    "flux_kontext": ("flux", "kontext"),
    "flux2": ("flux2", "dev"),
    "flux2_klein_4b": ("flux2", "klein-base-4b"),
    "flux2_klein_9b": ("flux2", "klein-base-9b"),
    "chroma": ("chroma", None),
    "qwen_image": ("qwen_image", "base"),
    "qwen_image_edit": ("qwen_image", "edit"),
    "qwen_image_edit_plus": ("qwen_image", "edit-2509"),
    "zimage": ("z_image", None),
    "hidream": ("hidream", None),
    "lumina2": ("lumina2", None),
    "sd3": ("sd3", None),
    "sdxl": ("sdxl", None),
    **dict.fromkeys(("sd1", "sd15"), ("stable_diffusion", None)),
    "sd2": ("stable_diffusion", "2.1"),
    "pixart_sigma": ("pixart_sigma", None),
    "auraflow": ("auraflow", None),
    "wan21": ("wan", None),
    "wan21_i2v": ("wan", "2.1-i2v-14b-720p"),
    "wan22_14b": ("wan", "2.2-t2v-a14b-high"),
    "wan22_14b_i2v": ("wan", "2.2-i2v-a14b-high"),
    "wan22_5b": ("wan", "2.2-ti2v-5b"),
}
_HIGH: Final = ("2.2-t2v-a14b-high", "2.2-i2v-a14b-high")
# Older configurations say it so.
_OLDER: Final = {
    "is_flux": "flux",
    "is_v3": "sd3",
    "is_xl": "sdxl",
    "is_v2": "stable_diffusion",
    "is_pixart_sigma": "pixart_sigma",
    "is_auraflow": "auraflow",
    "is_lumina2": "lumina2",
}
SWITCHES: Final = " ".join(f"model.{name}" for name in (*_OLDER, "is_pixart", "is_ssd", "is_vega"))
_DTYPES: Final = {
    "float16": "fp16",
    "fp16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "fp32": "fp32",
}


_QTYPE: Final = "qfloat8"  # if `model.qtype` is not set


# -- model and adapter -----------------------------------------------------------------------


def process_type(draft: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() in _TRAINERS:
        draft.unneeded(key, "training is the default")
    else:
        draft.unsupported(key, "the job trains a LoRA or the full model on images and captions")
        draft.report.to_fill_in.append(f"{key}: {value} is not supported; check the job")


def quantize(draft: Draft, key: str, value: Any) -> None:
    """Whether the base is quantized; `model.qtype` says how."""
    if is_off(value) or as_bool(value) is False:
        draft.unneeded(key, "nothing is quantized by default")
        return
    training_keys.base_precision(draft, key, draft.theirs.get("model.qtype") or _QTYPE)


def quantized_type(draft: Draft, key: str, value: Any) -> None:
    """How the base is quantized, and the adapter that goes with it."""
    if "|" in str(value):
        draft.unsupported(key, "accuracy recovery adapters are not supported")
    else:
        draft.unneeded(key, "part of base_precision")


def architecture(draft: Draft, key: str, value: Any) -> None:
    word, _, tag = str(value).strip().lower().partition(":")
    family, flavour = _ARCHITECTURES.get(word, (None, None))
    if word == "wan21" and tag:
        flavour = "2.1-t2v-1.3b" if tag.startswith("1b") else "2.1-t2v-14b"
        family = None if "i2v" in tag else family
    if word == "wan21_i2v" and "480" in tag:
        flavour = "2.1-i2v-14b-480p"
    place = str(draft.theirs.get("model.name_or_path"))
    if word == "qwen_image_edit_plus" and ("2511" in tag or (not tag and "2511" in place)):
        flavour = "edit-2511"
    if word == "zimage" and tag:
        flavour = tag
    if word == "wan22_14b" and "i2v" in tag:
        flavour = "2.2-i2v-a14b-high"
    if flavour in _HIGH and is_off(draft.theirs.get("model.model_kwargs.train_high_noise", True)):
        flavour = flavour.replace("-high", "-low")
    models.set_family(draft, key, family, flavour)


def switch(draft: Draft, key: str, value: Any) -> None:
    """`is_flux: true` and its like."""
    if is_off(value):
        draft.unneeded(key, "off")
    elif draft.get("model.arch"):
        draft.unneeded(key, "set by arch")
    else:
        word = key.rpartition(".")[2]
        models.set_family(draft, key, _OLDER.get(word), "2.1" if word == "is_v2" else None)


def use_default_architecture(draft: Draft) -> None:
    """Set the family where neither `arch` nor a switch does.

    ai-toolkit assumes Stable Diffusion 1; a family in the model's name takes precedence.
    """
    settings = (draft.get("model.arch"), *(draft.on(switch) for switch in SWITCHES.split()))
    name = draft.get("model.name_or_path")
    if any(settings) or name is None:
        return
    guess = models.guess_family(draft, str(name))
    family = guess or "stable_diffusion"
    draft.values["model_family"] = family
    why = "from the model's name" if guess else "ai-toolkit's default"
    draft.assume("model.arch", why, model_family=family)
    if guess is None:
        draft.report.to_fill_in.append(f"model_family: {family} is {why}; check it")


def low_noise(draft: Draft, key: str, value: Any) -> None:
    high = draft.theirs.get("model.model_kwargs.train_high_noise", True)
    if is_off(value) or is_off(high):
        draft.unneeded(key, "model_flavour selects the expert")
    else:
        draft.unsupported(
            key, "a job trains one expert: submit it again with model_flavour: 2.2-t2v-a14b-low"
        )


def network(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if word == "lora":
        draft.take(key, "model_type", "lora", "attention and feed-forward layers, without norms")
    elif word == "lokr":
        draft.take(key, "lora_variant", "lokr", "attention and feed-forward layers, without norms")
    else:
        draft.unsupported(key, f"{word} is not supported; the job trains a peft LoRA instead")


# -- training --------------------------------------------------------------------------------


def device(draft: Draft, key: str, value: Any) -> None:
    word, _, number = str(value).strip().lower().partition(":")
    if word == "cpu":
        draft.take(key, "device", "cpu")
    elif word == "cuda" and number not in ("", "0"):
        launch.gpus(draft, key, number)
    elif word == "cuda":
        draft.unneeded(key, "the queue chooses a free GPU; gpus: [0] asks for this one")
    else:
        draft.unsupported(key, "jobs run on NVIDIA GPUs or on CPU ranks")


def parallel(draft: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() == "fsdp":
        draft.take(key, "fsdp_enable", True, "FSDP2")
    else:
        draft.unneeded(key, "strategy: auto chooses and logs why")


def fsdp(draft: Draft, key: str, value: Any) -> None:
    """Keys of its forks that shard, as far as they are called as here."""
    ours = {"fsdp_sharding": "fsdp_reshard_after_forward"}.get(key.rpartition(".")[2])
    if ours is not None:
        value = {"full": True, "shard_grad_op": False}.get(str(value).lower(), value)
        draft.take(key, ours, value, "the equivalent key")
        return
    rule = launch.RULES.get(key.rpartition(".")[2])
    if rule is None:
        draft.record(Kind.UNKNOWN, key, why="not a known key")
    else:
        rule(draft, key, value)


def accumulation(draft: Draft, key: str, value: Any) -> None:
    number = as_number(value)
    if number is not None and number < 1:
        draft.unsupported(key, "set gradient_accumulation_steps, a number of forwards")
    elif number == 1 and draft.values.get("gradient_accumulation_steps", 1) != 1:
        draft.unneeded(key, "overridden by its other key")
    else:
        draft.take(key, "gradient_accumulation_steps", value)


# The shift of its own schedulers, where training has another by default here.
_SHIFTS: Final = {"z_image": 3.0, "lumina2": 6.0, "auraflow": 3.0}
# Pixels of what it counts as tokens, where the shift follows them: single latents of two.
_TOKENS: Final = {"chroma": 8, "kontext": 8, "flux": 16, "flux2": 16}


def timesteps(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    ours = {
        "sigmoid": "logit_normal",
        "linear": "uniform",
        **dict.fromkeys(("shift", "flux_shift", "lumina2_shift"), "uniform_shift"),
    }
    if models.family_of(draft).objective != "flow":
        draft.unneeded(key, "only for flow-matching models")
    elif word in ours:
        family = models.family_of(draft).name
        kind = "kontext" if draft.values.get("model_flavour") == "kontext" else family
        if ours[word] == "uniform_shift" and kind in _TOKENS:
            draft.values["timestep_sampling"] = ours[word]
            sides = sides_of(draft.values.get("resolution") or 512)
            training_keys.take_shift_by_size(draft, key, sides, token=_TOKENS[kind])
            return
        draft.take(key, "timestep_sampling", ours[word], "the equivalent value")
        if ours[word] == "uniform_shift" and family in _SHIFTS:
            draft.values["flow_shift"] = _SHIFTS[family]
    elif word == "weighted":
        draft.take(key, "timestep_sampling", "uniform", "with loss_weighting: weighted")
        draft.values["loss_weighting"] = "weighted"
    else:
        draft.unsupported(key, "set timestep_sampling: uniform, logit_normal, shift, or another")


def rate(draft: Draft, key: str, value: Any) -> None:
    """Take the learning rate; with prodigy, that tool replaces rates below 0.1 by 1."""
    number = as_number(value)
    prodigy = str(draft.get("train.optimizer")).strip().lower().startswith("prodigy")
    if prodigy and number is not None and number < 0.1:
        draft.take(key, "learning_rate", 1.0, "that tool gives prodigy a rate of 1 instead")
    else:
        draft.take(key, "learning_rate", value)


def schedule(draft: Draft, key: str, value: Any) -> None:
    """Convert the schedule: two of torch's have other names here."""
    word = str(value).strip().lower()
    if word == "linear":
        draft.unsupported(
            key, "it rises from a third of the rate there; here the rate stays constant"
        )
    elif word == "cosine_with_restarts":
        draft.take(key, "lr_scheduler", "cosine", "that tool restarts only after the last step")
    else:
        training_keys.schedule(draft, key, value)


def warm_up(draft: Draft, key: str, value: Any) -> None:
    draft.take(key, "lr_warmup_steps", value, "steps of warm-up")
    if draft.values.get("lr_scheduler", "constant") == "constant":
        draft.values["lr_scheduler"] = "constant_with_warmup"


def first_sample(draft: Draft, key: str, value: Any) -> None:
    if draft.on("train.disable_sampling"):
        draft.unneeded(key, "train.disable_sampling is on")
    else:
        draft.take(key, "validation_on_startup", as_bool(value) is not True, "the opposite switch")


def loss(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if word == "mse":
        draft.take(key, "loss_type", "mse")
    elif word == "mae":
        training_keys.mean_absolute(draft, key)
    else:
        draft.unsupported(key, "use mse, huber or smooth_l1, on the model's prediction")


def export_dtype(draft: Draft, key: str, value: Any) -> None:
    dtype = _DTYPES.get(str(value).strip().lower())
    if dtype is None:
        draft.unsupported(key, "exports may be fp32, bf16 or fp16")
    else:
        draft.take(key, "export_dtype", dtype, "precision of exports")
