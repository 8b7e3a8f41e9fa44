"""What becomes of those of SimpleTuner's keys that need more than a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, models, training_keys
from jobs.imports.common.draft import Draft, as_number, is_off, named, plain, without
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import find_beside, parse
from jobs.spec.families import FAMILIES
from jobs.spec.values.spellings import as_bool, normal_key

if TYPE_CHECKING:
    from jobs.imports.common.draft import Rule

# Names of published models there and here.
_FLAVOURS: Final = {
    "auraflow": {"v0.3": "v0.3", "v0.2": "v0.2"},
    "chroma": {"base": "base", "hd": "hd"},
    "flux": {name: name for name in ("dev", "schnell", "krea", "kontext")},
    "flux2": {"dev": "dev", "klein-4b": "klein-base-4b", "klein-9b": "klein-base-9b"},
    "hidream": {name: name for name in ("full", "dev", "fast")},
    "ltxvideo": {"0.9.0": "2b-0.9"},
    "pixart_sigma": {"600M-512": "512", "600M-1024": "1024"},
    "qwen_image": {"v1.0": "base", "edit-v1": "edit", "edit-v2": "edit-2509"},
    "sd3": {"medium": "3.5-medium", "large": "3.5-large"},
    "sdxl": {"base-1.0": "base-1.0"},
    "stable_diffusion": {"1.5": "1.5", "2.1": "2.1"},
    "wan": {
        "t2v-480p-1.3b-2.1": "2.1-t2v-1.3b",
        "t2v-480p-14b-2.1": "2.1-t2v-14b",
        "i2v-14b-2.1": "2.1-i2v-14b-480p",
        "i2v-14b-2.1-720p": "2.1-i2v-14b-720p",
        "i2v-14b-2.2-high": "2.2-i2v-a14b-high",
        "i2v-14b-2.2-low": "2.2-i2v-a14b-low",
        "ti2v-5b-2.2": "2.2-ti2v-5b",
    },
    "z_image": {"base": "base", "turbo": "turbo", "turbo-ostris-v2": "turbo"},
}

# What it takes where no flavour is named; some of its defaults are no models that are here.
_USUAL: Final = {
    "auraflow": "v0.3",
    "chroma": "base",
    "flux": "dev",
    "flux2": "klein-9b",
    "hidream": "dev",
    "qwen_image": "v1.0",
    "sd3": "medium",
    "sdxl": "base-1.0",
    "wan": "t2v-480p-1.3b-2.1",
    "z_image": "turbo",
}

_OTHER_NAMES: Final = {"sd1x": "stable_diffusion", "sd2x": "stable_diffusion"}

_FLUX_TARGETS: Final[dict[str, list[str] | None]] = {
    "mmdit": models.ATTENTION,
    "context": models.ADDED_ATTENTION,
    "context+ffs": models.ADDED_ATTENTION + models.CONTEXT_FEED_FORWARD,
    "all": models.ATTENTION + models.ADDED_ATTENTION,
    "all+ffs": None,  # as the family's own here
}

KERNELS: Final[training_keys.Words] = {
    "diffusers": ("auto", ""),
    "xformers": ("efficient", "torch's kernel for the same method"),
    "cudnn": ("cudnn", ""),
    **{f"native_{name}": (name, "") for name in ("flash", "efficient", "math")},
    **dict.fromkeys(("flash_attn", "flash_attn_2"), ("flash", "torch's own")),
    "flash_attn_3": ("flash3", ""),
}


def family(draft: Draft, key: str, value: Any) -> None:
    word = normal_key(str(value))
    word = _OTHER_NAMES.get(word, word)
    models.set_family(draft, key, word if word in FAMILIES else None)


def flavour(draft: Draft, key: str, value: Any) -> None:
    family = draft.values.get("model_family", "")
    flavour = _FLAVOURS.get(family, {}).get(str(value).strip())
    if flavour is None and str(value).strip() in getattr(FAMILIES.get(family), "flavours", {}):
        flavour = str(value).strip()
    if flavour is None:
        draft.unsupported(key, "not a published model here; `fsdp-tui families` lists them")
    else:
        draft.take(key, "model_flavour", flavour, "" if flavour == value else "its name here")


def use_published(draft: Draft) -> None:
    """Where no model is named, the tool takes the published one of the flavour."""
    name, key = draft.values.get("model_family"), "pretrained_model_name_or_path"
    unknown = draft.get("model_flavour") is not None and "model_flavour" not in draft.values
    if name is None or draft.get(key) is not None or unknown:
        return
    if draft.get("model_flavour") is None:
        if name not in _USUAL:
            return
        usual = _FLAVOURS[name][_USUAL[name]]
        draft.values["model_flavour"] = usual
        draft.assume("model_flavour", "", model_flavour=usual)
    hub_id = FAMILIES[name].flavours[draft.values["model_flavour"]].hub_id
    draft.values[key] = hub_id
    draft.assume(key, "the flavour's published model", **{key: hub_id})


def lora_type(draft: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() == "standard":
        draft.unneeded(key, "a peft LoRA is the default")
    elif draft.get("lycoris_config"):
        draft.unneeded(key, "lycoris_config says which adapter")
    else:
        draft.unsupported(key, "of LyCORIS, only LoKr is supported; set lora_variant: lokr")


def lycoris(draft: Draft, key: str, value: Any) -> None:
    """A file that says which of LyCORIS's adapters is trained."""
    if str(draft.get("lora_type")).strip().lower() != "lycoris":
        draft.unneeded(key, "only for LyCORIS")
        return
    path = find_beside(draft.folder, str(value), by_name=True)
    try:
        theirs = None if path is None else parse(path)
    except UserError as error:
        draft.unreadable(key, str(error))
        return
    if not isinstance(theirs, dict):
        draft.unreadable(key, "no such LyCORIS file; set lora_variant: lokr if it is a LoKr")
        return
    draft.record(Kind.TRANSLATED, key, why=f"the keys of {path.name if path else value}")
    part = Draft(theirs, draft.folder, prefix=f"{key}.", above=draft)
    part.apply(_LYCORIS, {}, ["algo", "full_matrix"])
    draft.values |= part.values


