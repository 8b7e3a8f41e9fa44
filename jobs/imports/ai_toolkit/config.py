"""ai-toolkit's `CONFIG.yaml`, a rule for each key; the longer rules are in `rules`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.ai_toolkit import data as ai_toolkit_data
from jobs.imports.ai_toolkit import rules
from jobs.imports.common import hub, launch, models, trackers, training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    flatten,
    named,
    needless,
    only_on,
    same,
    without,
)
from jobs.imports.common.places import parse
from jobs.imports.common.whose import refuse_others

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.common.draft import Rule

TITLE: Final = "ai-toolkit"

# What it uses for keys that are not set, of those that decide what is trained.
_DEFAULTS: Final[dict[str, Any]] = {
    "train.lr": 1e-6,
    "train.dtype": "fp32",
    "train.timestep_type": "sigmoid",
    "train.gradient_checkpointing": True,
    "save.save_every": 1000,
    "save.max_step_saves_to_keep": 5,
    "save.dtype": "float16",
}
_LORA_DEFAULTS: Final[dict[str, Any]] = {"network.linear": 4, "network.linear_alpha": 1.0}
_SAMPLE_DEFAULTS: Final[dict[str, Any]] = {
    "sample.sample_every": 100,
    "sample.guidance_scale": 7,
    "sample.sample_steps": 20,
    "sample.width": 512,
    "sample.height": 512,
    "train.skip_first_sample": False,
}


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, or is no training of this tool.
    """
    values = parse(path, otherwise=".yaml")
    refuse_others(values, path, TITLE)
    process, around, others = _process(path, values)
    theirs = {str(k): v for k, v in flatten(process, keep=("datasets",)).items()}
    draft = Draft(around | theirs, path.absolute().parent, defaults=_defaults(process))
    for number in range(1, others + 1):
        draft.unsupported(f"process[{number}]", "a job is one training run; use a file for each")
    rules.use_default_architecture(draft)
    draft.apply(_RULES, _PREFIXES, _FIRST)
    if "resolution" not in draft.values and process.get("datasets"):
        draft.values["resolution"] = 512
        draft.assume("datasets.resolution", "", resolution=512)
    if not isinstance(process.get("network"), dict):
        draft.values["model_type"] = "full"
        draft.assume("network", "without one, the full model is trained", model_type="full")
    return draft


def _process(path: Path, values: Any) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the training process, what stands around it, and how many other processes there are.

    Raises:
        UserError: There is none.
    """
    config = values.get("config") if isinstance(values, dict) else None
    processes = config.get("process") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(processes, list) or not processes:
        raise UserError(
            f"{path} is not an ai-toolkit config: config.process is missing",
            "it must be a list with the training",
        )
    kind = str(values.get("job", "extension")).strip().lower()
    if kind not in ("extension", "train") or not isinstance(processes[0], dict):
        raise UserError(
            f"{path} is not a training config: job is {kind}", "use a file with job: extension"
        )
    # The tool itself does so in the whole file.
    name = str(config.get("name", ""))
    try:
        text = json.dumps(processes[0], default=str)
    except TypeError as error:
        raise UserError(f"{path}: a key cannot be read ({error})") from None
    first = json.loads(text.replace("[name]", json.dumps(name)[1:-1]))
    around = {f"config.{key}": value for key, value in config.items() if key != "process"}
    around |= {key: value for key, value in values.items() if key != "config"}
    return first, around, len(processes) - 1


def _defaults(process: dict[str, Any]) -> dict[str, Any]:
    """Return the tool's values of keys that are not set."""
    defaults = dict(_DEFAULTS)
    network, sample = process.get("network"), process.get("sample")
    if isinstance(network, dict):
        defaults |= _LORA_DEFAULTS
        if network.get("alpha") is not None:
            del defaults["network.linear_alpha"]
        if network.get("rank") is not None:
            del defaults["network.linear"]
    train = process.get("train")
    train = train if isinstance(train, dict) else {}
    optimizer = str(train.get("optimizer", "adamw"))
    if optimizer.lower().startswith(("adam", "prodigy")):
        defaults["train.optimizer_params.eps"] = 1e-6
    if optimizer.lower() in ("adamw", "adamw8bit"):  # torch's own, and bitsandbytes'
        defaults["train.optimizer_params.weight_decay"] = 1e-2
    if str(train.get("lr_scheduler")).strip().lower() == "constant_with_warmup":
        defaults["train.lr_scheduler_params.num_warmup_steps"] = 1000
    if isinstance(sample, dict) and (sample.get("prompts") or sample.get("samples")):
        defaults |= _SAMPLE_DEFAULTS
    return defaults


