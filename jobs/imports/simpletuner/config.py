"""SimpleTuner's `config.json`, a rule for each key; the longer rules are in `rules`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.imports.common import hub, launch, models, trackers, training_keys
from jobs.imports.common.command_line import split
from jobs.imports.common.draft import (
    Draft,
    all_of,
    chosen,
    is_off,
    named,
    needless,
    same,
    unless_off,
    without,
)
from jobs.imports.common.places import parse, read_text
from jobs.imports.common.whose import refuse_others
from jobs.imports.simpletuner import data as simpletuner_data
from jobs.imports.simpletuner import optimizer, published, rules
from jobs.spec.values.spellings import normal_key

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.common.draft import Rule

TITLE: Final = "SimpleTuner"

# What it uses for keys that are not set, of those that decide what is trained.
_DEFAULTS: Final[dict[str, Any]] = {
    "train_batch_size": 4,
    "learning_rate": 4e-7,
    "lr_scheduler": "constant_with_warmup",
    "lr_end": 4e-7,
    "lr_power": 0.8,
    "num_train_epochs": 1,
    "max_grad_norm": 2.0,
    "grad_clip_method": "value",
    "gradient_checkpointing": True,
    "checkpoints_total_limit": 5,
    "flow_schedule_shift": 3,
    "caption_dropout_probability": 0.1,
    "huber_schedule": "snr",
    "pretrained_vae_model_name_or_path": "madebyollin/sdxl-vae-fp16-fix",
    "resolution": 1024,
    "aspect_bucket_alignment": 64,
}
_LORA_DEFAULTS: Final[dict[str, Any]] = {"lora_dropout": 0.1, "flux_lora_target": "all"}
_SAMPLE_DEFAULTS: Final[dict[str, Any]] = {
    "validation_steps": 100,
    "validation_num_inference_steps": 30,
    "validation_guidance": 7.5,
    "validation_negative_prompt": "blurry, cropped, ugly",
}
# Only DeepSpeed's optimizer is made with these.
_DEEPSPEED_DEFAULTS: Final[dict[str, Any]] = {"adam_weight_decay": 1e-2}
ENV: Final = ".env"
"""What names of its older configurations end in."""

# Their variables, where they are not called as the flags are, and the one with other flags.
_VARIABLES: Final = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint",
    "DATALOADER_CONFIG": "data_backend_config",
    "TRAINING_SEED": "seed",
    "ACCELERATE_CONFIG_PATH": "accelerate_config",
    "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "MINIMUM_RESOLUTION": "minimum_image_size",
    "PUSH_CHECKPOINTS": "push_checkpoints_to_hub",
    "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit",
    "HUB_MODEL_NAME": "hub_model_id",
    "MODEL_NAME": "pretrained_model_name_or_path",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "LR_SCHEDULE": "lr_scheduler",
    "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_NUM_MACHINES": "num_machines",
    **dict.fromkeys(("TRAINER_DYNAMO_BACKEND", "TRAINING_DYNAMO_BACKEND"), "dynamo_backend"),
}
_EXTRA: Final = "TRAINER_EXTRA_ARGS"
_ASSIGNED: Final = re.compile(
    r"(?:export\s+)?(?P<name>[A-Z_a-z]\w*)(?P<adds>\+)?="
    r"(?P<value>\"[^\"]*\"|'[^']*'|.*?)\s*(?:(?<=\s)#.*)?"
)
_USED: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_OTHER_NAMES: Final = {"validation_step_interval": "validation_steps"}


def read(path: Path) -> Draft:
    """Convert a configuration to a job.

    Raises:
        UserError: It cannot be read, or is not of this tool.
    """
    values = _variables(path) if path.suffix.lower() == ENV else parse(path)
    refuse_others(values, path, TITLE)
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a SimpleTuner config: it has no keys")
    theirs: dict[str, Any] = {}
    twice = []
    for key, value in values.items():
        name = normal_key(str(key))
        twice += [name] if name in theirs else []
        theirs[name] = value
    draft = Draft(theirs, path.absolute().parent, defaults=_defaults(theirs))
    draft.apply(_RULES, _PREFIXES, _FIRST)
    published.use_published_model(draft)
    optimizer.use_own_settings(draft)
    for name in twice:
        draft.report.warnings.append(f"{name}: set twice in {path.name}; the later one is used")
    return draft


def _variables(path: Path) -> dict[str, Any]:
    """Return the keys of an older `config.env`: a variable in each line, of which one has flags."""
    variables: dict[str, str] = {}
    for line in read_text(path).splitlines():
        match = _ASSIGNED.fullmatch(line.strip())
        if match is None:
            continue
        value = match["value"].strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        value = _USED.sub(lambda used: variables.get(used[1] or used[2], used[0]), value)
        name = match["name"]
        variables[name] = f"{variables.get(name, '')} {value}".strip() if match["adds"] else value
    extra = variables.pop(_EXTRA, "").split()
    values: dict[str, Any] = {}
    for name, text in variables.items():
        key = _VARIABLES.get(name, name.lower())
        # A switch that is off is not on the command line.
        values[key] = None if text.lower() in ("", "false") else text
    if values.pop("use_bitfit", None) is not None:
        values["layer_freeze_strategy"] = "bitfit"
    return values | split(extra, path.absolute().parent).flags


def _defaults(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the tool's values of keys that are not set under any of their names."""
    defaults = dict(_DEFAULTS)
    lycoris = str(theirs.get("lora_type")).strip().lower() == "lycoris"  # has a file of its own
    if str(theirs.get("model_type") or "lora").strip().lower() == "lora" and not lycoris:
        defaults |= _LORA_DEFAULTS
    if not is_off(theirs.get("use_ema")):
        defaults |= {"ema_decay": 0.995, "ema_validation": "comparison"}
    if not is_off(theirs.get("deepspeed_config")):
        defaults |= _DEEPSPEED_DEFAULTS
    if not is_off(theirs.get("push_to_hub")):
        defaults["model_card_private"] = True
    if theirs.get("validation_prompt") or theirs.get("user_prompt_library"):
        defaults |= _SAMPLE_DEFAULTS
    for other, key in _OTHER_NAMES.items():
        if other in theirs:
            defaults.pop(key, None)
    return defaults


