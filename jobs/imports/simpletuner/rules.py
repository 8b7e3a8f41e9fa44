"""Rules for SimpleTuner keys that need more than a rename."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import models, training_keys
from jobs.imports.common.draft import Draft, as_number, is_off, named, plain, when, without
from jobs.imports.common.import_report import Kind
from jobs.imports.common.places import read_beside
from jobs.spec.families.base import FLUX_LINE
from jobs.spec.rules.launch_conflicts import kernel_conflict
from jobs.spec.values.resolutions import sides_of
from jobs.spec.values.spellings import as_bool

if TYPE_CHECKING:
    from jobs.imports.common.draft import Rule

_FLUX_TARGETS: Final[dict[str, list[str] | None]] = {
    "mmdit": models.ATTENTION,
    "context": models.ADDED_ATTENTION,
    "context+ffs": models.ADDED_ATTENTION + models.CONTEXT_FEED_FORWARD,
    "all": models.ATTENTION + models.ADDED_ATTENTION,
    "all+ffs": None,  # as the family's own here
}
# Layers of other families, which the tool takes whatever the word.
_TARGETS: Final[dict[str, list[str]]] = {
    "flux2": [*(f"attn.{name}" for name in models.ATTENTION), "attn.to_qkv_mlp_proj"],
    "auraflow": models.ATTENTION + models.ADDED_ATTENTION,
    "hunyuanvideo15": models.ATTENTION + models.ADDED_ATTENTION,
}

_KERNELS: Final[training_keys.Words] = {
    "diffusers": ("auto", ""),
    "xformers": ("efficient", "torch's kernel for the same method"),
    "cudnn": ("cudnn", ""),
    **{f"native_{name}": (name, "") for name in ("flash", "efficient", "math")},
    **dict.fromkeys(("flash_attn", "flash_attn_2"), ("flash", "torch's own")),
    "flash_attn_3": ("flash3", ""),
}


def kernel(draft: Draft, key: str, value: Any) -> None:
    """Take the attention kernel; torch chooses one if the model cannot use it here."""
    ours, why = _KERNELS.get(str(value).strip().lower().replace("-", "_"), ("", ""))
    batch, family = int(draft.number("train_batch_size") or 1), models.family_of(draft)
    if not ours:
        draft.unsupported(key, "torch's kernels are used; others: flash, cudnn")
    elif conflict := kernel_conflict(family, ours, batch, samples=True):
        draft.unneeded(key, conflict.text)
    else:
        draft.take(key, "attention_backend", ours, why)


def vae(draft: Draft, key: str, value: Any) -> None:
    """Another VAE, which is by default that of SDXL for all models."""
    families = ("sdxl", "pixart_sigma")
    if "sdxl" in str(value) and draft.values.get("model_family") not in families:
        draft.unneeded(key, "that tool ignores a VAE of SDXL for other families")
    else:
        draft.unsupported(key, training_keys.ONE_DIRECTORY)


def lora_type(draft: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() == "standard":
        draft.unneeded(key, "a peft LoRA is the default")
    elif draft.get("lycoris_config"):
        draft.unneeded(key, "lycoris_config says which adapter")
    else:
        draft.unsupported(key, "of LyCORIS, only LoKr is supported; set lora_variant: lokr")


def unless_lycoris(rule: Rule) -> Rule:
    """Make a rule for a key that the tool ignores if LyCORIS has its own file."""
    return when(
        lambda draft: not (_is_lycoris(draft) and draft.get("lycoris_config")),
        rule,
        "lycoris_config is used",
    )


def _is_lycoris(draft: Draft) -> bool:
    return str(draft.get("lora_type")).strip().lower() == "lycoris"


def lycoris(draft: Draft, key: str, value: Any) -> None:
    """Read the file that says which of LyCORIS's adapters is trained."""
    if not _is_lycoris(draft):
        draft.unneeded(key, "only for LyCORIS")
        return
    file = read_beside(draft, key, value, dict, "set lora_variant: lokr if it is a LoKr")
    if file is None:
        return
    path, theirs = file
    draft.record(Kind.TRANSLATED, key, why=f"the keys of {path.name}")
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


