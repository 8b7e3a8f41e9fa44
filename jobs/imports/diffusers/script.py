"""Command lines of the training scripts in diffusers' `examples` folder."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import data, hub, launch, models, trackers, training_keys
from jobs.imports.common.command_line import Command, read_command, rules_of_odd
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    is_off,
    named,
    needless,
    plain,
    same,
    unless_off,
    without,
)
from jobs.imports.common.whose import hint, tool_of_command
from jobs.imports.diffusers import noise, prior

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.imports.common.draft import Rule

TITLE: Final = "a diffusers script"

# In names of scripts, the longer ones first.
_FAMILIES: Final = {
    "flux2": "flux2",
    "flux": "flux",
    "sd3": "sd3",
    "sdxl": "sdxl",
    "sd_xl": "sdxl",
    "sd15": "stable_diffusion",
    "sana": "sana",
    "lumina2": "lumina2",
    "hidream": "hidream",
    "qwen": "qwen_image",
    "z_image": "z_image",
}
# Of the oldest scripts, whose names have no family.
_OLDEST: Final = re.compile(r"train_(dreambooth|text_to_image)(_lora)?")
_OTHER_TASKS: Final = re.compile(
    r"controlnet|textual_inversion|inpaint|pix2pix|img2img|kontext|unconditional|distill|adapter|dpo|orpo"
    r"|custom_diffusion|(^|_)(control|reflow|lpl|ppo|prior|decoder|flax|edm|multispectral)(_|$)"
)
# Those that train the whole model. A script of another name without flags of a LoRA may train
# anything: a job that trains it in full by mistake would cost days.
_FULL: Final = re.compile(r"train_dreambooth(_flux|_sd3)?|train_text_to_image(_sdxl)?")
# Those that train on pairs as it is done here.
_PAIRS: Final = re.compile(r"flux_kontext|control_lora_flux|flux2(?:_klein)?_img2img")
_FLAVOURS: Final = {"flux_kontext": "kontext", "control_lora_flux": "control"}
# Those of FLUX.1 that take fewer tokens of T5 than its pipeline.
_FEW_TOKENS: Final = re.compile(r"(train_dreambooth_flux|_flux_miniature)\.py$")
_FLUX_LAYERS: Final = [
    *(f"attn.{name}" for name in models.ATTENTION + models.ADDED_ATTENTION),
    "ff.net.0.proj",
    "ff.net.2",
    *models.CONTEXT_FEED_FORWARD,
]
_QUERIES: Final = ["to_k", "to_q", "to_v"]
# `target_modules` of the scripts, by their names or families; the others have all of `ATTENTION`.
_LAYERS: Final = (
    (re.compile(r"_miniature$"), models.ATTENTION),
    (re.compile("flux_kontext"), [*_FLUX_LAYERS, "proj_mlp"]),
    (
        re.compile("flux2"),  # of single blocks, which have a list of that name elsewhere
        [*models.ATTENTION, "to_qkv_mlp_proj", r"single_transformer_blocks\.\d+\.attn\.to_out"],
    ),
    (re.compile("flux"), _FLUX_LAYERS),
    (re.compile("sd3"), [f"attn.{name}" for name in models.ATTENTION + models.ADDED_ATTENTION]),
    (re.compile("hidream"), [*_QUERIES, "to_out"]),
    (re.compile("sana"), _QUERIES),
    (re.compile("^train_dreambooth_lora$"), [*models.ATTENTION, "add_k_proj", "add_v_proj"]),
)
# Those whose alpha is 4 where it is not set; the others' is the rank.
_ALPHA: Final = re.compile(r"^train_dreambooth_lora_(flux(?!_miniature)|qwen_image|sana|z_image)")

# What the scripts use for flags that are not set, of those that decide what is trained.
_DEFAULTS: Final[dict[str, Any]] = {
    "train_batch_size": 4,
    "resolution": 512,
    "adam_weight_decay": 1e-4,
    "center_crop": False,
    "rank": 4,
}
_TEXT_TO_IMAGE: Final = {"train_batch_size": 16, "adam_weight_decay": 1e-2, "resolution": 1024}
_OF_LORAS: Final = frozenset({"rank", "lora_alpha", "lora_layers"})
# Of those that do not start at the job's own.
_CONTROL: Final = "train_control_lora_flux.py"
_RATES: Final = {"train_dreambooth.py": 5e-6, "train_dreambooth_lora.py": 5e-4, _CONTROL: 5e-6}


def read(given: Sequence[str]) -> tuple[str, Draft]:
    """Return what is imported, as a short text, and its job.

    Raises:
        UserError: There is no command, it cannot be read, it is of another tool, or nothing says
            whether it trains a LoRA.
    """
    source, command = read_command(given)
    _refuse_foreign(command)
    draft = Draft(dict(command.flags), command.folder)
    _set_script(draft, command)
    launch.read_environment(draft, command.environment)
    launch.read_flags(draft, "accelerate launch --", command.launch)
    for word in command.strays:
        draft.unreadable(word, "does not belong to any flag")
    draft.defaults = _defaults(draft, command)
    draft.apply(_RULES | rules_of_odd(command.flags, _TAKE_SEVERAL), _PREFIXES, _FIRST)
    if draft.values["model_type"] == "lora":
        draft.values["lora_init"] = "gaussian"
        draft.assume("init_lora_weights", "as the script initializes A", lora_init="gaussian")
    _warn(draft)
    return source, draft


def _refuse_foreign(command: Command) -> None:
    """Raise `UserError` for a script of another tool, whose flags mean something else."""
    if tool := tool_of_command(command):
        name = (command.script or "the command").rpartition("/")[2]
        raise UserError(f"{name} is of {tool}, not of diffusers", hint(tool))


def _set_script(draft: Draft, command: Command) -> None:
    """Set the family by the script's or model's name, and a LoRA by the script's name or flags."""
    stem = (command.script or "").rpartition("/")[2].removesuffix(".py").lower()
    is_lora = "lora" in stem or not _OF_LORAS.isdisjoint(draft.theirs)
    model = str(draft.theirs.get("pretrained_model_name_or_path", ""))
    family = next((family for word, family in _FAMILIES.items() if word in stem), None)
    family = family or models.guess_family(draft, model)
    family = family or ("stable_diffusion" if _OLDEST.fullmatch(stem) else None)
    if not (is_lora or _FULL.fullmatch(stem) or _OTHER_TASKS.search(stem)):
        what = (
            f"{stem}.py is not one of" if stem else "no script is named; a full model needs one of"
        )
        raise UserError(
            f"{what} the scripts of diffusers that train the full model",
            "for a LoRA, pass its --rank, too",
        )
    draft.values["model_type"] = "lora" if is_lora else "full"
    if command.script is None:
        draft.values |= {} if family is None else {"model_family": family}
        draft.assume("the script", "from the model's name and the flags", **draft.values)
        return
    part = Draft({"script": command.script}, draft.folder, above=draft)
    part.values = draft.values
    if pairs := _PAIRS.search(stem):
        draft.values["model_family"] = family or "flux"
        if flavour := _FLAVOURS.get(pairs[0]):
            draft.values["model_flavour"] = flavour
        draft.assume("script", "from its name and the flags", **draft.values)
    elif _OTHER_TASKS.search(stem):
        draft.values |= {} if family is None else {"model_family": family}
        part.unsupported("script", "the job trains a LoRA or the full model from text only")
        draft.report.to_fill_in.append(f"{stem}.py is not fully supported; check the job")
    elif models.set_family(part, "script", family):
        draft.assume("script", "from its name and the flags", model_type=draft.values["model_type"])


