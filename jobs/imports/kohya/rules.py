"""Rules for the flags of sd-scripts and musubi-tuner, except data and model flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.imports.common import hub, launch, models, trackers, training_keys
from jobs.imports.common.draft import (
    Draft,
    all_of,
    as_number,
    is_off,
    named,
    needless,
    same,
    unless_off,
    when,
    without,
)
from jobs.imports.common.whose import MUSUBI, SD_SCRIPTS
from jobs.imports.kohya import model

if TYPE_CHECKING:
    from jobs.imports.common.draft import Rule

_MODEL: Final = "pretrained_model_name_or_path"
_PART: Final = "a part of the model's directory"
_LOW_MEMORY: Final = "shard instead (gpus: 4, strategy: fsdp2), or set fsdp_cpu_offload: true"

# -- optimizer and schedule ------------------------------------------------------------------

_OPTIMIZERS: Final[training_keys.Words] = {
    **training_keys.OPTIMIZERS,
    "adamw32bit": ("adamw", ""),
    "came": ("came", ""),
}
_DECAY: Final = ("adamw", "adamw_8bit")
_LIKE_HERE: Final[dict[str, dict[str, Any]]] = {
    "adafactor": {"relative_step": False, "scale_parameter": False, "warmup_init": False},
    "prodigy": {
        **dict.fromkeys(("decouple", "use_bias_correction", "safeguard_warmup"), True),
        "d_coef": 1,
    },
}
# What these optimizers do if no argument says so.
_THEIRS: Final[dict[str, dict[str, Any]]] = {
    "adafactor": {"relative_step": True, "scale_parameter": True},
    "prodigy": {"use_bias_correction": False, "safeguard_warmup": False},
}


def _optimizer_of(draft: Draft) -> tuple[str, tuple[Any, str] | None]:
    """Return the optimizer's name there, and what it is here; None for nothing."""
    word = str(draft.get("optimizer_type") or "").strip()
    if not word:
        word = "adamw8bit" if draft.on("use_8bit_adam") else "adamw"
        word = "lion" if draft.on("use_lion_optimizer") else word
    plain = word.rpartition(".")[2].lower()
    paged = plain.startswith("paged")
    plain = plain.removeprefix("paged").replace("schedulefree", "_schedulefree").replace("__", "_")
    ours = _OPTIMIZERS.get(plain)
    why = "state is not paged to host memory" if paged else ""
    return plain, ours and (ours[0], why or ours[1])


def optimizer_defaults(draft: Draft) -> dict[str, Any]:
    """Return the optimizer, and what it is made with there."""
    name, ours = _optimizer_of(draft)
    defaults: dict[str, Any] = {}
    if "optimizer_type" not in draft.theirs and not draft.on("use_8bit_adam"):
        defaults["optimizer_type"] = "AdamW"
    if ours and ours[0] in _DECAY:
        defaults["optimizer_args.weight_decay"] = 1e-2
    arguments = _THEIRS.get(name, {})
    return defaults | {f"optimizer_args.{name}": value for name, value in arguments.items()}


def _optimizer(draft: Draft, key: str, value: Any) -> None:
    name, ours = _optimizer_of(draft)
    if key != "optimizer_type" and is_off(value):
        draft.unneeded(key, "off is the default")
    elif ours is None:
        draft.unsupported(key, f"{name} is not supported; adamw is used")
        draft.report.to_fill_in.append(f"learning_rate: check it; {name} is not supported")
    else:
        draft.take(key, "optimizer", *ours)


def _argument(draft: Draft, key: str, value: Any) -> None:
    """Take an argument of the optimizer that is fixed here, and perhaps otherwise there."""
    name, argument = draft.values.get("optimizer", "adamw"), key.rpartition(".")[2]
    fixed = _LIKE_HERE.get(name, {})
    text = str(value).strip().lower()
    if argument in fixed and text in (str(fixed[argument]).lower(), f"{fixed[argument]}.0"):
        draft.unneeded(key, "always so here")
        return
    draft.unsupported(key, f"{argument} is {str(fixed.get(argument, 'not set')).lower()} here")
    if argument == "relative_step":
        draft.report.to_fill_in.append("learning_rate: set it; there, adafactor finds its own")


def _epsilon(draft: Draft, key: str, value: Any) -> None:
    if as_number(value) is None:
        draft.unneeded(key, "the optimizer's own")
    else:
        draft.take(key, "adam_epsilon", value, "the equivalent key")


