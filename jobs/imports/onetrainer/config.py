"""OneTrainer's configurations, a rule for each key; its concepts and samples are in `data`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import models, training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    chosen,
    flatten,
    is_unset,
    named,
    needless,
    only_on,
    same,
    unless_off,
    when,
    without,
)
from jobs.imports.common.places import parse
from jobs.imports.common.whose import ONETRAINER, refuse_others
from jobs.imports.onetrainer import data, rules

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.common.draft import Rule

TITLE: Final = ONETRAINER

# What it uses for keys that are not set, of those that decide what is trained.
_DEFAULTS: Final[dict[str, Any]] = {
    "model_type": "STABLE_DIFFUSION_15",
    "training_method": "FINE_TUNE",
    "base_model_name": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "learning_rate": 3e-6,
    "learning_rate_scheduler": "CONSTANT",
    "learning_rate_warmup_steps": 200,
    "epochs": 100,
    "batch_size": 1,
    "clip_grad_norm": 1.0,
    "train_dtype": "FLOAT_16",
    "output_dtype": "FLOAT_32",
    "resolution": "512",
    "optimizer.optimizer": "ADAMW",
    "timestep_distribution": "UNIFORM",
    "ema_decay": 0.999,
    "ema_update_step_interval": 5,
    "backup_after": 30,
    "backup_after_unit": "MINUTE",
    "unmasked_weight": 0.1,
    "concept_file_name": "training_concepts/concepts.json",
    "output_model_destination": "models/model.safetensors",
    "tensorboard": True,
}
_LORA_DEFAULTS: Final[dict[str, Any]] = {"lora_rank": 16, "lora_alpha": 1.0}


_PEFTS: Final[training_keys.Words] = {"lora": ("lora", ""), "lokr": ("lokr", "")}
_DTYPES: Final[training_keys.Words] = {
    "float_32": ("fp32", ""),
    "float_16": ("fp16", ""),
    "bfloat_16": ("bf16", ""),
}
_LENGTHS: Final = "with lengths of rows; there, of columns unless lora_decompose_output_axis is on"
_SAMPLING: Final = rules.every("sample_after_unit", "validation_steps", rules.SAMPLED)


def _changes(draft: Draft) -> bool:
    return str(draft.get("learning_rate_scheduler")).strip().upper() != "CONSTANT"


def _saves(draft: Draft) -> bool:
    return str(draft.get("save_every_unit") or "NEVER").strip().upper() != "NEVER"


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, is of another tool, or trains what is not trained here.
    """
    values = parse(path)
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a OneTrainer config: it has no keys")
    theirs = flatten(migrate({str(key): value for key, value in values.items()}), keep=_NESTED)
    method = str(theirs.get("training_method") or "FINE_TUNE").upper()
    if method not in ("LORA", "FINE_TUNE"):
        raise UserError(f"{path}: training_method {method} is not supported", "LORA, FINE_TUNE")
    draft = Draft(theirs, path.absolute().parent)
    draft.values["model_type"] = "lora" if method == "LORA" else "full"
    name = str(draft.theirs.get("model_type") or _DEFAULTS["model_type"]).upper()
    draft.defaults = _defaults(draft, rules.MODELS.get(name, ("", None))[0])
    draft.apply(_RULES, _PREFIXES, _FIRST)
    if method == "LORA" and is_unset(theirs.get("layer_filter")):
        draft.unsupported("layer_filter", rules.EVERY_LAYER)
    family = models.family_of(draft).name
    if tokens := rules.TOKENS.get(family):
        draft.values["max_sequence_length"] = tokens
        draft.assume("text_encoder", "as many tokens", max_sequence_length=tokens)
    step = rules.BUCKETS.get(family, 64)
    buckets = {"max_bucket_aspect_ratio": 4, "max_aspect_ratio": 0, "bucket_step": step}
    draft.values |= buckets
    finer = "; there, in steps of 8" if family == "stable_diffusion" else ""
    draft.assume("buckets", f"as it makes them{finer}", **buckets)
    return draft