def _algo(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if word == "lokr":
        draft.take(key, "lora_variant", "lokr")
    elif word in ("lora", "locon"):
        draft.unneeded(key, "a peft LoRA is the default")
    else:
        draft.unsupported(key, f"{word} is not supported; the job trains a peft LoRA instead")


def _dim(draft: Draft, key: str, value: Any) -> None:
    large = (draft.number(key) or 0) > training_keys.LARGEST_RANK
    if draft.values.get("lora_variant") == "lokr" and (large or draft.on("full_matrix")):
        draft.take(key, "lokr_full_matrix", True, "a rank that parts no matrix")
    else:
        draft.take(key, "lora_rank", value, "the equivalent key")


def _of_lokr(ours: str) -> Rule:
    """A key that only LoKr has."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if draft.values.get("lora_variant") == "lokr":
            draft.take(key, ours, value, "the equivalent key")
        else:
            draft.unneeded(key, "only for LoKr")

    return rule


_LYCORIS: Final[dict[str, Rule]] = {
    "algo": _algo,
    "linear_dim": _dim,
    "linear_alpha": named("lora_alpha"),
    "factor": _of_lokr("lokr_factor"),
    "full_matrix": _of_lokr("lokr_full_matrix"),
    "multiplier": without("the adapter is trained at full strength", "1"),
    "decompose_both": without("only the second matrix is parted"),
    "use_scalar": without("the adapter has no strength of its own"),
    "apply_preset": without("set lora_target_modules: suffixes of module names"),
}


def lora_format(draft: Draft, key: str, value: Any) -> None:
    """Names of tensors in exports; SimpleTuner's own words for them."""
    if str(value).strip().lower() == "comfyui":
        draft.take(key, "export_formats", ["comfyui"], "key names of exports")
    else:
        draft.take(key, "export_formats", value, "key names of exports")


def target(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if word not in _FLUX_TARGETS:
        draft.unsupported(key, "set lora_target_modules; the family's are used")
    elif (modules := _FLUX_TARGETS[word]) is None:
        draft.unneeded(key, "the family's default also adapts attention and feed-forward layers")
    else:
        flux = draft.values.get("model_family", "flux") == "flux"
        targets = modules if flux else models.ATTENTION
        draft.take(key, "lora_target_modules", targets, "attention layers only, as in SimpleTuner")


def steps(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "num_train_epochs is used")
    else:
        draft.take(key, "max_train_steps", value)


def epochs(draft: Draft, key: str, value: Any) -> None:
    """Epochs, once the datasets are known."""
    if is_off(value) or not is_off(draft.get("max_train_steps")):
        draft.unneeded(key, "max_train_steps is used")
    else:
        training_keys.epochs(draft, key, value, data.count_samples(draft))


def rate(draft: Draft, key: str, value: Any) -> None:
    training_keys.rate(
        draft,
        key,
        value,
        scaled=draft.on("lr_scale") or draft.on("lr_scale_sqrt"),
        root=draft.on("lr_scale_sqrt"),
    )


def clip(draft: Draft, key: str, value: Any) -> None:
    by_norm = str(draft.get("grad_clip_method") or "value").strip().lower() == "norm"
    draft.take(key, "max_grad_norm", value, "" if by_norm else "by norm, not by value")


def clip_method(draft: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() == "norm":
        draft.unneeded(key, "gradients are clipped by norm")
    else:
        draft.unsupported(key, "gradients are clipped by norm, not by value")


def shift(draft: Draft, key: str, value: Any) -> None:
    """The shift of sigma, which also applies to the uniform schedule there."""
    if models.family_of(draft).objective != "flow":
        draft.unneeded(key, "only for flow-matching models")
    elif draft.on("flow_schedule_auto_shift"):
        draft.unneeded(key, "flow_schedule_auto_shift is used")
    elif draft.on("flow_use_uniform_schedule"):
        if is_off(value) or as_number(value) == 1:
            draft.unneeded(key, "no shift")
        else:
            draft.take(key, "flow_shift", value, "of a uniform sigma")
    elif is_off(value) or as_number(value) == 1:
        draft.take(key, "timestep_sampling", "logit_normal", "no shift")
    elif draft.take(key, "flow_shift", value, "of a logit-normal sigma"):
        draft.values["timestep_sampling"] = "shift"


def auto_shift(draft: Draft, key: str, value: Any) -> None:
    """The shift by resolution, which is the family's own here."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
    elif draft.on("flow_use_uniform_schedule"):
        draft.unneeded(key, "timestep_sampling: uniform_shift is by resolution")
    else:
        draft.take(key, "timestep_sampling", "shift", "by resolution")


def uniform(draft: Draft, key: str, value: Any) -> None:
    """Every sigma as often, before the shift."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
        return
    shift = draft.number("flow_schedule_shift")
    shifted = draft.on("flow_schedule_auto_shift") or shift not in (None, 0, 1)
    how = "uniform_shift" if shifted else "uniform"
    draft.take(key, "timestep_sampling", how, "drawn evenly, then shifted" if shifted else "")


def ema_device(draft: Draft, key: str, value: Any) -> None:
    if not draft.on("use_ema"):
        draft.unneeded(key, "use_ema is off")
    elif draft.on("fsdp_enable"):
        draft.unneeded(key, "with FSDP the average is sharded like the weights")
    else:
        draft.take(key, "ema_device", value)


def trained_guidance(draft: Draft, key: str, value: Any) -> None:
    if str(draft.get("flux_guidance_mode") or "constant").lower() == "constant":
        draft.take(key, "train_guidance", value, "the model's guidance input")
    else:
        draft.unneeded(key, "flux_guidance_mode is different")


# -- samples ---------------------------------------------------------------------------------


def prompt(draft: Draft, key: str, value: Any) -> None:
    if draft.on("validation_disable"):
        draft.unneeded(key, "validation_disable is on")
    else:
        # A list, so that commas in it are none between prompts.
        draft.take(key, "validation_prompts", [*_prompts(draft), str(value)], "a list of one")


def library(draft: Draft, key: str, value: Any) -> None:
    """A file with prompts by short names."""
    path = find_beside(draft.folder, str(value), by_name=True)
    try:
        content = None if path is None else parse(path)
    except UserError as error:
        draft.unreadable(key, str(error))
        return
    if not isinstance(content, dict):
        draft.unreadable(key, "no such prompt file; list the prompts as validation_prompts")
        return
    prompts = [
        entry.get("prompt") if isinstance(entry, dict) else entry for entry in content.values()
    ]
    texts = [str(text) for text in prompts if text]
    if draft.on("validation_disable"):
        draft.unneeded(key, "validation_disable is on")
    else:
        what = f"{len(texts)} prompts of {path.name if path else ''}"
        draft.take(key, "validation_prompts", [*_prompts(draft), *texts], what)


def _prompts(draft: Draft) -> list[Any]:
    return [plain(entry) for entry in draft.values.get("validation_prompts", [])]


def negative(draft: Draft, key: str, value: Any) -> None:
    real = draft.number("validation_guidance_real") or 1
    if models.takes_negatives(draft) or real > 1:
        draft.take(key, "validation_negative_prompt", value)
    else:
        draft.unneeded(
            key, "no effect with guidance-distilled models without guidance_real above 1"
        )


def disabled(draft: Draft, key: str, value: Any) -> None:
    if as_bool(value) is True:
        draft.record(Kind.TRANSLATED, key, why="no validation_prompts")
    else:
        draft.unneeded(key, "off is the default")