def _defaults(draft: Draft, command: Command) -> dict[str, Any]:
    """Return the script's values of flags that are not set."""
    defaults = dict(_DEFAULTS)
    family = models.family_of(draft)
    script = (command.script or "").rpartition("/")[2]
    defaults |= {"learning_rate": _RATES[script]} if script in _RATES else {}
    defaults |= _TEXT_TO_IMAGE if "text_to_image" in script else {}
    if family.name == "stable_diffusion":
        defaults |= {"resolution": 512, "adam_weight_decay": 1e-2}
    if family.objective == "flow":
        defaults["weighting_scheme"] = "logit_normal" if family.name == "sd3" else "none"
    defaults |= {"precondition_outputs": 1} if family.name == "sd3" else {}
    defaults |= {"resolution": 1024} if family.name == "sdxl" or script == _CONTROL else {}
    if family.name in ("flux", "flux2") and "klein" not in script:
        defaults["guidance_scale"] = 30.0 if models.widened_of(draft) else 3.5
    if family.name == "sd3" or _FEW_TOKENS.search(script):
        defaults["max_sequence_length"] = 77
    if draft.values["model_type"] == "lora":
        stem = script.removesuffix(".py")
        names = (stem, family.name)
        targets = (layers for of, layers in _LAYERS if any(map(of.search, names)))
        defaults["lora_layers"] = ",".join(next(targets, models.ATTENTION))
        defaults |= {"lora_alpha": 4} if _ALPHA.search(stem) else {}
        defaults |= {"text_encoder_lr": 5e-6} if "dreambooth_lora_sdxl" in script else {}
    else:
        del defaults["rank"]
    epochs = 100 if "text_to_image" in script else 1
    return defaults | ({} if draft.get("max_train_steps") else {"num_train_epochs": epochs})