def _defaults(draft: Draft, family: str) -> dict[str, Any]:
    """Return the tool's values of keys that are not set, as far as the model has such parts."""
    optimizer = str(draft.theirs.get("optimizer.optimizer") or "ADAMW").upper()
    part = "unet" if family in rules.UNETS else "transformer"
    parts = rules.ENCODERS[: rules.SEVERAL.get(family, 1)]
    defaults = _DEFAULTS | {
        "optimizer.weight_decay": rules.DECAYS.get(optimizer, 0.0),
        "optimizer.beta2": 0.99 if optimizer == "LION" else 0.999,
        f"{part}.weight_dtype": "FLOAT_32",
        f"{part}.gradient_checkpointing": True,
        **{f"{name}.train": True for name in parts},
        **{f"{name}.stop_training_after": 30 for name in parts},
        **(data.SAMPLE_DEFAULTS if data.has_samples(draft) else {}),
    }
    if draft.values["model_type"] == "lora":
        defaults |= _LORA_DEFAULTS
        if optimizer == "PRODIGY":
            defaults |= {"optimizer.use_bias_correction": False}
    if family == "flux":
        defaults["text_encoder_2_sequence_length"] = 77
    if draft.on("masked_training"):
        defaults["normalize_masked_area_loss"] = False
    if family == "hunyuanvideo":
        defaults["frames"] = "25"
    return defaults


def _parts() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    for part in ("unet", "transformer"):
        of = {
            "train": only_on("the denoiser is always trained"),
            "learning_rate": rules.rate,
            "weight_dtype": rules.weights,
            "guidance_scale": training_keys.guidance,
            "gradient_checkpointing": same,
            "model_name": without(training_keys.ONE_DIRECTORY),
            "stop_training_after": rules.denoiser_stops,
            "stop_training_after_unit": needless("see stop_training_after"),
            "attention_mask": without("as in the stock pipeline"),
            "offload_fraction": without("fsdp_cpu_offload: true keeps shards in host memory"),
            "activation_offloading": without("activations are recomputed, not offloaded"),
        }
        table |= {f"{part}.{key}": rules.of_denoiser(part, rule) for key, rule in of.items()}
    for number, name in enumerate(rules.ENCODERS):
        of = {
            "train": rules.encoder_trains,
            "learning_rate": rules.encoder_rate,
            "stop_training_after": rules.encoder_stops,
            "stop_training_after_unit": rules.encoder_stops,
            "dropout_probability": data.caption_dropout,
            "include": only_on("all text encoders are used"),
            "model_name": without(training_keys.ONE_DIRECTORY),
        }
        table |= {f"{name}.{key}": rules.encoder(number, rule) for key, rule in of.items()}
        skip = without("captions are encoded as the stock pipeline does")
        table[f"{name}_layer_skip"] = rules.encoder(number, skip)
    return table