def _rate(draft: Draft, key: str, value: Any) -> None:
    other = draft.theirs.get("unet_lr")
    full = draft.values["model_type"] == "full"
    if key == "unet_lr" and full:
        draft.unneeded(key, "only for a LoRA")
    elif key == "learning_rate" and not full and not is_off(other):
        draft.unneeded(key, "unet_lr is used")
    else:
        draft.take(key, "learning_rate", value, "" if key == "learning_rate" else "the denoiser's")


def _schedule(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower().partition(":")[0]
    if str(draft.values.get("optimizer")) == "adamw_schedule_free":
        draft.take(key, "lr_scheduler", "constant", "a schedule-free optimizer has no other there")
    elif word == "cosine_with_min_lr":
        if draft.take(key, "lr_scheduler", "cosine", "it ends at lr_end"):
            rate = draft.number("unet_lr") or draft.number("learning_rate") or 0.0
            draft.values["lr_end"] = rate * (draft.number("lr_scheduler_min_lr_ratio") or 0.0)
    elif word == "adafactor":
        draft.take(key, "lr_scheduler", "constant", "the rate that is set")
    else:
        training_keys.schedule(draft, key, value)
        if word == "polynomial":
            draft.values["lr_end"] = 1e-7  # of diffusers' schedule


def _warm_up(draft: Draft, key: str, value: Any) -> None:
    """Take steps, or a share of all steps."""
    text, number = str(value).strip(), as_number(value)
    share = as_number(text[:-1]) if text.endswith("%") else None
    share = share / 100 if share is not None else number if number and number < 1 else None
    steps = draft.number("max_train_steps")
    constant = draft.values.get("lr_scheduler", "constant") == "constant"
    if number == 0 or (constant and (number or share)):
        draft.unneeded(key, "a constant rate has none" if number else "off is the default")
    elif share is None:
        draft.take(key, "lr_warmup_steps", value)
    elif steps is None or not is_off(draft.get("max_train_epochs")):
        draft.unsupported(key, "a share of the steps; set lr_warmup_steps")
    else:
        draft.take(key, "lr_warmup_steps", int(share * steps), "of max_train_steps")


def _epochs(draft: Draft, key: str, value: Any) -> None:
    """Take a length in epochs, which wins over one in steps."""
    if is_off(value):
        draft.unneeded(key, "max_train_steps is used")
    else:
        draft.take(key, "num_train_epochs", value, "the equivalent key")


def _steps(draft: Draft, key: str, value: Any) -> None:
    if is_off(draft.get("max_train_epochs")):
        draft.take(key, "max_train_steps", value)
    else:
        draft.unneeded(key, "max_train_epochs is used")


# -- loss and precision ----------------------------------------------------------------------


def _loss(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if word == "l1":
        training_keys.mean_absolute(draft, key)
    else:
        draft.take(key, "loss_type", value)


_of_huber: Final = when(
    lambda draft: str(draft.get("loss_type")).strip().lower() in ("huber", "smooth_l1"),
    same,
    "only for the losses huber and smooth_l1",
)


def _reads_guidance(draft: Draft) -> bool:
    family = draft.values["model_family"]
    fixed = "dit" in draft.theirs and family != "hunyuanvideo"  # at 1
    return family in ("flux", "hunyuanvideo") and not fixed


def _denoising(why: str) -> Rule:
    """Make a rule for a method that only epsilon and v-prediction models have."""
    return when(
        lambda draft: models.family_of(draft).objective != "flow",
        without(why),
        "only for epsilon and v-prediction models",
    )


def _fp8(draft: Draft, key: str, value: Any) -> None:
    if is_off(value) or draft.values["model_type"] == "full":
        draft.unneeded(key, "off, or only for a LoRA")
    else:
        ours = "fp8_scaled" if draft.on("fp8_scaled") else "fp8"
        draft.take(key, "base_precision", ours, "of the frozen base")


def _swap(draft: Draft, key: str, value: Any) -> None:
    if draft.values["model_type"] == "full" and not is_off(value):
        draft.unsupported(key, _LOW_MEMORY)
    else:
        unless_off("swap_blocks", why="the equivalent key")(draft, key, value)


def _dtype(draft: Draft, key: str, value: Any) -> None:
    word = {"float": "fp32"}.get(str(value).strip().lower(), value)
    draft.take(key, "export_dtype", word, "precision of exports")


# -- output ----------------------------------------------------------------------------------


def _trackers(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    trackers.report_to(draft, key, "tensorboard,wandb" if word == "all" else value)


def _logging_dir(draft: Draft, key: str, value: Any) -> None:
    if "log_with" not in draft.theirs:
        draft.take(key, "report_to", ["tensorboard"], "a logging_dir turns it on")
    else:
        trackers.logging_dir(draft, key, value)


def _repository(draft: Draft, key: str, value: Any) -> None:
    if draft.take(key, "hub_model_id", value, "with push_to_hub: true"):
        draft.values["push_to_hub"] = True


def _visibility(draft: Draft, key: str, value: Any) -> None:
    private = str(value).strip().lower() != "public"
    hub.of_push("hub_private_repo")(draft, key, private)


def _directory(draft: Draft, key: str, value: Any) -> None:
    if "output_name" in draft.theirs:
        draft.unneeded(key, training_keys.OWN_DIRECTORIES)
    else:
        training_keys.job_name(draft, key, value)


def _compile(draft: Draft, key: str, value: Any) -> None:
    word = str(value).strip().lower()
    if is_off(word):
        draft.unneeded(key, "off is the default")
    elif key == "dynamo_backend" and "dit" in draft.theirs:  # a switch of its own
        launch.RULES["dynamo_backend"](draft, key, value)
    elif draft.on("torch_compile") or draft.on("compile"):
        draft.take(key, "torch_compile_backend", word, "the equivalent key")
    else:
        draft.unneeded(key, "torch_compile is off")


_COMMON: Final[dict[str, Rule]] = {
    # -- adapter
    "network_dim": model.rank,
    "network_alpha": model.alpha,
    "network_dropout": model.dropout,
    "network_weights": named("init_lora"),
    "dim_from_weights": without("set lora_rank to the file's"),
    **all_of(
        "base_weights base_weights_multiplier",
        without("fuse it into the model (`fuse_lora`, `save_pretrained`)"),
    ),
    "scale_weight_norms": without(training_keys.NO_METHOD),
    **all_of(
        "network_args.algo network_args.train_blocks network_args.split_qkv",
        needless("read with network_module"),
    ),
    "network_args.factor": training_keys.of_lokr("lokr_factor"),
    "network_args.full_matrix": training_keys.of_lokr("lokr_full_matrix"),
    "network_args.dora_wd": unless_off("lora_variant", "dora"),
    "network_args.rs_lora": unless_off("lora_variant", "rslora"),
    "network_args.dropout": model.dropout,
    **all_of(
        "network_args.conv_dim network_args.conv_alpha",
        without("convolutions get no adapter", "1"),
    ),
    "network_args.preset": without("set lora_target_modules, lora_exclude_modules", "full"),
    "network_args.train_t5xxl": without(training_keys.NO_TEXT_ENCODERS),
    "network_args.verbose": needless(training_keys.NO_EFFECT),
    # -- training
    **all_of("learning_rate unet_lr", _rate),
    **all_of("optimizer_type use_8bit_adam use_lion_optimizer", _optimizer),
    "optimizer_args.weight_decay": named("weight_decay"),
    **all_of(
        "optimizer_args.relative_step optimizer_args.scale_parameter optimizer_args.warmup_init "
        "optimizer_args.decouple optimizer_args.use_bias_correction optimizer_args.d_coef "
        "optimizer_args.safeguard_warmup",
        _argument,
    ),
    "optimizer_args.betas": training_keys.betas,
    "optimizer_args.eps": _epsilon,
    "lr_scheduler": _schedule,
    "lr_warmup_steps": _warm_up,
    "lr_scheduler_num_cycles": training_keys.curve("cosine_with_restarts", "lr_num_cycles"),
    "lr_scheduler_power": training_keys.curve("polynomial", "lr_power"),
    "lr_scheduler_min_lr_ratio": needless("read with lr_scheduler"),
    **all_of("lr_decay_steps lr_scheduler_timescale", needless("only for schedules not here")),
    "lr_scheduler_type": without("set lr_scheduler: constant, linear, cosine, or another"),
    "max_train_steps": _steps,
    "max_train_epochs": _epochs,
    **all_of("gradient_accumulation_steps gradient_checkpointing max_grad_norm seed", same),
    "mixed_precision": training_keys.precision,
    **all_of("full_bf16 full_fp16", needless("trained weights stay in fp32")),
    **all_of("fp8_base fp8_base_unet", _fp8),
    "fp8_scaled": needless("read with fp8_base"),
    "blocks_to_swap": _swap,
    **all_of("torch_compile compile", named("torch_compile")),
    **all_of("dynamo_backend compile_backend", _compile),
    "guidance_scale": when(
        _reads_guidance,
        named("train_guidance", "the model's guidance input"),
        "not read by this script",
    ),
    "timestep_sampling": model.sampling,
    **all_of(
        "discrete_flow_shift sigmoid_scale training_shift logit_mean logit_std mode_scale "
        "preserve_distribution_shape",
        needless("read with timestep_sampling or weighting_scheme"),
    ),
    "datasets": without("move them to another file, and name it as dataset_config"),
    # -- output
    "output_name": training_keys.job_name,
    "output_dir": _directory,
    "save_precision": _dtype,
    "save_every_n_steps": named("checkpointing_steps"),
    **all_of("save_every_n_epochs save_n_epoch_ratio", without("set checkpointing_steps")),
    **all_of(
        "save_last_n_epochs save_last_n_steps save_last_n_epochs_state save_last_n_steps_state",
        without("set checkpoints_total_limit"),
    ),
    **all_of(
        "save_state save_state_on_train_end", needless("every checkpoint can be resumed from")
    ),
    **all_of(
        "resume resume_from_huggingface initial_epoch initial_step skip_until_initial_step",
        without(training_keys.OTHER_CHECKPOINTS),
    ),
    "huggingface_repo_id": _repository,
    "huggingface_repo_visibility": _visibility,
    "log_with": _trackers,
    "logging_dir": _logging_dir,
    "log_tracker_name": trackers.of_trackers("tracker_project_name"),
    "wandb_run_name": trackers.of_trackers("tracker_run_name"),
    "log_tracker_config": without("set tracker_project_name and tracker_run_name"),
    **all_of(
        "vae_batch_size cache_latents cache_latents_to_disk cache_text_encoder_outputs "
        "cache_text_encoder_outputs_to_disk text_encoder_batch_size skip_cache_check",
        needless(training_keys.OWN_CACHES),
    ),
    **all_of(
        "sdpa xformers mem_eff_attn flash_attn flash3 split_attn sage_attn diffusers_xformers "
        "use_flash_attn use_sage_attn use_32bit_attention",
        needless("attention_backend: auto chooses"),
    ),
    **all_of(
        "clip_l clip_g t5xxl t5 clip ae gemma2 text_encoder text_encoder1 text_encoder2 byt5 "
        "image_encoder tokenizer_cache_dir ",
        needless(_PART),
    ),
    **all_of(
        "max_data_loader_n_workers persistent_data_loader_workers lowram highvram no_half_vae "
        "ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph log_prefix log_config "
        "no_metadata training_comment save_model_as use_safetensors mem_eff_save "
        "cpu_offload_checkpointing gradient_checkpointing_cpu_offload output_config config_file "
        "disable_mmap_load_safetensors huggingface_repo_type "
        "huggingface_path_in_repo save_state_to_huggingface async_upload console_log_level "
        "console_log_file console_log_simple show_timesteps model_type "
        "skip_latents_validity_check fused_backward_pass fused_optimizer_groups "
        "blockwise_fused_optimizers dataset_class split_mode t5xxl_device t5xxl_dtype "
        "save_clip save_t5xxl validation_seed max_validation_steps controlnet_model_name_or_path "
        "double_blocks_to_swap single_blocks_to_swap",
        needless(training_keys.NO_EFFECT),
    ),
}

_SD: Final[dict[str, Rule]] = {
    _MODEL: model.base,
    "vae": without(training_keys.ONE_DIRECTORY),
    "network_module": model.network(SD_SCRIPTS),
    "network_train_unet_only": model.unet_only,
    "network_train_text_encoder_only": without("only the denoiser is trained, not text encoders"),
    "text_encoder_lr": model.text_rate,
    "stop_text_encoder_training": model.text_training,
    "v2": needless("set by model_flavour"),
    "v_parameterization": training_keys.v_prediction,
    "max_token_length": _denoising("captions are cut at the text encoder's 77 tokens"),
    "clip_skip": model.clip_skip,
    **all_of("t5xxl_max_token_length gemma2_max_token_length", named("max_sequence_length")),
    **all_of("apply_t5_attn_mask apply_lg_attn_mask", model.attention_mask),
    "weighting_scheme": model.weighting,
    "model_prediction_type": model.prediction_type,
    **all_of("min_timestep max_timestep", model.sd_timestep),
    "min_snr_gamma": training_keys.snr,
    "zero_terminal_snr": _denoising("change the model's scheduler_config.json"),
    **all_of(
        "debiased_estimation_loss scale_v_pred_loss_like_noise_pred v_pred_like_loss "
        "multires_noise_iterations noise_offset adaptive_noise_scale",
        _denoising(training_keys.NOISE),
    ),
    "ip_noise_gamma": without(training_keys.NOISE),
    **all_of(
        "noise_offset_random_strength ip_noise_gamma_random_strength multires_noise_discount",
        needless("only for noise that is not supported"),
    ),
    "loss_type": _loss,
    **all_of("huber_c huber_schedule", _of_huber),
    "huber_scale": without("set huber_c", "1"),
    **all_of("epoch sdxl noise_offset_type", needless("not read by sd-scripts")),
    "weighted_captions": without("captions are used unchanged"),
    **all_of(
        "train_text_encoder learning_rate_te learning_rate_te1 learning_rate_te2 learning_rate_te3 "
        "train_t5xxl",
        without(training_keys.NO_TEXT_ENCODERS),
    ),
    **all_of("use_t5xxl_cache_only no_token_padding", needless(training_keys.NO_EFFECT)),
    **all_of("block_lr num_last_block_to_freeze", without("all layers have the same rate")),
    **all_of(
        "clip_l_dropout_rate clip_g_dropout_rate t5_dropout_rate",
        without("caption_dropout_probability drops a caption for all text encoders"),
    ),
    **all_of(
        "pos_emb_random_crop_rate enable_scaled_pos_embed",
        without("as in the stock pipeline"),
    ),
    "system_prompt": model.system_prompt,
    "validate_every_n_steps": named("validation_loss_steps"),
    "validate_every_n_epochs": without("set validation_loss_steps"),
    "deepspeed": without("DeepSpeed is not supported; strategy: fsdp2 shards the same state"),
    **all_of(
        "zero_stage offload_optimizer_device offload_optimizer_nvme_path offload_param_device "
        "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model "
        "fp16_master_weights_and_gradients",
        needless("only for deepspeed"),
    ),
}

_MUSUBI: Final[dict[str, Rule]] = {
    "dit": model.base,
    "vae": needless(_PART),
    "network_module": model.network(MUSUBI),
    "weighting_scheme": model.musubi_weighting,
    **all_of("min_timestep max_timestep", model.timestep),
    "num_timestep_buckets": without("noise levels are drawn one by one", "1"),
    **all_of("task model_version edit edit_plus", needless("set by model_flavour")),
    "dit_high_noise": model.two_experts,
    "one_frame": without(training_keys.NO_METHOD),
    "force_v2_1_time_embedding": without(training_keys.NO_METHOD),
    "num_layers": without("all layers are trained"),
    "remove_first_image_from_target": without(training_keys.NO_METHOD),
    "trainable_modules": without("the full denoiser is trained", "."),
    "cuda_allow_tf32": named("allow_tf32"),
    **all_of(
        "fp8_llm fp8_t5 fp8_vl fp8_text_encoder text_encoder_dtype",
        needless(training_keys.TEXT_ENCODERS_FREED),
    ),
    **all_of(
        "compile_mode compile_dynamic compile_fullgraph compile_cache_size_limit "
        "cuda_cudnn_benchmark dynamo_mode dynamo_fullgraph dynamo_dynamic "
        "use_pinned_memory_for_block_swap block_swap_h2d_only block_swap_ring_size "
        "img_in_txt_in_offloading disable_numpy_memmap dit_dtype dit_in_channels vae_dtype "
        "vae_tiling vae_chunk_size vae_spatial_tile_sample_min_size vae_cache_cpu vae_sample_size "
        "vae_enable_patch_conv timestep_boundary offload_inactive_dit "
        "block_swap_optimizer_patch_params ",
        needless(training_keys.NO_EFFECT),
    ),
}

PREFIXES: Final[dict[str, Rule]] = {
    "network_args.": without("not supported", "1"),
    "optimizer_args.": _argument,
    "lr_scheduler_args.": without("set lr_scheduler, lr_end, lr_num_cycles and lr_power"),
    "metadata_": needless("exports have metadata of their own"),
    "wandb_": needless("log in with `wandb login`"),
}


def table_of(tool: str) -> dict[str, Rule]:
    """Return a tool's rules, except those for data keys."""
    return _COMMON | (_MUSUBI if tool == MUSUBI else _SD)


def finish(draft: Draft, full: bool) -> None:
    """Say what no single key does."""
    if full:
        for key in ("lora_rank", "lora_alpha", "lora_variant", "lora_target_modules"):
            draft.values.pop(key, None)
    if "dit" not in draft.theirs and {"dataset", "datasets"} & draft.values.keys():
        draft.values["missing_captions"] = "empty"
        draft.assume("captions", "images without any are trained", missing_captions="empty")