_LYCORIS: Final[dict[str, Rule]] = {
    "algo": _algo,
    "linear_dim": training_keys.lora_rank,
    "linear_alpha": named("lora_alpha"),
    "factor": training_keys.of_lokr("lokr_factor"),
    "full_matrix": training_keys.of_lokr("lokr_full_matrix"),
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
    word, name = str(value).strip().lower(), models.family_of(draft).name
    if name != "flux":
        targets = _TARGETS.get(name, models.ATTENTION)
        draft.take(key, "lora_target_modules", targets, "the layers that it adapts in this family")
    elif word not in _FLUX_TARGETS:
        draft.unsupported(key, "set lora_target_modules; the family's are used")
    elif (modules := _FLUX_TARGETS[word]) is None:
        draft.unneeded(key, "the family's default also adapts attention and feed-forward layers")
    else:
        draft.take(key, "lora_target_modules", modules, "attention layers only, as in SimpleTuner")


def steps(draft: Draft, key: str, value: Any) -> None:
    if is_off(value):
        draft.unneeded(key, "num_train_epochs is used")
    else:
        draft.take(key, "max_train_steps", value)


def huber(draft: Draft, key: str, value: Any) -> None:
    """How `huber_c` follows the noise level."""
    word = str(value).strip().lower()
    if str(draft.get("loss_type")).strip().lower() not in ("huber", "smooth_l1"):
        draft.unneeded(key, "only for the losses huber and smooth_l1")
    elif word == "snr" and models.family_of(draft).objective == "flow":
        # It reads the share of noise as that of the data there.
        draft.values["huber_schedule"] = "constant"
        draft.unsupported(key, "there, huber_c rises with the noise; it is constant here")
    else:
        draft.take(key, "huber_schedule", value)


def clip(draft: Draft, key: str, value: Any) -> None:
    by_norm = str(draft.get("grad_clip_method") or "value").strip().lower() == "norm"
    draft.take(key, "max_grad_norm", value, "" if by_norm else "by norm, not by value")


def clip_method(draft: Draft, key: str, value: Any) -> None:
    if str(value).strip().lower() == "norm":
        draft.unneeded(key, "gradients are clipped by norm")
    else:
        draft.unsupported(key, "gradients are clipped by norm, not by value")


# Of Wan 2.2's flavours, which set it over the configuration's.
_FORCED_SHIFT: Final = 5.0
_FORCED: Final = ("i2v-14b-2.2-", "flf2v-14b-2.2-")


def _is_forced(draft: Draft) -> bool:
    """Whether the flavour decides the shift."""
    return str(draft.get("model_flavour")).strip().lower().startswith(_FORCED)


def unless_sana(rule: Rule) -> Rule:
    """Make a rule for a key of sigma sampling, which the tool ignores for Sana."""
    return when(
        lambda draft: models.family_of(draft).name != "sana", rule, "ignored for Sana there"
    )


def shift(draft: Draft, key: str, value: Any) -> None:
    """Take the shift of sigma, which in that tool also applies to the uniform schedule."""
    if models.family_of(draft).objective != "flow":
        draft.unneeded(key, "only for flow-matching models")
    elif models.family_of(draft).name == "sana":
        draft.take(key, "timestep_sampling", "uniform", "ignored for Sana there, drawn evenly")
    elif _is_forced(draft):
        draft.take(key, "flow_shift", _FORCED_SHIFT, "the flavour's, whatever is set")
        if not draft.on("flow_use_uniform_schedule"):
            draft.values["timestep_sampling"] = "shift"
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


_LINES: Final = {"qwen_image": training_keys.QWEN_LINE}


def auto_shift(draft: Draft, key: str, value: Any) -> None:
    """Take the shift by resolution, as the tool counts tokens: of 2x2 latents in all families."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
        return
    if _is_forced(draft):
        draft.unneeded(key, "the flavour sets its own shift")
        return
    even = draft.on("flow_use_uniform_schedule")
    draft.values["timestep_sampling"] = "uniform_shift" if even else "shift"
    if models.family_of(draft).frame_step:
        draft.unsupported(key, "set flow_shift; the shift does not follow the frames here")
        return
    sides, name = sides_of(draft.values.get("resolution") or 1024), models.family_of(draft).name
    token = 2 * training_keys.FLUX_TOKEN if name == "flux2" else training_keys.FLUX_TOKEN
    line = _LINES.get(name, FLUX_LINE)
    training_keys.take_shift_by_size(draft, key, sides, token=token, line=line)


def uniform(draft: Draft, key: str, value: Any) -> None:
    """Every sigma as often, before the shift."""
    if is_off(value):
        draft.unneeded(key, "off is the default")
        return
    shift = draft.number("flow_schedule_shift")
    auto = draft.on("flow_schedule_auto_shift")
    shifted = auto or shift not in (None, 0, 1) or _is_forced(draft)
    how = "uniform_shift" if shifted else "uniform"
    draft.take(key, "timestep_sampling", how, "drawn evenly, then shifted" if shifted else "")


def ema_validation(draft: Draft, key: str, value: Any) -> None:
    """Which weights samples are made with."""
    if not draft.on("use_ema") or str(value).strip().lower() == "ema_only":
        draft.unneeded(key, "samples use the average where there is one")
    else:
        draft.unsupported(key, "samples use the average")


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
    """Read a file with prompts by short names."""
    file = read_beside(draft, key, value, dict, "list the prompts as validation_prompts")
    if file is None:
        return
    path, content = file
    prompts = [
        entry.get("prompt") if isinstance(entry, dict) else entry for entry in content.values()
    ]
    texts = [text for text in prompts if isinstance(text, str) and text.strip()]
    if draft.on("validation_disable"):
        draft.unneeded(key, "validation_disable is on")
    else:
        what = f"{len(texts)} prompts of {path.name}"
        if others := len(prompts) - len(texts):
            what += f"; {others} of its entries are no prompts"
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
