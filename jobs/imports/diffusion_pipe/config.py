"""diffusion-pipe's TOML, a rule for each key; its dataset file is in `data`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import models, trackers, training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    chosen,
    flatten,
    is_off,
    is_unset,
    named,
    needless,
    same,
    unless_off,
    when,
    without,
)
from jobs.imports.common.places import parse
from jobs.imports.common.whose import DIFFUSION_PIPE, refuse_others
from jobs.imports.diffusion_pipe import data
from jobs.spec.values.resolutions import sides_of

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.common.draft import Rule

TITLE: Final = DIFFUSION_PIPE

_FAMILIES: Final = {
    "ltx-video": "ltxvideo",
    "hunyuan-video": "hunyuanvideo",
    "hunyuan_video_15": "hunyuanvideo15",
    "lumina_2": "lumina2",
    **{
        name: name
        for name in ("flux", "flux2", "sdxl", "wan", "chroma", "hidream", "sd3", "qwen_image")
    },
    **{name: name for name in ("auraflow", "z_image")},
}
# What names of files tell of a model: flavours, the first that fits.
_FLAVOURS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "flux": (("kontext", "kontext"), ("krea", "krea"), ("schnell", "schnell")),
    "flux2": (
        ("klein.*base.*4b|klein.*4b.*base", "klein-base-4b"),
        ("klein.*base.*9b|klein.*9b.*base", "klein-base-9b"),
        ("klein.*4b", "klein-4b"),
        ("klein.*9b", "klein-9b"),
        ("dev", "dev"),
    ),
    "z_image": (("turbo|training_adapter", "turbo"), ("", "base")),
    "qwen_image": (
        ("edit.*2511", "edit-2511"),
        ("edit.*2509", "edit-2509"),
        ("edit", "edit"),
        ("", "base"),
    ),
    "sd3": (("large.turbo", "3.5-large-turbo"), ("large", "3.5-large"), ("medium", "3.5-medium")),
    "hidream": (("fast", "fast"), ("dev", "dev"), ("full", "full")),
    "wan": (
        ("2.2.*ti2v", "2.2-ti2v-5b"),
        ("2.2.*i2v.*high", "2.2-i2v-a14b-high"),
        ("2.2.*i2v.*low", "2.2-i2v-a14b-low"),
        ("2.2.*high", "2.2-t2v-a14b-high"),
        ("2.2.*low", "2.2-t2v-a14b-low"),
        ("i2v.*720", "2.1-i2v-14b-720p"),
        ("i2v.*480", "2.1-i2v-14b-480p"),
        (r"1\.3b", "2.1-t2v-1.3b"),
        ("t2v.*14b", "2.1-t2v-14b"),
    ),
    "hunyuanvideo15": (("720", "720p-t2v"), ("480", "480p-t2v")),
}
# All linear layers of the blocks, which get an adapter, in families whose layers have the same
# names there.
_SAME_NAMES: Final = ("flux", "sd3", "qwen_image", "auraflow")
_LAYERS: Final = rf"\w*transformer_blocks\.\d+\..*(?:{models.LINEAR})"
_EVERY_LAYER: Final = (
    "all linear layers of the blocks get an adapter there, and are named and cut otherwise; here "
    "those of attention and feed-forward"
)

# What it uses for keys that are not set, of those that decide what is trained.
_DEFAULTS: Final[dict[str, Any]] = {
    "micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "warmup_steps": 0,
    "lr_scheduler": "constant",
    "activation_checkpointing": False,
    "model.timestep_sample_method": "logit_normal",
    "model.guidance": 1.0,
    "model.min_t": 0.0,
    "model.max_t": 1.0,
}
# Betas, epsilon and weight decay of optimizers where none are set.
_OPTIMIZERS: Final[dict[str, tuple[float, float, float, float]]] = {
    **dict.fromkeys(("adamw", "adamw8bit", "adamw8bitkahan", "offload"), (0.9, 0.999, 1e-8, 1e-2)),
    **dict.fromkeys(("adamw_optimi", "stableadamw"), (0.9, 0.99, 1e-6, 0.0)),
    "prodigy": (0.9, 0.999, 1e-8, 0.0),
    "lion": (0.9, 0.99, 1e-8, 0.0),
}
_WORDS: Final = {
    "adamw_optimi": "optimi_adamw",
    "stableadamw": "optimi_stableadamw",
    "adamw8bitkahan": "adamw8bit",
    "offload": "adamw",
}
# Shifts that are ignored for models; those whose tokens have 32 pixels, where others have 16.
_WITHOUT: Final = {
    "shift": ("ltxvideo", "sdxl"),
    "flux_shift": ("ltxvideo", "sdxl", "hunyuanvideo", "lumina2"),
    "lumina_shift": tuple(name for name in _FAMILIES.values() if name != "lumina2"),
}
_LARGE_TOKENS: Final = ("flux2", "hunyuanvideo15", "2.2-ti2v-5b")
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_EXPORTS: Final[training_keys.Words] = {name: (ours, "") for name, ours in _DTYPES.items()}
_FLOAT8: Final = re.compile(r"float8(_e4m3fn)?$")
_SAVES: Final = "set checkpointing_steps, which counts steps; a checkpoint has an export, too"
_CURVE_ENDS: Final = (
    "to 0 at the last step; there, a warm-up cuts off its end, and a cosine's is 1e-6"
)
_CUT: Final = "there, it ends with the last of epochs, and max_steps cuts it off"
_ONLY_STEPS: Final = "checkpoints are made every checkpointing_steps"


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, is of another tool, or is a dataset's.
    """
    values = parse(path, otherwise=".toml")
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise UserError(
            f"{path} is not a diffusion-pipe config: it has no [model]",
            "give the file that names this one as its dataset",
        )
    theirs = flatten({str(k): v for k, v in values.items()}, keep=("eval_datasets",))
    draft = Draft(theirs, path.absolute().parent)
    is_lora = isinstance(values.get("adapter"), dict)
    draft.values["model_type"] = "lora" if is_lora else "full"
    draft.defaults = _defaults(draft)
    draft.apply(_RULES, _PREFIXES, _FIRST)
    draft.values["max_aspect_ratio"] = 0.0
    draft.assume("buckets", "images of any shape are cropped to one", max_aspect_ratio=0.0)
    if not is_lora:
        draft.assume("adapter", "without one, the full model is trained", model_type="full")
    return draft