_MODEL: Final[dict[str, Rule]] = {
    "type": rules.process_type,
    "device": rules.device,
    "gpu_ids": launch.gpus,
    "num_processes": launch.processes,
    "trigger_word": same,
    "datasets": ai_toolkit_data.read_datasets,
    "config.name": training_keys.job_name,
    **all_of("job meta config", needless("training is the default")),
    "model.name_or_path": models.set_model,
    "model.arch": rules.architecture,
    **all_of(rules.SWITCHES, rules.switch),
    "model.is_v_pred": training_keys.v_prediction,
    "model.quantize": rules.quantize,
    "model.quantize_te": needless(training_keys.TEXT_ENCODERS_FREED),
    **all_of("model.qtype_te model.text_encoder_bits", needless(training_keys.TEXT_ENCODERS_FREED)),
    "model.qtype": rules.quantized_type,
    **all_of(
        "model.accuracy_recovery_adapter model.quantize_kwargs",
        without("weights are quantized without a recovery adapter or exceptions of their own"),
    ),
    "model.assistant_lora_path": models.set_training_adapter,
    **all_of(
        "model.lora_path model.inference_lora_path",
        without(
            "a second LoRA cannot be loaded; fuse it into the model (`fuse_lora`, "
            "`save_pretrained`)"
        ),
    ),
    **all_of(
        "model.only_if_contains model.ignore_if_contains",
        without("the full denoiser is trained"),
    ),
    **all_of(
        "model.vae_path model.unet_path model.te_name_or_path model.extras_name_or_path "
        "model.refiner_name_or_path",
        without(training_keys.ONE_DIRECTORY),
    ),
    "model.model_kwargs.train_high_noise": needless("model_flavour selects the expert"),
    "model.model_kwargs.train_low_noise": rules.low_noise,
    "model.compile": named("torch_compile"),
    "model.layer_offloading": without("fsdp_cpu_offload: true keeps shards in host memory"),
    "model.split_model_over_gpus": without("shard instead: gpus: 4, strategy: fsdp2"),
    **all_of(
        "model.low_vram model.dtype model.vae_dtype model.te_dtype model.vae_device "
        "model.te_device model.use_text_encoder_1 model.use_text_encoder_2 model.attn_masking "
        "model.use_flux_cfg model.layer_offloading_text_encoder_percent "
        "model.layer_offloading_transformer_percent",
        needless("mixed_precision sets the precision; large models are sharded"),
    ),
    "network.type": rules.network,
    **all_of("network.linear network.rank", training_keys.lora_rank),
    **all_of("network.linear_alpha network.alpha", named("lora_alpha")),
    "network.dropout": named("lora_dropout"),
    **all_of(
        "network.conv network.conv_alpha",
        without("only linear layers get an adapter"),
    ),
    **all_of(
        "network.network_kwargs.only_if_contains network.network_kwargs.ignore_if_contains",
        without("set lora_target_modules: suffixes of module names of the diffusers model"),
    ),
    "network.lokr_full_rank": training_keys.of_lokr("lokr_full_matrix"),
    "network.lokr_factor": training_keys.of_lokr("lokr_factor"),
    "network.transformer_only": needless("only the denoiser is trained"),
    "network.split_multistage_loras": needless("a job trains one expert"),
    "network.pretrained_lora_path": named("init_lora"),
}