def _warn(draft: Draft) -> None:
    rank = draft.number("rank")
    if draft.values["model_type"] == "lora" and rank != 4 and "lora_alpha" not in draft.theirs:
        draft.report.warnings.append(
            "lora_alpha: not set; newer scripts default to 4, older ones to the rank, and this job "
            f"to {draft.values.get('lora_alpha', 'the rank')}"
        )


def _optimizer(draft: Draft, key: str, value: Any) -> None:
    if str(value).lower() == "adamw" and draft.on("use_8bit_adam"):
        draft.take(key, "optimizer", "adamw_8bit", "use_8bit_adam is on")
    else:
        training_keys.optimizer(draft, key, value)


def _eight_bit(draft: Draft, key: str, value: Any) -> None:
    if is_off(value) or str(draft.get("optimizer") or "adamw").lower() != "adamw":
        draft.unneeded(key, "off, or for another optimizer")
    else:
        draft.take(key, "optimizer", "adamw_8bit", "8-bit AdamW from torchao")


def _rate(draft: Draft, key: str, value: Any) -> None:
    training_keys.rate(draft, key, value, scaled=draft.on("scale_lr"))


def _crop(draft: Draft, key: str, value: Any) -> None:
    how = "center" if not is_off(value) else "random"
    draft.take(key, "crop", how, f"{how} crops, to the shape of a bucket instead of a square")


def _with_widened(draft: Draft, layers: str) -> str:
    """Names of adapted layers, with commas; with that one too, as the script adds it."""
    names, widened = [layer.strip() for layer in layers.split(",")], models.widened_of(draft)
    return ",".join(names if not widened or widened in names else [*names, widened])


def _layers(draft: Draft, key: str, value: Any) -> None:
    if draft.values["model_type"] == "lora":
        value = _with_widened(draft, str(value))
        draft.take(key, "lora_target_modules", value, "suffixes of module names")
    else:
        draft.unneeded(key, "only for a LoRA")


def _prompt(draft: Draft, key: str, value: Any) -> None:
    texts = value if isinstance(value, list) else [value]
    before = [plain(prompt) for prompt in draft.values.get("validation_prompts", [])]
    draft.take(key, "validation_prompts", [*before, *map(str, texts)], "a list of them")


# -- data ------------------------------------------------------------------------------------


def _dataset(draft: Draft, key: str, value: Any) -> None:
    """Take the only dataset, with the other flags that describe it."""
    part = data.Part(draft, "", {k: v for k, v in draft.theirs.items() if k in _DATA})
    if key == "dataset_name":
        data.hub_id(part, key, value)
    elif "dataset_name" in draft.theirs:
        part.unneeded(key, "dataset_name is used")
    else:
        data.folder(part, key, value)
    if "path" in part.values:
        part.theirs = {k: v for k, v in part.theirs.items() if k in _OF_DATASET}
        part.apply(_OF_DATASET, {}, ())
        sized = "conditioning_column" in part.values and not models.widened_of(draft)
        if sized:  # there it is as large as the image it belongs to
            side = as_number(draft.get("resolution")) or _DEFAULTS["resolution"]
            draft.values["conditioning_resolution"] = int(side)
        data.settle(draft, [part])


def _with_dataset(draft: Draft, key: str, value: Any) -> None:
    """Report a flag that `_dataset` reads as unsupported if there was no dataset."""
    if not {"dataset", "datasets"} & set(draft.values):
        draft.unsupported(key, "it needs a dataset, and none could be read")


def _instance_prompt(part: Draft, key: str, value: Any) -> None:
    if part.get("caption_column"):
        part.unneeded(key, "captions are in caption_column")
    else:
        data.only_caption(part, key, value)


_OF_DATASET: Final[dict[str, Rule]] = {
    "instance_prompt": _instance_prompt,
    "repeats": same,
    "image_column": same,
    "caption_column": same,
    **all_of("cond_image_column conditioning_image_column", data.conditioning_column),
}
_FOLDERS: Final = ("dataset_name", "instance_data_dir", "train_data_dir")
_DATA: Final = (*_FOLDERS, *_OF_DATASET)