_MODEL: Final[dict[str, Rule]] = {
    "model_family": published.family,
    "model_flavour": published.flavour,
    "model_type": same,
    "pretrained_model_name_or_path": models.set_model,
    "lora_type": rules.lora_type,
    **all_of("lora_rank lora_alpha lora_dropout", rules.unless_lycoris(same)),
    "flux_lora_target": rules.unless_lycoris(rules.target),
    "lora_format": rules.lora_format,
    "lora_init_type": rules.unless_lycoris(
        chosen(
            "lora_init",
            {**dict.fromkeys(("default", "true"), ("kaiming", "")), "gaussian": ("gaussian", "")},
            "adapters are initialized as in peft; others: default, gaussian",
        )
    ),
    "peft_lora_mode": without(training_keys.NO_METHOD, "standard"),
    "init_lora": same,
    "assistant_lora_path": models.set_training_adapter,
    "assistant_lora_weight_name": without("set training_adapter to the file"),
    "assistant_lora_strength": without("a training adapter has its full strength", "1"),
    "assistant_lora_inference_strength": without("samples are made without training_adapter"),
    "disable_assistant_lora": needless("no adapter is the default"),
    "use_dora": rules.unless_lycoris(unless_off("lora_variant", "dora")),
    "controlnet": without("ControlNets are not supported"),
    "control": without("models with control images are not supported"),
    "prediction_type": training_keys.prediction,
    "base_model_precision": training_keys.base_precision,
    "quantize_activations": without("only weights are quantized"),
    "mixed_precision": training_keys.precision,
    "attention_mechanism": rules.kernel,
    "revision": hub.revision,
    **all_of(
        "variant pretrained_t5_model_name_or_path "
        "pretrained_transformer_model_name_or_path pretrained_unet_model_name_or_path",
        without(training_keys.ONE_DIRECTORY),
    ),
    "pretrained_vae_model_name_or_path": rules.vae,
    **all_of(
        "pretrained_transformer_subfolder pretrained_unet_subfolder",
        needless("the directory has diffusers' layout"),
    ),
    **all_of(
        "quantize_via base_model_default_dtype", needless("weights are quantized as they are read")
    ),
    "lycoris_config": rules.lycoris,
    "init_lokr_norm": without("LoKr begins without any effect"),
}