def _defaults(draft: Draft) -> dict[str, Any]:
    """Return the tool's values of keys that are not set."""
    kind = str(draft.theirs.get("optimizer.type")).strip().lower()
    defaults = dict(_DEFAULTS)
    if kind in _OPTIMIZERS:
        first, second, epsilon, decay = _OPTIMIZERS[kind]
        defaults |= {
            "optimizer.betas": [first, second],
            "optimizer.eps": epsilon,
            "optimizer.weight_decay": decay,
        }
    if kind == "automagic":
        defaults["optimizer.lr"] = 1e-6
    if kind == "prodigy":
        defaults |= {"optimizer.bias_correction": False}
    if draft.theirs.get("model.type") == "sdxl":
        del defaults["model.timestep_sample_method"]
        defaults["model.text_encoder_1_lr"] = draft.theirs.get("optimizer.lr")
    if not is_unset(draft.theirs.get("max_steps")):
        defaults.pop("epochs", None)
    return defaults


# -- model and adapter -------------------------------------------------------------------------


def _family(draft: Draft, key: str, value: Any) -> None:
    """Set the family, and the flavour that names of files tell."""
    name = _FAMILIES.get(str(value).strip().lower())
    paths = [str(v) for k, v in draft.theirs.items() if k.startswith("model.") and k != key]
    text = " ".join(paths).lower()
    flavours = (f for word, f in _FLAVOURS.get(name or "", ()) if re.search(word, text))
    models.set_family(draft, key, name, next(flavours, None))
    if name and "model_flavour" in draft.values:
        flavour = draft.values["model_flavour"]
        draft.assume("model", "from the names of its files", model_flavour=flavour)


def _directory(draft: Draft, key: str, value: Any) -> None:
    """Take a directory in the layout of diffusers."""
    flavour = draft.values.get("model_flavour")
    models.set_model(draft, key, value)
    if flavour is not None:
        draft.values["model_flavour"] = flavour


def _precision(draft: Draft, key: str, value: Any) -> None:
    training_keys.precision(draft, key, value)
    if str(value) in _DTYPES and is_unset(draft.theirs.get("save_dtype")):
        draft.values["export_dtype"] = _DTYPES[str(value)]


def _base(draft: Draft, key: str, value: Any) -> None:
    """Take the precision of the base; that of training where it says no other."""
    word = str(value).strip().lower()
    if word in _DTYPES:
        draft.unneeded(key, "nothing is quantized by default")
    elif draft.values["model_type"] == "full":
        draft.unsupported(key, "weights that are trained stay in fp32")
    elif _FLOAT8.match(word):
        draft.take(key, "base_precision", "fp8", "without scales")
    elif word == "nf4":
        draft.take(key, "base_precision", "nf4")
    else:
        draft.unsupported(key, "set base_precision: fp8, fp8_scaled, int8 or nf4")