_RULES: Final[dict[str, Rule]] = {
    "pretrained_model_name_or_path": models.set_model,
    "rank": named("lora_rank"),
    **all_of("lora_alpha lora_dropout", same),
    "lora_layers": _layers,
    **dict.fromkeys(_FOLDERS, _dataset),
    **dict.fromkeys(_OF_DATASET, _with_dataset),
    "dataset_config_name": without("set dataset to the directory of this config"),
    "with_prior_preservation": prior.switch,
    **all_of("class_data_dir num_class_images", prior.part),
    "class_prompt": prior.prompt,
    "prior_loss_weight": prior.weight,
    **all_of(
        "prior_generation_precision sample_batch_size",
        needless("class images are made as samples are, one on each rank"),
    ),
    "max_train_samples": without("put the samples into a separate folder"),
    "proportion_empty_prompts": named("caption_dropout_probability"),
    "resolution": same,
    "center_crop": _crop,
    "random_flip": same,
    "aspect_ratio_buckets": needless(training_keys.BUCKETS),
    "max_sequence_length": same,
    # -- training
    **all_of(
        "train_batch_size max_train_steps gradient_accumulation_steps gradient_checkpointing "
        "max_grad_norm adam_beta1 adam_beta2 adam_epsilon use_ema checkpointing_steps "
        "checkpoints_total_limit allow_tf32 logit_std seed validation_steps",
        same,
    ),
    "num_train_epochs": training_keys.epochs,
    "learning_rate": _rate,
    "scale_lr": needless("already applied to learning_rate"),
    "adam_weight_decay": named("weight_decay"),
    "optimizer": _optimizer,
    "use_8bit_adam": _eight_bit,
    "lr_scheduler": training_keys.schedule,
    "lr_warmup_steps": training_keys.warm_up,
    **training_keys.curves(),
    "mixed_precision": training_keys.precision,
    "guidance_scale": training_keys.guidance,
    "weighting_scheme": noise.weighting,
    "logit_mean": noise.mean,
    "mode_scale": noise.mode_scale,
    "snr_gamma": training_keys.snr,
    "precondition_outputs": noise.preconditioned,
    "prediction_type": training_keys.prediction,
    "noise_offset": without(training_keys.NOISE),
    "timestep_bias_strategy": without("noise levels are drawn uniformly", "none"),
    "train_text_encoder": training_keys.text_encoders("rank"),
    "text_encoder_lr": training_keys.text_encoder_rate("train_text_encoder"),
    "train_text_encoder_ti": without(training_keys.NO_TEXT_ENCODERS),
    "do_fp8_training": unless_off("base_precision", "fp8_scaled"),
    "bnb_quantization_config_path": training_keys.bitsandbytes,
    **all_of(
        "do_edm_style_training lora_bias complex_human_instruction system_prompt",
        without(training_keys.NO_METHOD),
    ),
    "use_dora": unless_off("lora_variant", "dora"),
    "revision": hub.revision,
    **all_of("variant pretrained_vae_model_name_or_path", without(training_keys.ONE_DIRECTORY)),
    # -- output
    "output_dir": training_keys.job_name,
    "resume_from_checkpoint": without(training_keys.OTHER_CHECKPOINTS, "latest"),
    **all_of("validation_prompt validation_prompts final_validation_prompt", _prompt),
    "validation_epochs": without("set validation_steps; samples are always made at the end"),
    "num_validation_images": without("list a prompt several times with different seeds", "1"),
    "push_to_hub": hub.push,
    "hub_model_id": hub.of_push("hub_model_id"),
    "hub_private_repo": hub.of_push("hub_private_repo"),
    **trackers.RULES,
    **all_of(
        "cache_latents offload cache_dir remote_text_encoder skip_final_inference "
        "adam_weight_decay_text_encoder dataloader_num_workers local_rank "
        "upcast_before_saving enable_xformers_memory_efficient_attention set_grads_to_none "
        "image_interpolation_mode enable_npu_flash_attention debug_loss log_validation "
        "vae_encode_mode save_model_card foreach_ema",
        needless(training_keys.NO_EFFECT),
    ),
}

_PREFIXES: Final[dict[str, Rule]] = {
    "prodigy_": needless("prodigy has bias correction and safeguard_warmup on"),
    "timestep_bias_": needless("only for timestep_bias_strategy"),
}

_TAKE_SEVERAL: Final = ("validation_prompts", "report_to")
_FIRST: Final = (
    "report_to",
    "push_to_hub",
    "pretrained_model_name_or_path",
    *_FOLDERS,
    "with_prior_preservation",
    "train_batch_size",
    "lr_scheduler",
    "precondition_outputs",
)