_TRAINING: Final[dict[str, Rule]] = {
    **all_of(
        "seed train_batch_size gradient_accumulation_steps use_ema "
        "gradient_checkpointing gradient_checkpointing_interval ema_decay loss_type huber_c "
        "caption_dropout_probability",
        same,
    ),
    "max_train_steps": rules.steps,
    "max_grad_norm": rules.clip,
    "num_train_epochs": training_keys.epochs,
    "learning_rate": optimizer.rate,
    "optimizer": training_keys.optimizer,
    "optimizer_config": optimizer.settings,
    "optimizer_beta1": named("adam_beta1"),
    "optimizer_beta2": named("adam_beta2"),
    **all_of("adam_beta1 adam_beta2 adam_epsilon adam_weight_decay", optimizer.of_deepspeed),
    "lr_scheduler": optimizer.schedule,
    "lr_warmup_steps": optimizer.warm_up,
    **training_keys.curves(),
    **all_of("lr_scale lr_scale_sqrt", needless("already applied to learning_rate")),
    "grad_clip_method": rules.clip_method,
    "gradient_checkpointing_backend": without("activations are recomputed", "torch"),
    "ema_device": rules.ema_device,
    "ema_update_interval": without("the average is updated every step", "1"),
    "ema_validation": rules.ema_validation,
    "huber_schedule": rules.huber,
    "snr_gamma": training_keys.snr,
    "flow_schedule_shift": rules.shift,
    "flow_schedule_auto_shift": rules.unless_sana(rules.auto_shift),
    "flow_use_uniform_schedule": rules.unless_sana(rules.uniform),
    "flow_sigmoid_scale": rules.unless_sana(named("logit_std")),
    "flux_guidance_mode": without("set train_guidance, the same for all samples", "constant"),
    "flux_guidance_value": rules.trained_guidance,
    "tokenizer_max_length": named("max_sequence_length"),
    "framerate": named("fps"),
    "disable_tf32": training_keys.inverted("allow_tf32"),
    "fully_unload_text_encoder": named("unload_text_encoder"),
    "train_text_encoder": training_keys.text_encoders("lora_rank"),
    "text_encoder_lr": training_keys.text_encoder_rate("train_text_encoder"),
    **all_of("offset_noise input_perturbation", without(training_keys.NOISE)),
    "noise_offset": needless("only for offset_noise, which is not supported"),
    "rescale_betas_zero_snr": without("change the model's scheduler_config.json"),
    **all_of(
        "timestep_bias_strategy flow_use_beta_schedule flux_fast_schedule",
        without("set timestep_sampling, logit_mean and logit_std", "none"),
    ),
    "flux_attention_masked_training": without("as in the stock pipeline"),
    "t5_padding": without("as in the stock pipeline", "unmodified"),
    "layer_freeze_strategy": without("all layers of the denoiser are trained", "none"),
    **all_of(
        "distillation_method refiner_training use_soft_min_snr slider_lora_target "
        "tread_config fuse_qkv_projections diff2flow_enabled diff2flow_loss ltx_train_mode "
        "hidream_use_load_balancing_loss scheduled_sampling_max_step_offset flow_matching_loss "
        "singlora_ramp_up_steps sdxl_refiner_uses_full_range sana_complex_human_instruction "
        "masked_loss_probability",
        without(training_keys.NO_METHOD, "1", "t2v", "compatible"),
    ),
    **all_of(
        "enable_group_offload ramtorch musubi_blocks_to_swap offload_param_path "
        "enable_model_cpu_offload optimizer_offload_gradients enable_chunked_feed_forward",
        without("shard instead (gpus: 4, strategy: fsdp2), or set fsdp_cpu_offload: true"),
    ),
    "accelerate_extra_args": same,
    "accelerate_config": lambda draft, key, value: launch.read_file(draft, key, str(value)),
    **launch.RULES,
}

_OUTPUT: Final[dict[str, Rule]] = {
    **all_of("checkpointing_steps checkpoint_step_interval", named("checkpointing_steps")),
    "checkpoints_total_limit": training_keys.limit("checkpoints_total_limit"),
    "checkpoint_epoch_interval": without("set checkpointing_steps"),
    "checkpointing_rolling_steps": without("set checkpointing_steps and checkpoints_total_limit"),
    "resume_from_checkpoint": without(training_keys.OTHER_CHECKPOINTS, "latest"),
    "output_dir": training_keys.job_name,
    **trackers.RULES,
    "push_to_hub": hub.push,
    "push_checkpoints_to_hub": hub.of_push("push_checkpoints_to_hub"),
    "hub_model_id": hub.of_push("hub_model_id"),
    "model_card_private": hub.of_push("hub_private_repo"),
    **all_of(
        "push_to_hub_background model_card_safe_for_work model_card_note publishing_config "
        "post_upload_script post_checkpoint_script",
        needless("pushes do not delay training, and write a model card"),
    ),
    **all_of(
        "webhook_config webhook_reporting_interval",
        needless("set up notifications for all jobs once, in notify.yaml"),
    ),
}