def _adapters(draft: Draft, key: str, value: Any) -> None:
    """LoRAs that are merged into the base while training, of which there can be one."""
    paths = value if isinstance(value, list) else [value]
    if len(paths) == 1:
        models.set_training_adapter(draft, key, paths[0])
    else:
        draft.unsupported(key, "one training_adapter")


def _adapter(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if word not in ("lora", "lokr"):
        draft.unsupported(key, f"{word} is not supported; the job trains a peft LoRA instead")
        return
    same_names = models.family_of(draft).name in _SAME_NAMES
    if word == "lokr":
        draft.values["lora_variant"] = "lokr"
    if same_names:
        why = "all linear layers of the blocks"
        draft.take(key, "lora_target_modules", [_LAYERS], why)
    else:
        draft.unsupported(key, _EVERY_LAYER)


def _encoder_rate(draft: Draft, key: str, value: Any) -> None:
    """Take the rates of SDXL's text encoders, which are always trained there."""
    if models.family_of(draft).name != "sdxl":
        draft.unneeded(key, "only for SDXL")
        return
    first, second = (
        draft.get(f"model.text_encoder_{n}_lr")
        if not is_unset(draft.get(f"model.text_encoder_{n}_lr"))
        else draft.get("optimizer.lr")
        for n in (1, 2)
    )
    if as_number(first) == as_number(second) == 0:
        draft.unneeded(key, "text encoders are not trained")
    elif as_number(first) != as_number(second):
        draft.unsupported(key, "all text encoders have the same rate")
    else:
        training_keys.text_encoder_lora(draft, key, draft.number("adapter.rank") or 16)
        if draft.values.get("text_encoder_lora_rank"):
            draft.values["text_encoder_learning_rate"] = as_number(first)


# -- noise -------------------------------------------------------------------------------------


def _has(draft: Draft, key: str) -> bool:
    """Whether a shift is asked for, and used for the model."""
    name = models.family_of(draft).name
    return draft.on(f"model.{key}") and name not in _WITHOUT.get(key, ())


def _moves(draft: Draft) -> bool:
    return any(_has(draft, key) for key in ("shift", "flux_shift", "lumina_shift"))


def _timesteps(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if models.family_of(draft).objective != "flow":
        draft.unneeded(key, "only for flow-matching models")
    elif word == "logit_normal":
        draft.take(key, "timestep_sampling", "shift" if _moves(draft) else "logit_normal")
    elif word == "uniform":
        draft.take(key, "timestep_sampling", "uniform_shift" if _moves(draft) else "uniform")
    else:
        draft.unsupported(key, "set timestep_sampling: uniform, logit_normal, shift, or another")


def _by_size(draft: Draft, key: str, value: Any) -> None:
    """Take a shift by the tokens of an image, or of a frame of a video."""
    if not _has(draft, key.rpartition(".")[2]):
        draft.unneeded(key, "off is the default, or not used for this model")
    elif draft.on("model.shift"):
        draft.unneeded(key, "model.shift is used")
    else:
        sides = sides_of(draft.values.get("resolution") or 1024)
        kind = draft.values.get("model_flavour"), models.family_of(draft).name
        token = 32 if any(name in _LARGE_TOKENS for name in kind) else training_keys.FLUX_TOKEN
        training_keys.take_shift_by_size(draft, key, sides, token=token)


def _end(ours: str, usual: float) -> Rule:
    def rule(draft: Draft, key: str, value: Any) -> None:
        flavour = str(draft.values.get("model_flavour"))
        if as_number(value) != usual:
            draft.take(key, ours, value, "within the range of the model")
        elif flavour.endswith("-low" if usual else "-high"):
            draft.unsupported(key, "an expert is trained on its own noise levels only")
        else:
            draft.unneeded(key, "all noise levels of the model are trained")

    return rule


def _huber(draft: Draft, key: str, value: Any) -> None:
    """Convert a loss that is selected by setting its one parameter."""
    word = "smooth_l1" if key.startswith("smooth_l1") else "huber"
    if draft.take(key, "huber_c", value, "as pseudo-Huber, about twice as large"):
        draft.values |= {"loss_type": word, "huber_schedule": "constant"}


# -- training ----------------------------------------------------------------------------------


def _batch(draft: Draft, key: str, value: Any) -> None:
    """One number, or one for each resolution."""
    if not isinstance(value, list):
        draft.take(key, "train_batch_size", value)
        return
    sizes = {str(pair[1]) for pair in value if isinstance(pair, list) and len(pair) == 2}
    if len(sizes) == 1:
        draft.take(key, "train_batch_size", sizes.pop(), "the same at all resolutions")
    else:
        draft.unsupported(key, "train_batch_size is the same at all resolutions")


def _schedule(draft: Draft, key: str, value: Any) -> None:
    word, warm = str(value).strip().lower(), (draft.number("warmup_steps") or 0) > 0
    if word == "constant" and not warm:
        draft.take(key, "lr_scheduler", "constant")
    elif word == "constant":
        draft.take(key, "lr_scheduler", "constant_with_warmup", "with warmup_steps")
    elif word in ("linear", "cosine"):
        draft.take(key, "lr_scheduler", word, _CURVE_ENDS)
        if not is_unset(draft.theirs.get("max_steps")):
            draft.unsupported(key, _CUT)
    else:
        draft.unsupported(key, "not supported; the rate stays constant. Others: linear, cosine")
        draft.values["lr_scheduler"] = "constant_with_warmup" if warm else "constant"


def _epochs(draft: Draft, key: str, value: Any) -> None:
    if is_unset(draft.theirs.get("max_steps")):
        draft.take(key, "num_train_epochs", value)
        draft.values["max_train_steps"] = None
    else:
        draft.unsupported(key, "max_steps is used; the job does not end earlier")


def _optimizer(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    training_keys.optimizer(draft, key, _WORDS.get(word, word))


def _rate(draft: Draft, key: str, value: Any) -> None:
    if not is_unset(draft.theirs.get("force_constant_lr")):
        draft.unneeded(key, "force_constant_lr is used")
    elif not is_unset(draft.theirs.get("model.unet_lr")):
        draft.unneeded(key, "model.unet_lr is used")
    else:
        draft.take(key, "learning_rate", value)


def _constant_rate(draft: Draft, key: str, value: Any) -> None:
    if draft.take(key, "learning_rate", value):
        draft.values["lr_scheduler"] = "constant"


def _detail(draft: Draft, key: str, value: Any) -> None:
    if str(draft.get("optimizer.type")).strip().lower() not in _OPTIMIZERS:
        draft.unneeded(key, "of an optimizer that is not supported")
    elif key.endswith(("bias_correction", "safeguard_warmup")):
        on = not is_off(value)
        why = "prodigy has bias correction and safeguard_warmup on"
        (draft.unneeded if on else draft.unsupported)(key, why)
    elif is_off(value):
        draft.unneeded(key, "off is the default")
    else:
        draft.unsupported(key, "optimizers have only betas, eps and weight decay here")


def _clip(draft: Draft, key: str, value: Any) -> None:
    if draft.on("optimizer.gradient_release"):
        draft.take(key, "max_grad_norm", 0, "off with gradient_release")
    else:
        draft.take(key, "max_grad_norm", value)


def _checkpointing(draft: Draft, key: str, value: Any) -> None:
    unsloth = str(value).strip().lower() == "unsloth"
    why = "activations are recomputed, not offloaded" if unsloth else ""
    draft.take(key, "gradient_checkpointing", True if unsloth else value, why)


_RULES: Final[dict[str, Rule]] = {
    "model.type": _family,
    "model.diffusers_path": _directory,
    **all_of(
        "model.ckpt_path model.checkpoint_path model.single_file_path",
        without("set pretrained_model_name_or_path to a model in the layout of diffusers"),
    ),
    **all_of(
        "model.transformer_path model.diffusion_model",
        without("the model is one directory in the layout of diffusers; save it as one"),
    ),
    "model.dtype": _precision,
    **all_of("model.transformer_dtype model.diffusion_model_dtype", _base),
    "model.merge_adapters": _adapters,
    "model.guidance": training_keys.guidance,
    "model.timestep_sample_method": _timesteps,
    "model.sigmoid_scale": named("logit_std"),
    "model.shift": when(
        lambda draft: _has(draft, "shift"), named("flow_shift"), "off, or not used for this model"
    ),
    **all_of("model.flux_shift model.lumina_shift", _by_size),
    "model.min_t": _end("sigma_min", 0),
    "model.max_t": _end("sigma_max", 1),
    "model.max_sequence_length": same,
    "model.max_llama3_sequence_length": without("all text encoders take as many tokens", "128"),
    "model.bypass_guidance_embedding": without("set train_guidance"),
    "model.first_frame_conditioning_p": without("set first_frame: true in datasets"),
    "model.v_pred": without("set prediction_type in the model's scheduler_config.json"),
    "model.min_snr_gamma": training_keys.snr,
    "model.debiased_estimation_loss": without("set snr_gamma, or none"),
    "model.unet_lr": named("learning_rate"),
    **all_of("model.text_encoder_1_lr model.text_encoder_2_lr", _encoder_rate),
    # -- adapter
    "adapter.type": _adapter,
    "adapter.rank": training_keys.lora_rank,
    "adapter.alpha": without("it refuses this key, since alpha is the rank"),
    "adapter.dropout": named("lora_dropout"),
    "adapter.rank_dropout": without("only lora_dropout"),
    "adapter.decompose_factor": training_keys.of_lokr("lokr_factor"),
    "adapter.init_from_existing": named("init_lora"),
    "adapter.fuse_adapters": without("fuse it into the model (`fuse_lora`, `save_pretrained`)"),
    "adapter.exclude_modules": without("set lora_exclude_modules, by names of diffusers' layers"),
    "adapter.dtype": needless("adapters are trained in fp32"),
    # -- training
    "micro_batch_size_per_gpu": _batch,
    "image_micro_batch_size_per_gpu": without("images and videos have one batch size"),
    "gradient_accumulation_steps": same,
    "gradient_clipping": _clip,
    "epochs": _epochs,
    "max_steps": named("max_train_steps"),
    "lr_scheduler": _schedule,
    "warmup_steps": unless_off("lr_warmup_steps"),
    "force_constant_lr": _constant_rate,
    "optimizer.type": _optimizer,
    "optimizer.lr": _rate,
    "optimizer.betas": training_keys.betas,
    "optimizer.eps": named("adam_epsilon"),
    "optimizer.weight_decay": named("weight_decay"),
    "optimizer.beta2_half_life": without("set adam_beta2"),
    "optimizer.gradient_release": without("the optimizer steps after all micro-batches"),
    **all_of("huber_delta smooth_l1_beta pseudo_huber_c", _huber),
    "uncond_fraction": named("caption_dropout_probability"),
    "activation_checkpointing": _checkpointing,
    "blocks_to_swap": named("swap_blocks"),
    "compile": named("torch_compile"),
    "pipeline_stages": without("shard instead: gpus: N, strategy: fsdp2", "1"),
    # -- data
    "dataset": data.read_file,
    "video_clip_mode": data.clips,
    "eval_datasets": without("validation_fraction holds out a part of the samples"),
    # -- output
    "output_dir": training_keys.job_name,
    "save_dtype": chosen("export_dtype", _EXPORTS, "exports may be fp32, bf16 or fp16"),
    "save_every_n_steps": named("checkpointing_steps"),
    **all_of(
        "save_every_n_epochs save_every_n_examples",
        when(
            lambda draft: is_unset(draft.theirs.get("save_every_n_steps")),
            without(_SAVES),
            "save_every_n_steps is used",
        ),
    ),
    **all_of("checkpoint_every_n_epochs checkpoint_every_n_minutes", needless(_ONLY_STEPS)),
    "resume_from_checkpoint": without(training_keys.OTHER_CHECKPOINTS),
    "monitoring.enable_wandb": trackers.wandb,
    "monitoring.wandb_tracker_name": trackers.of_trackers("tracker_project_name"),
    "monitoring.wandb_run_name": trackers.of_trackers("tracker_run_name"),
    **all_of(
        "caching_batch_size map_num_proc steps_per_print logging_steps x_axis_examples "
        "reentrant_activation_checkpointing partition_method partition_split "
        "disable_block_swap_for_eval regenerate_cache monitoring model optimizer adapter "
        "monitoring.wandb_api_key monitoring.run_name",
        needless(training_keys.NO_EFFECT),
    ),
}

_PREFIXES: Final[dict[str, Rule]] = {
    "optimizer.": _detail,
    **all_of("eval_ image_eval_", needless("only for eval_datasets, which are not supported")),
    **all_of(
        "model.vae model.llm_ model.clip_ model.text_encoder model.t5_ model.llama3_ model.byt5_ "
        "model.qwen_ model.cache_text",
        needless("parts of the model; captions are encoded and cached first"),
    ),
}

_FIRST: Final = (
    "model.type",
    "model.diffusers_path",
    "dataset",
    "monitoring.enable_wandb",
    "adapter.type",
    "adapter.rank",
    "max_steps",
)
