"""What another value of each setting does to a run that goes on from a checkpoint: one table."""

from __future__ import annotations

from typing import Final, Literal

# What another value of a setting does to a run that goes on from a checkpoint:
#   same        nothing but rounding, speed, memory, or what is written besides
#   changes     other weights, or other exports, than those of a run never stopped
#   impossible  the checkpoint's tensors do not fit, or mean something else
#   ruled       depends on other settings too; a function below decides
Effect = Literal["same", "changes", "impossible", "ruled"]

EFFECTS: Final[dict[str, Effect]] = {
    # what is trained
    "name": "same",
    "model_type": "impossible",
    "model_family": "impossible",
    "model_flavour": "impossible",  # where it names one of two denoisers; else it is only a word
    "pretrained_model_name_or_path": "ruled",
    # batch and steps
    "train_batch_size": "ruled",
    "gradient_accumulation_steps": "ruled",
    "num_processes": "ruled",
    "gpus": "ruled",
    "context_parallel_size": "ruled",
    "max_train_steps": "ruled",
    # optimizer and schedule
    "optimizer": "impossible",  # its state is another
    "learning_rate": "changes",
    "adam_beta1": "changes",
    "adam_beta2": "changes",
    "adam_epsilon": "changes",
    "weight_decay": "changes",
    "lr_scheduler": "ruled",
    "lr_warmup_steps": "ruled",
    "lr_end": "ruled",
    "lr_num_cycles": "ruled",
    "lr_power": "ruled",
    "max_grad_norm": "changes",
    "on_nonfinite": "same",  # while all is finite
    # precision and speed
    "mixed_precision": "changes",
    "allow_tf32": "changes",
    "gradient_checkpointing": "same",
    "gradient_checkpointing_policy": "same",
    "gradient_checkpointing_interval": "same",
    "torch_compile": "same",
    "torch_compile_backend": "same",
    "attention_backend": "same",
    "deterministic": "same",
    # draws and loss
    "seed": "changes",
    "timestep_sampling": "changes",
    "logit_mean": "changes",
    "logit_std": "changes",
    "mode_scale": "changes",
    "flow_shift": "changes",
    "sigma_min": "changes",
    "sigma_max": "changes",
    "loss_weighting": "changes",
    "loss_type": "changes",
    "huber_c": "changes",
    "snr_gamma": "changes",
    "caption_dropout_probability": "changes",
    "size_conditioning": "changes",
    "train_guidance": "changes",
    # moving average
    "use_ema": "ruled",
    "ema_decay": "changes",
    "ema_device": "same",
    # adapter
    "lora_rank": "impossible",
    "lora_alpha": "ruled",
    "lora_dropout": "changes",
    "lora_variant": "impossible",
    "lora_rank_pattern": "impossible",
    "lora_alpha_pattern": "changes",
    "lora_init": "same",  # it was drawn when the job began
    "init_lora": "same",  # it was read when the job began
    "lora_placement": "same",
    "lora_target_modules": "ruled",
    "lora_exclude_modules": "ruled",
    "lora_experts": "ruled",
    "base_precision": "changes",
    "base_matmul": "ruled",
    "swap_blocks": "same",
    "keep_in_full_precision": "changes",
    # devices
    "device": "same",
    "share_gpus": "same",
    "strategy": "same",
    "dp_replicate_size": "same",
    "context_parallel_comm_strategy": "same",
    "deepspeed_config": "same",  # refused elsewhere
    "accelerate_config": "same",
    "accelerate_extra_args": "same",
    "num_machines": "same",
    "machine_rank": "same",
    "main_process_ip": "same",
    "main_process_port": "same",
    "fsdp_enable": "same",
    "fsdp_version": "same",
    "fsdp_reshard_after_forward": "same",
    "fsdp_cpu_offload": "same",
    "fsdp_activation_checkpointing": "same",
    "fsdp_forward_prefetch": "same",
    "fsdp_backward_prefetch": "same",
    "fsdp_state_dict_type": "same",  # either layout is loaded
    "fsdp_cpu_ram_efficient_loading": "same",
    "fsdp_limit_all_gathers": "same",
    "fsdp_auto_wrap_policy": "same",
    "fsdp_min_num_params": "same",
    "fsdp_transformer_layer_cls_to_wrap": "same",
    # data
    "dataset": "ruled",
    "datasets": "ruled",
    "resolution": "changes",
    "resolution_mode": "changes",
    "max_upscale": "changes",
    "conditioning_resolution": "changes",
    "max_aspect_ratio": "changes",
    "max_bucket_aspect_ratio": "changes",
    "crop": "changes",
    "crop_variants": "changes",
    "random_flip": "changes",
    "num_frames": "changes",
    "fps": "changes",
    "prior_loss_weight": "changes",
    "class_prompt": "changes",
    "num_class_images": "changes",
    "masked_loss": "changes",
    "unmasked_weight": "changes",
    "caption_lines": "changes",
    "missing_captions": "changes",
    "trigger_word": "changes",
    "shuffle_captions": "changes",
    "caption_shuffles": "changes",
    "keep_tags": "changes",
    "max_sequence_length": "changes",
    "cache_text_embeddings": "same",
    "unload_text_encoder": "same",
    "shard_text_encoders": "same",
    "text_encoder_precision": "changes",
    "cache_dir": "same",
    "prefetch_steps": "same",
    # output
    "checkpointing_steps": "same",
    "checkpoints_total_limit": "same",
    "checkpointing_async": "same",
    "on_save_failure": "same",
    "resume_from_checkpoint": "same",
    "export_formats": "same",
    "export_dtype": "same",
    # samples; only the share of the data that is held out is missing from the training
    "validation_prompts": "same",
    "validation_steps": "same",
    "validation_num_inference_steps": "same",
    "validation_guidance": "same",
    "validation_resolution": "same",
    "validation_seed": "changes",  # it chooses what is held out
    "validation_negative_prompt": "same",
    "validation_num_frames": "same",
    "validation_true_cfg_scale": "same",
    "validation_on_startup": "same",
    "validation_fraction": "changes",
    "validation_loss_steps": "same",
    "validation_timesteps": "same",
    # tracking
    "report_to": "same",
    "tracker_project_name": "same",
    "tracker_run_name": "same",
    "logging_dir": "same",
    # running
    "priority": "same",
    "stop_grace_seconds": "same",
    "hang_timeout": "same",
    "max_restarts": "same",
    "auto_resume": "same",
    "distributed_timeout_seconds": "same",
}