_SAMPLES: Final[dict[str, Rule]] = {
    "validation_prompt": rules.prompt,
    "user_prompt_library": rules.library,
    "validation_prompt_library": without("list prompts as validation_prompts"),
    **all_of("validation_steps validation_step_interval", named("validation_steps")),
    "validation_epoch_interval": without("set validation_steps"),
    "validation_disable": rules.disabled,
    **all_of(
        "validation_on_startup validation_guidance validation_num_inference_steps validation_seed",
        same,
    ),
    "validation_guidance_real": named("validation_true_cfg_scale"),
    "validation_resolution": training_keys.size,
    "validation_negative_prompt": rules.negative,
    "validation_num_video_frames": named("validation_num_frames"),
    "num_validation_images": without("list a prompt twice with different seeds", "1"),
    **all_of(
        "validation_guidance_rescale validation_guidance_skip_layers",
        without("the stock pipeline's guidance is used"),
    ),
    "validation_randomize": without("every prompt starts from the noise of validation_seed"),
    "validation_method": without("samples come from the stock pipeline", "simpletuner-local"),
    **all_of(
        "validation_using_datasets validation_no_cfg_until_timestep validation_lycoris_strength "
        "validation_torch_compile",
        without("samples come from the stock pipeline", "1"),
    ),
    **all_of(
        "disable_benchmark validation_disable_unconditional validation_noise_scheduler "
        "evaluation_type validation_seed_source num_eval_images validation_torch_compile_mode "
        "pretrained_evaluation_model_name_or_path validation_stitch_input_location",
        needless("samples come from the stock pipeline; no scores are computed"),
    ),
}

_NEEDLESS: Final[dict[str, Rule]] = {
    **all_of(
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision "
        "text_encoder_4_precision text_encoder_limit save_text_encoder "
        "offload_during_startup text_encoder_batch_size",
        needless(training_keys.TEXT_ENCODERS_FREED),
    ),
    **all_of(
        "vae_batch_size vae_enable_tiling vae_enable_slicing vae_enable_patch_conv vae_dtype "
        "keep_vae_loaded offload_during_save fuse_optimizer optimizer_release_gradients "
        "gradient_precision set_grads_to_none torch_num_threads i_know_what_i_am_doing "
        "ema_cpu_only ema_foreach_disable accelerator_cache_clear_interval local_rank "
        "checkpointing_use_tempdir optimizer_cpu_offload_method ignore_final_epochs snr_weight "
        "checkpoints_rolling_total_limit seed_for_each_device enable_watermark prodigy_steps "
        "dynamo_mode dynamo_fullgraph dynamo_dynamic dynamo_use_regional_compilation "
        "disable_segmented_timestep_sampling unet_attention_slice soft_min_snr_sigma_data "
        "noise_offset_probability input_perturbation_steps data_aesthetic_score "
        "training_scheduler_timestep_spacing inference_scheduler_timestep_spacing "
        "sageattention_usage sla_config attention_implementation",
        needless(training_keys.NO_EFFECT),
    ),
}

_RULES: Final[dict[str, Rule]] = {
    **_MODEL,
    **_TRAINING,
    **_OUTPUT,
    **_SAMPLES,
    **_NEEDLESS,
    **simpletuner_data.RULES,
}

# Groups of keys that belong to one thing.
_PREFIXES: Final[dict[str, Rule]] = {
    "crepa_enabled": without(training_keys.NO_METHOD),
    "crepa_": needless("only for crepa_enabled, which is not supported"),
    "nsfw_": needless("only for enable_nsfw_check, which is not supported"),
    "enable_nsfw": without("image contents are not checked"),
    "sd3_": without("dropped captions become an encoded empty caption", "empty_string"),
    "eval_": needless("validation_fraction measures the loss on held-out samples"),
    **all_of(
        "validation_adapter_strength validation_adapter_mode",
        needless("only for validation_adapter_path, which is not supported"),
    ),
    "validation_adapter_": without("samples use only the trained model"),
    "validation_external_": without("no scripts are called"),
    "validation_guidance_skip_": needless(
        "only for validation_guidance_skip_layers, which is not supported"
    ),
    "validation_preview": needless("samples are shown as they are made"),
    "controlnet_": needless("only for ControlNets, which are not supported"),
    "ltx_": needless("only for ltx_train_mode: i2v, which is not supported"),
    "hidream_": needless("only for the load-balancing loss, which is not supported"),
    "scheduled_sampling_": needless("only for scheduled sampling, which is not supported"),
    "group_offload_": needless("only for group offload, which is not supported"),
    "ramtorch_": needless("only for RamTorch, which is not supported"),
    "musubi_": needless("only for block swapping, which is not supported"),
    "distillation_": needless("only for distillation, which is not supported"),
    "refiner_": needless("only for refiners, which are not supported"),
    "timestep_bias_": needless("only for timestep_bias_strategy"),
    "flow_beta_schedule_": needless("only for flow_use_beta_schedule"),
    "flux_guidance_m": needless("only for flux_guidance_mode: random-range"),
    "freeze_encoder_": needless(training_keys.NO_TEXT_ENCODERS),
}

_FIRST: Final = (
    "report_to",
    "push_to_hub",
    "model_family",
    "model_flavour",
    "model_type",
    "pretrained_model_name_or_path",
    "gpu_ids",
    "max_train_steps",
    "train_batch_size",
    "gradient_accumulation_steps",
    "num_processes",
    "data_backend_config",
)