_RULES: Final[dict[str, Rule]] = {
    "training_method": rules.method,
    "model_type": rules.model,
    "base_model_name": models.set_model,
    **_parts(),
    "vae.model_name": without(training_keys.ONE_DIRECTORY),
    "text_encoder_sequence_length": rules.tokens("flux2"),
    "text_encoder_2_sequence_length": rules.tokens("flux"),
    "quantization.svd_dtype": without("weights are quantized without corrections"),
    "quantization.layer_filter": without("all linear layers of the blocks are quantized", "layers"),
    # -- adapter
    "peft_type": rules.lora(chosen("lora_variant", _PEFTS, "the job trains a peft LoRA instead")),
    "lora_rank": rules.lora(rules.rank),
    "lora_alpha": rules.lora(same),
    "dropout_probability": rules.lora(named("lora_dropout")),
    "lora_model_name": rules.lora(named("init_lora")),
    "lora_decompose": rules.lora(unless_off("lora_variant", "dora", _LENGTHS)),
    "layer_filter": rules.lora(rules.layers),
    "lokr_dim": rules.lora(training_keys.of_lokr("lora_rank")),
    "lokr_decompose_factor": rules.lora(training_keys.of_lokr("lokr_factor")),
    "lokr_full_matrix": rules.lora(training_keys.of_lokr("lokr_full_matrix")),
    **all_of(
        "lokr_decompose_both lokr_weight_decompose",
        rules.lora(without("only the second matrix of LoKr is parted")),
    ),
    # -- training
    "batch_size": named("train_batch_size"),
    "gradient_accumulation_steps": same,
    "epochs": rules.epochs,
    "learning_rate": rules.rate,
    "learning_rate_scaler": needless("already applied to learning_rate"),
    "learning_rate_scheduler": rules.schedule,
    "learning_rate_warmup_steps": rules.warm_up,
    "learning_rate_cycles": rules.cycles,
    "learning_rate_min_factor": when(
        _changes, without("schedules end at 0"), "the rate is constant"
    ),
    "custom_learning_rate_scheduler": needless("only for the schedule CUSTOM"),
    "scheduler_params": needless("only for the schedule CUSTOM"),
    "optimizer.optimizer": rules.optimizer,
    "optimizer.beta1": named("adam_beta1"),
    "optimizer.beta2": named("adam_beta2"),
    "optimizer.eps": rules.epsilon,
    "optimizer.weight_decay": named("weight_decay"),
    **all_of(
        " ".join(f"optimizer.{name}" for name in rules.HOW.split()),
        needless("how the optimizer computes"),
    ),
    "clip_grad_norm": rules.clip,
    "train_dtype": rules.precision,
    "compile": named("torch_compile"),
    "ema": rules.ema,
    "ema_decay": rules.of_ema(rules.decay),
    "ema_update_step_interval": needless("part of ema_decay"),
    "loss_scaler": without("the loss is the mean over all samples of a step"),
    **rules.NOISE,
    # -- data
    **data.RULES,
    "unmasked_weight": data.of_masks(same),
    "normalize_masked_area_loss": data.of_masks(
        only_on("the loss is the mean over what a mask shows")
    ),
    "masked_prior_preservation_weight": data.of_masks(without(training_keys.NO_METHOD)),
    # -- devices and output
    "multi_gpu": rules.several_gpus,
    "device_indexes": rules.devices,
    "output_dtype": chosen("export_dtype", _DTYPES, "exports may be fp32, bf16 or fp16"),
    "output_model_destination": rules.destination,
    "backup_after": rules.every("backup_after_unit", "checkpointing_steps", rules.TIMES),
    "rolling_backup_count": rules.kept,
    "save_every": when(
        _saves, without("exports are made at the end; `fsdp-tui export` makes more"), "off"
    ),
    "sample_after": when(data.has_samples, _SAMPLING, "there are no samples"),
    "sample_skip_first": without("samples are made at every multiple of validation_steps"),
    "non_ema_sampling": needless("samples use the average where there is one"),
    "cloud.enabled": without("jobs run on this machine or on Slurm"),
    "continue_last_backup": without("`fsdp-tui resume ID` resumes from a checkpoint"),
    "additional_embeddings": without("textual inversion is not supported"),
    "force_circular_padding": without(training_keys.NO_METHOD),
    "custom_conditioning_image": without("set conditioning_suffix: -condlabel in datasets"),
    "only_cache": without("remove it: jobs train; caches are made first"),
    "tensorboard": unless_off("report_to", ["tensorboard"]),
    **all_of(
        "__version optimizer_defaults backup_after_unit sample_after_unit save_every_unit "
        "rolling_backup lora_weight_dtype layer_filter_preset layer_filter_regex "
        "lora_decompose_norm_epsilon lora_decompose_output_axis bundle_additional_embeddings "
        "lokr_use_tucker lokr_dora_on_output lokr_vec_trick save_skip_first save_filename_prefix "
        "backup_before_save train_device temp_device attention_mechanism fallback_train_dtype "
        "enable_autocast_cache dataloader_threads debug_mode debug_dir workspace_dir cache_dir "
        "huggingface_cache_dir offline_mode prevent_overwrites include_train_config "
        "output_model_format latent_caching clear_cache_before_training gradient_reduce_precision "
        "fused_gradient_reduce async_gradient_reduce async_gradient_reduce_buffer async_offloading "
        "sample_image_format sample_video_format sample_audio_format samples_to_tensorboard "
        "weight_dtype unmasked_probability tensorboard_expose tensorboard_always_on "
        "tensorboard_port embedding_learning_rate embedding_weight_dtype preserve_embedding_norm "
        "embeddings",
        needless(training_keys.NO_EFFECT),
    ),
}

_PREFIXES: Final[dict[str, Rule]] = {
    "optimizer.": rules.detail,
    **all_of(
        "effnet_encoder. decoder. decoder_text_encoder. decoder_vqgan. prior. "
        "unconditional_transformer. effnet_encoder decoder prior",
        needless(rules.NO_PART),
    ),
    **all_of("unet. transformer. vae.", needless("only for its own memory and precision")),
    **all_of("text_encoder. text_encoder_", needless(training_keys.TEXT_ENCODERS_FREED)),
    "quantization.": needless("only for its own files"),
    **all_of("cloud. cloud", needless("jobs run on this machine or on Slurm")),
    "secrets": needless("secrets are not copied"),
    "oft_": needless("only for OFT, which is not supported"),
    "embedding": needless("only for training_method: EMBEDDING, which is not supported"),
}

_NESTED: Final = ("optimizer_defaults",)
_FIRST: Final = (
    "model_type",
    "base_model_name",
    "training_method",
    "peft_type",
    "multi_gpu",
    "resolution",
    "aspect_ratio_bucketing",
    "concepts",
    "concept_file_name",
    "learning_rate_scheduler",
    "ema",
    *(f"{name}.train" for name in rules.ENCODERS),
)


# -- older files -------------------------------------------------------------------------------

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