_TRAINING: Final[dict[str, Rule]] = {
    "train.batch_size": named("train_batch_size"),
    "train.steps": named("max_train_steps"),
    **all_of("train.gradient_accumulation train.gradient_accumulation_steps", rules.accumulation),
    **all_of("train.lr train.unet_lr", rules.rate),
    "train.optimizer": training_keys.optimizer,
    "train.optimizer_params.weight_decay": named("weight_decay"),
    "train.optimizer_params.eps": named("adam_epsilon"),
    "train.optimizer_params.betas": training_keys.betas,
    "train.lr_scheduler": rules.schedule,
    **all_of(
        "train.lr_scheduler_params.num_warmup_steps train.lr_scheduler_params.warmup_steps",
        rules.warm_up,
    ),
    **all_of(
        "train.lr_scheduler_params.total_iters train.lr_scheduler_params.T_max",
        needless("schedules end at max_train_steps"),
    ),
    "train.dtype": training_keys.precision,
    **all_of("train.gradient_checkpointing train.max_grad_norm", same),
    "train.train_unet": only_on("only the denoiser is trained"),
    "train.train_text_encoder": training_keys.text_encoders("network.linear network.rank"),
    "train.text_encoder_lr": training_keys.text_encoder_rate("train.train_text_encoder"),
    "train.ema_config": needless("off"),
    **all_of("train.ema_config.use_ema train.ema_config.ema_decay", same),
    "train.ema_config.use_feedback": without(training_keys.NO_METHOD),
    "train.noise_scheduler": needless("set by the family"),
    "train.timestep_type": rules.timesteps,
    **all_of(
        "train.linear_timesteps train.linear_timesteps2 train.content_or_style",
        without("set timestep_sampling, logit_mean and logit_std", "balanced"),
    ),
    **all_of("train.min_snr_gamma train.snr_gamma", training_keys.snr),
    "train.loss_type": rules.loss,
    "train.loss_target": without("the loss is computed on the model's prediction", "noise"),
    **all_of(
        "train.noise_offset train.dynamic_noise_offset train.random_noise_shift "
        "train.noise_multiplier",
        without(training_keys.NOISE, "1"),
    ),
    "train.cache_text_embeddings": same,
    "train.unload_text_encoder": without(
        "ai-toolkit then ignores captions; here they are used, and the encoders are freed too"
    ),
    "train.reg_weight": ai_toolkit_data.reg_weight,
    "train.skip_first_sample": rules.first_sample,
    "train.disable_sampling": ai_toolkit_data.no_samples,
    "train.switch_boundary_every": needless("a job trains one expert"),
    "train.bypass_guidance_embedding": without("set train_guidance"),
    **all_of(
        "train.diff_output_preservation train.do_prior_divergence train.inverted_mask_prior "
        "train.do_guidance_loss train.train_turbo train.do_cfg train.blank_prompt_preservation "
        "train.match_noise_norm train.force_consistent_noise train.learnable_snr_gos "
        "train.do_paramiter_swapping train.adaptive_scaling_factor train.short_and_long_captions "
        "train.do_differential_guidance train.single_item_batching train.standardize_latents "
        "train.standardize_images train.img_multiplier train.latent_multiplier "
        "train.optimal_noise_pairing_samples",
        without(training_keys.NO_METHOD, "1"),
    ),
    **all_of(
        "train.prompt_dropout_prob train.prompt_saturation_chance",
        without("set caption_dropout_probability to train with empty captions"),
    ),
    **all_of(
        "train.min_denoising_steps train.max_denoising_steps",
        without("all noise levels are trained", "999", "1000"),
    ),
    "train.start_step": without("`fsdp-tui resume ID` resumes from a checkpoint"),
    **all_of(
        "train.xformers train.sdp train.force_first_sample "
        "train.embedding_lr train.adapter_lr train.refiner_lr train.attention_backend "
        "train.diff_output_preservation_class train.diff_output_preservation_multiplier "
        "train.paramiter_swapping_factor train.num_train_timesteps train.train_refiner "
        "train.merge_network_on_save train.weight_jitter",
        needless(training_keys.NO_EFFECT),
    ),
    "train.dist_mode": rules.parallel,
    **all_of(
        "train.distributed train.dist_backend train.fsdp_mixed_precision train.fsdp_auto_wrap",
        needless("the launch follows the job's keys"),
    ),
}

_OUTPUT: Final[dict[str, Rule]] = {
    "logging.use_wandb": trackers.wandb,
    "logging.project_name": trackers.of_trackers("tracker_project_name"),
    "logging.run_name": trackers.of_trackers("tracker_run_name"),
    "save.dtype": rules.export_dtype,
    "save.save_every": named("checkpointing_steps"),
    "save.max_step_saves_to_keep": named("checkpoints_total_limit"),
    "save.save_format": needless("exports have the layout that other tools load"),
    "save.push_to_hub": hub.push,
    "save.hf_repo_id": hub.of_push("hub_model_id"),
    "save.hf_private": hub.of_push("hub_private_repo"),
    **all_of(
        "training_folder performance_log_every sqlite_db_path",
        needless(training_keys.OWN_DIRECTORIES),
    ),
}

_RULES: Final[dict[str, Rule]] = {**_MODEL, **_TRAINING, **_OUTPUT, **ai_toolkit_data.SAMPLES}

_PREFIXES: Final[dict[str, Rule]] = {
    **all_of("train.fsdp_ fsdp_", rules.fsdp),
    "logging.": needless("every step is recorded"),
    **all_of("meta. config.", needless("only describes ai-toolkit's own files")),
    "slider": without("sliders are not supported"),
    "adapter.": without("adapters other than LoRA are not supported"),
    "embedding.": without("textual inversion is not supported"),
}

_FIRST: Final = (
    "save.push_to_hub",
    "logging.use_wandb",
    "model.arch",
    *rules.SWITCHES.split(),
    "model.name_or_path",
    "trigger_word",
    "train.lr_scheduler",
    "gpu_ids",
    "device",
    "datasets",
    "network.type",
    "network.lokr_full_rank",
)
