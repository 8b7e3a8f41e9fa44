"""Jobs of OneTrainer, diffusion-pipe and ltx-trainer, and of SimpleTuner's older `config.env`."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs.errors import UserError
from jobs.imports.common.import_report import Kind
from jobs.imports.diffusion_pipe import config as diffusion_pipe
from jobs.imports.imported import (
    import_diffusion_pipe,
    import_file,
    import_ltx_trainer,
    import_onetrainer,
)
from jobs.imports.ltx_trainer import config as ltx_trainer
from jobs.imports.onetrainer import config as onetrainer
from jobs.imports.onetrainer import data as onetrainer_data
from jobs.spec.file.load import load_spec
from jobs.spec.keys.prompts import requests_of
from jobs.spec.values.datasets import datasets_of
from tests.support.jobs.imported import ODD, check, entries, entry
from tests.support.paths import IMPORT_EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.imports.imported import Imported

Lost = Kind.UNSUPPORTED
Needless = Kind.UNNEEDED
Cells = list[tuple[dict[str, Any], dict[str, Any] | Kind]]

# Of Nerogar/OneTrainer's TrainConfig and ConceptConfig, of August 2026.
CONFIG_KEYS: Final = """
__version training_method model_type debug_mode debug_dir workspace_dir cache_dir
huggingface_cache_dir offline_mode tensorboard tensorboard_expose tensorboard_always_on
tensorboard_port validation validate_after validate_after_unit continue_last_backup
prevent_overwrites include_train_config multi_gpu device_indexes gradient_reduce_precision
fused_gradient_reduce async_gradient_reduce async_gradient_reduce_buffer base_model_name
output_dtype output_model_format output_model_destination async_offloading
force_circular_padding compile concept_file_name concepts aspect_ratio_bucketing
latent_caching clear_cache_before_training learning_rate_scheduler
custom_learning_rate_scheduler scheduler_params learning_rate learning_rate_warmup_steps
learning_rate_cycles learning_rate_min_factor epochs batch_size gradient_accumulation_steps
ema ema_decay ema_update_step_interval dataloader_threads train_device temp_device train_dtype
fallback_train_dtype enable_autocast_cache only_cache resolution frames attention_mechanism
mse_strength mae_strength log_cosh_strength huber_strength huber_delta vb_loss_strength
loss_weight_fn loss_weight_strength dropout_probability loss_scaler learning_rate_scaler
clip_grad_norm offset_noise_weight generalized_offset_noise perturbation_noise_weight
rescale_noise_scheduler_to_zero_terminal_snr force_v_prediction force_epsilon_prediction
min_noising_strength max_noising_strength timestep_distribution noising_weight noising_bias
timestep_shift dynamic_timestep_shifting text_encoder_layer_skip text_encoder_sequence_length
text_encoder_2_layer_skip text_encoder_2_sequence_length text_encoder_3_layer_skip
text_encoder_4_layer_skip masked_training unmasked_probability unmasked_weight
normalize_masked_area_loss masked_prior_preservation_weight custom_conditioning_image
layer_filter layer_filter_preset layer_filter_regex embedding_learning_rate
preserve_embedding_norm additional_embeddings embedding_weight_dtype peft_type lora_model_name
lora_rank lora_alpha lora_decompose lora_decompose_norm_epsilon lora_decompose_output_axis
lora_weight_dtype bundle_additional_embeddings oft_block_size oft_block_share oft_scaled
lokr_dim lokr_decompose_both lokr_decompose_factor lokr_use_tucker lokr_weight_decompose
lokr_dora_on_output lokr_full_matrix lokr_vec_trick optimizer_defaults
sample_definition_file_name samples sample_after sample_after_unit sample_skip_first
sample_image_format sample_video_format sample_audio_format samples_to_tensorboard
non_ema_sampling backup_after backup_after_unit rolling_backup rolling_backup_count
backup_before_save save_every save_every_unit save_skip_first save_filename_prefix
"""
OPTIMIZER_KEYS: Final = """
__version optimizer adam_w_mode alpha amsgrad beta1 beta2 beta3 bias_correction block_wise
capturable centered clip_threshold d0 d_coef dampening decay_rate decouple differentiable eps
eps2 foreach fsdp_in_use fused fused_back_pass growth_rate initial_accumulator_value
initial_accumulator is_paged log_every lr_decay max_unorm maximize min_8bit_size
quant_block_size momentum nesterov no_prox optim_bits percentile_clipping r relative_step
safeguard_warmup scale_parameter stochastic_rounding use_bias_correction use_triton
warmup_init weight_decay weight_lr_power decoupled_decay fixed_decay rectify
degenerated_to_sgd k xi n_sma_threshold ams_bound adanorm adam_debias slice_p cautious
weight_decay_by_lr prodigy_steps use_speed split_groups split_groups_mean factored
factored_fp32 use_stableadamw use_cautious use_grams use_adopt d_limiter use_schedulefree
use_orthograd nnmf_factor orthogonal_gradient use_atan2 use_AdEMAMix beta3_ema alpha_grad
beta1_warmup min_beta1 Simplified_AdEMAMix kourkoutas_beta schedulefree_c ns_steps
MuonWithAuxAdam muon_hidden_layers muon_adam_regex muon_adam_lr muon_te1_adam_lr
muon_te2_adam_lr muon_adam_config rms_rescaling normuon_variant beta2_normuon low_rank_ortho
ortho_rank accelerated_ns cautious_wd approx_mars auto_kappa_p compile
"""
PART_KEYS: Final = """
__version model_name include train stop_training_after stop_training_after_unit learning_rate
weight_dtype dropout_probability train_embedding attention_mask guidance_scale
gradient_checkpointing offload_fraction activation_offloading
"""
CONCEPT_KEYS: Final = """
__version image.__version image.enable_crop_jitter image.enable_random_flip
image.enable_fixed_flip image.enable_random_rotate image.enable_fixed_rotate
image.random_rotate_max_angle image.enable_random_brightness image.enable_fixed_brightness
image.random_brightness_max_strength image.enable_random_contrast image.enable_fixed_contrast
image.random_contrast_max_strength image.enable_random_saturation
image.enable_fixed_saturation image.random_saturation_max_strength image.enable_random_hue
image.enable_fixed_hue image.random_hue_max_strength image.enable_resolution_override
image.resolution_override image.enable_random_circular_mask_shrink
image.enable_random_mask_rotate_crop text.__version text.prompt_source text.prompt_path
text.enable_tag_shuffling text.tag_delimiter text.keep_tags_count text.tag_dropout_enable
text.tag_dropout_mode text.tag_dropout_probability text.tag_dropout_special_tags_mode
text.tag_dropout_special_tags text.tag_dropout_special_tags_regex text.caps_randomize_enable
text.caps_randomize_mode text.caps_randomize_probability text.caps_randomize_lowercase name
path seed enabled type include_subdirectories image_variations text_variations balancing
balancing_strategy loss_weight concept_stats
"""
PARTS: Final = (
    "unet prior transformer unconditional_transformer text_encoder text_encoder_2 text_encoder_3 "
    "text_encoder_4 vae effnet_encoder decoder decoder_text_encoder decoder_vqgan"
)
# Of tdrussell/diffusion-pipe's train.py, models and utils/dataset.py, of August 2026.
PIPE_KEYS: Final = """
output_dir dataset eval_datasets epochs max_steps micro_batch_size_per_gpu
image_micro_batch_size_per_gpu pipeline_stages gradient_accumulation_steps gradient_clipping
warmup_steps force_constant_lr lr_scheduler blocks_to_swap huber_delta smooth_l1_beta
eval_every_n_epochs eval_every_n_steps eval_every_n_examples eval_before_first_step
eval_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu
eval_gradient_accumulation_steps disable_block_swap_for_eval save_every_n_epochs
save_every_n_steps save_every_n_examples checkpoint_every_n_epochs checkpoint_every_n_minutes
activation_checkpointing reentrant_activation_checkpointing partition_method partition_split
save_dtype caching_batch_size map_num_proc compile steps_per_print video_clip_mode x_axis_examples
logging_steps uncond_fraction resume_from_checkpoint regenerate_cache
model.type model.dtype model.transformer_dtype model.diffusion_model_dtype model.guidance
model.diffusers_path model.ckpt_path model.checkpoint_path model.single_file_path
model.transformer_path model.diffusion_model model.vae model.vae_path model.llm_path
model.clip_path model.text_encoder_path model.text_encoders model.t5_path model.llama3_path
model.llama3_4bit model.max_llama3_sequence_length model.max_sequence_length
model.merge_adapters model.timestep_sample_method model.sigmoid_scale model.shift
model.flux_shift model.lumina_shift model.min_t model.max_t model.bypass_guidance_embedding
model.first_frame_conditioning_p model.v_pred model.min_snr_gamma model.debiased_estimation_loss
model.unet_lr model.text_encoder_1_lr model.text_encoder_2_lr model.cache_text_embeddings
model.text_encoder_fp8
adapter.type adapter.rank adapter.alpha adapter.dtype adapter.dropout adapter.rank_dropout
adapter.decompose_factor adapter.init_from_existing adapter.fuse_adapters adapter.exclude_modules
optimizer.type optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay
optimizer.beta2_half_life optimizer.gradient_release
monitoring.enable_wandb monitoring.wandb_api_key monitoring.wandb_tracker_name
monitoring.wandb_run_name
"""
DIRECTORY_KEYS: Final = """
path resolutions num_repeats enable_ar_bucket min_ar max_ar num_ar_buckets ar_buckets size_buckets
frame_buckets mask_path control_path default_mask_file caption_prefix shuffle_tags
cache_shuffle_num cache_shuffle_delimiter skip_empty_caption online_captions shuffle_metadata
subsample_ratio
"""


def one(folder: Path, *, concept: Any = None, **keys: Any) -> Imported:
    """Import a LoRA of FLUX.1 for OneTrainer; `__` in a key is a dot."""
    values: dict[str, Any] = {"training_method": "LORA", "model_type": "FLUX_DEV_1"}
    values |= {"layer_filter": "attn", "tensorboard": False, "__version": 11}
    if concept is not None:
        values["concepts"] = [{"path": "d", "__version": 2} | concept]
    for key, value in keys.items():
        name, _, inner = key.partition("__")
        if inner:
            values.setdefault(name, {})[inner] = value
        else:
            values[key] = value
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return import_onetrainer(path)


SDXL_TEXTS: Final[dict[str, Any]] = {
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "text_encoder__train": True,
    "text_encoder_2__train": True,
}
ONETRAINER: Final[Cells] = [
    ({"learning_rate": 3e-4}, {"learning_rate": 3e-4}),
    ({"model_type": "FLUX_FILL_DEV_1"}, {"model_family": "flux", "model_flavour": "fill"}),
    (
        {"learning_rate": 1e-4, "learning_rate_scaler": "BOTH", "batch_size": 4},
        {"learning_rate": 2e-4},
    ),
    (
        {"text_encoder__learning_rate": 1e-5, "text_encoder_2__learning_rate": 1e-5, **SDXL_TEXTS}
        | {"learning_rate_scaler": "BATCH", "batch_size": 4},
        {"text_encoder_learning_rate": 2e-5, "text_encoder_lora_rank": 16},
    ),
    (
        {"learning_rate": 1e-5, "learning_rate_scaler": "BATCH", "batch_size": 4}
        | {"unet__learning_rate": 1e-4, **SDXL_TEXTS},
        {"text_encoder_learning_rate": 2e-5, "learning_rate": 2e-4},
    ),
    ({"learning_rate": 1e-4, "transformer__learning_rate": 2e-4}, Needless),
    ({"transformer__learning_rate": 2e-4}, {"learning_rate": 2e-4}),
    (
        {"learning_rate_warmup_steps": 100, "gradient_accumulation_steps": 4},
        {"lr_warmup_steps": 25},
    ),
    ({"learning_rate_warmup_steps": 0.1}, Lost),
    ({"learning_rate_warmup_steps": -1}, {"lr_warmup_steps": 0}),
    ({"learning_rate_scheduler": "COSINE"}, {"lr_scheduler": "cosine"}),
    ({"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, Lost),
    (
        {"learning_rate_scheduler": "COSINE", "optimizer__optimizer": "SCHEDULE_FREE_ADAMW"},
        {"lr_scheduler": "constant_with_warmup"},
    ),
    ({"timestep_shift": 3.0, "model_type": "STABLE_DIFFUSION_XL_10_BASE"}, Lost),
    ({"timestep_shift": 1.0, "model_type": "STABLE_DIFFUSION_XL_10_BASE"}, Needless),
    (
        {"learning_rate_cycles": 3, "learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS"},
        {"lr_num_cycles": 3, "lr_scheduler": "cosine_with_restarts"},
    ),
    ({"learning_rate_min_factor": 0.1, "learning_rate_scheduler": "LINEAR"}, Lost),
    ({"learning_rate_min_factor": 0.1}, Needless),
    ({"epochs": 12, "resolution": "512,768"}, {"num_train_epochs": 6.0, "resolution": [512, 768]}),
    ({"epochs": 12}, {"num_train_epochs": 12.0, "max_train_steps": None}),
    ({"resolution": "1024x1024"}, {"resolution": 1024}),
    ({"resolution": "1024x768"}, Lost),
    ({"resolution": "large"}, Kind.UNREADABLE),
    ({"clip_grad_norm": 0}, {"max_grad_norm": 0.0}),
    ({"train_dtype": "TFLOAT_32"}, {"mixed_precision": "no", "allow_tf32": True}),
    ({"train_dtype": "FLOAT_8"}, Lost),
    ({"output_dtype": "BFLOAT_16"}, {"export_dtype": "bf16"}),
    ({"output_model_destination": "models/pots.safetensors"}, {"name": "pots"}),
    ({"transformer__weight_dtype": "NFLOAT_4"}, {"base_precision": "nf4"}),
    (
        {"transformer__weight_dtype": "FLOAT_W8A8"},
        {"base_precision": "fp8_scaled", "base_matmul": "scaled"},
    ),
    ({"transformer__weight_dtype": "INT_W8A8_COMPRESSED"}, {"base_precision": "int8"}),
    ({"transformer__weight_dtype": "GGUF"}, Lost),
    ({"transformer__weight_dtype": "BFLOAT_16"}, Needless),
    ({"transformer__weight_dtype": "BFLOAT_16", "training_method": "FINE_TUNE"}, Lost),
    ({"unet__weight_dtype": "INT_8"}, Needless),
    ({"transformer__train": False}, Lost),
    ({"transformer__guidance_scale": 3.5}, {"train_guidance": 3.5}),
    ({"transformer__guidance_scale": 3.5, "model_type": "CHROMA_1"}, Needless),
    ({"transformer__gradient_checkpointing": False}, {"gradient_checkpointing": False}),
    ({"transformer__offload_fraction": 0.5}, Lost),
    (
        {
            "transformer__stop_training_after": 5,
            "transformer": {"stop_training_after_unit": "EPOCH"},
        },
        Lost,
    ),
    ({"text_encoder__train": True}, Lost),
    (
        {"text_encoder__train": True, "model_type": "STABLE_DIFFUSION_XL_10_BASE", "lora_rank": 8},
        {"text_encoder_lora_rank": 8},
    ),
    (
        {
            "text_encoder__train": True,
            "text_encoder_2__train": False,
            "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        },
        Lost,
    ),
    ({"text_encoder_3__train": True}, Needless),
    (
        {
            "text_encoder__stop_training_after": 5,
            "text_encoder": {"stop_training_after_unit": "EPOCH"},
            "model_type": "STABLE_DIFFUSION_15",
        },
        Lost,
    ),
    ({"text_encoder__dropout_probability": 0.1}, {"caption_dropout_probability": 0.1}),
    ({"text_encoder_2_sequence_length": 256}, {"max_sequence_length": 256}),
    ({"text_encoder_sequence_length": 256}, Needless),
    ({"text_encoder_layer_skip": 1}, Lost),
    ({"lora_rank": 8}, {"lora_rank": 8, "lora_alpha": 1.0}),
    ({"lora_rank": 8, "training_method": "FINE_TUNE"}, Needless),
    ({"peft_type": "LOKR", "lokr_dim": 4}, {"lora_variant": "lokr", "lora_rank": 4}),
    ({"peft_type": "LOHA"}, Lost),
    ({"lora_decompose": True}, {"lora_variant": "dora"}),
    ({"layer_filter": "a{2}", "layer_filter_regex": True}, Lost),
    ({"lora_model_name": "a.safetensors"}, {"init_lora": "a.safetensors"}),
    ({"optimizer__optimizer": "ADAMW_8BIT"}, {"optimizer": "adamw_8bit", "weight_decay": 0.01}),
    ({"optimizer__optimizer": "ADAM"}, {"optimizer": "adamw", "weight_decay": 0.0}),
    ({"optimizer__optimizer": "CAME"}, Lost),
    ({"optimizer__optimizer": "MUON"}, {"optimizer": "muon", "weight_decay": 0.0}),
    ({"optimizer__ns_steps": 5, "optimizer": {"optimizer": "MUON_ADV"}}, Needless),
    ({"optimizer__muon_adam_lr": 1e-6, "optimizer": {"optimizer": "MUON_ADV"}}, Lost),
    ({"optimizer__beta2": 0.99}, {"adam_beta2": 0.99}),
    ({"optimizer__eps": 1e-6}, {"adam_epsilon": 1e-6}),
    ({"optimizer__amsgrad": True}, Lost),
    ({"optimizer__fused": True}, Needless),
    ({"optimizer__d_coef": 2.0, "optimizer": {"optimizer": "PRODIGY"}}, Lost),
    ({"timestep_distribution": "LOGIT_NORMAL"}, {"timestep_sampling": "logit_normal"}),
    (
        {"timestep_distribution": "LOGIT_NORMAL", "noising_bias": -0.5, "noising_weight": 0.5},
        {"logit_mean": -0.5, "logit_std": 1.5},
    ),
    ({"timestep_distribution": "HEAVY_TAIL", "noising_weight": 0.5}, {"mode_scale": 0.5}),
    ({"timestep_distribution": "SIGMOID"}, Lost),
    ({"timestep_shift": 3.0}, {"flow_shift": 3.0, "timestep_sampling": "uniform_shift"}),
    ({"dynamic_timestep_shifting": True, "model_type": "HI_DREAM_FULL"}, Needless),
    ({"max_noising_strength": 0.8}, {"sigma_max": 0.8}),
    ({"max_noising_strength": 0.8, "timestep_distribution": "LOGIT_NORMAL"}, Lost),
    ({"mae_strength": 1.0}, Lost),
    ({"mae_strength": 1.0, "mse_strength": 0}, {"loss_type": "smooth_l1"}),
    ({"huber_strength": 1, "mse_strength": 0, "huber_delta": 0.2}, {"huber_c": 0.2}),
    ({"mse_strength": 0.5}, Lost),
    ({"loss_weight_fn": "MIN_SNR_GAMMA"}, Lost),
    ({"loss_weight_fn": "MIN_SNR_GAMMA", "model_type": "STABLE_DIFFUSION_15"}, {"snr_gamma": 5.0}),
    ({"loss_scaler": "BATCH"}, Lost),
    ({"ema": "CPU"}, {"use_ema": True, "ema_device": "cpu"}),
    ({"ema_decay": 0.99}, Needless),
    ({"ema_decay": 0.99, "ema": "GPU"}, {"ema_decay": 0.99799195, "use_ema": True}),
    ({"ema_decay": 0.99, "ema": "GPU", "ema_update_step_interval": 1}, {"ema_decay": 0.99}),
    ({"masked_training": True}, {"masked_loss": "file", "unmasked_weight": 0.1}),
    ({"unmasked_weight": 0.3}, Needless),
    ({"backup_after": 100, "backup_after_unit": "STEP"}, {"checkpointing_steps": 100}),
    ({"backup_after": 2, "backup_after_unit": "EPOCH"}, {"checkpointing_steps": "2 epochs"}),
    ({"backup_after": 10, "backup_after_unit": "MINUTE"}, Lost),
    ({"rolling_backup_count": 2, "rolling_backup": True}, {"checkpoints_total_limit": 2}),
    ({"save_every": 2, "save_every_unit": "EPOCH"}, Lost),
    ({"device_indexes": "0,2", "multi_gpu": True}, {"gpus": [0, 2]}),
    ({"multi_gpu": True}, Lost),
    ({"compile": True}, {"torch_compile": True}),
    ({"aspect_ratio_bucketing": False}, {"crop": "square"}),
    ({"frames": "25"}, Needless),
    ({"frames": "25", "model_type": "HUNYUAN_VIDEO"}, {"num_frames": 25, "fps": 24.0}),
    ({"samples": [{"prompt": "a pot", "width": 768, "height": 512, "seed": 3}]}, Kind.TRANSLATED),
    ({"concept_file_name": "nowhere.json"}, Kind.UNREADABLE),
    ({"validation": True}, Lost),
    ({"tensorboard": True}, {"report_to": ["tensorboard"]}),
    ({"offset_noise_weight": 0.05}, Lost),
    ({"cloud__enabled": True}, Lost),
    # -- keys of older files
    ({"min_snr_gamma": 4, "__version": 1, "model_type": "STABLE_DIFFUSION_15"}, {"snr_gamma": 4.0}),
    ({"save_after": 1, "save_after_unit": "EPOCH", "__version": 4}, Lost),
]


def test_a_schedule_that_is_not_here_keeps_its_warm_up(tmp_path: Path) -> None:
    """Warm-up is of every schedule there."""
    imported = one(tmp_path, learning_rate_scheduler="REX", learning_rate_warmup_steps=50)
    assert (imported.spec.lr_scheduler, imported.spec.lr_warmup_steps) == (
        "constant_with_warmup",
        50,
    )
    assert not [text for text in imported.report.to_fill_in if "lr_scheduler" in text]


def test_text_encoders_of_two_rates_are_told(tmp_path: Path) -> None:
    """One without a rate of its own has that of the configuration there."""
    theirs = SDXL_TEXTS | {"text_encoder__learning_rate": 1e-5, "learning_rate": 1e-4}
    imported = one(tmp_path, **theirs)
    kinds = [e.kind for e in imported.report.entries if e.key == "text_encoder.learning_rate"]
    assert Lost in kinds


def test_sd15_can_begin_with_the_buckets_that_it_is_given(tmp_path: Path) -> None:
    imported = one(tmp_path, model_type="STABLE_DIFFUSION_15")
    assert not [text for text in imported.report.to_fill_in if "bucket_step" in text]


RENAMED: Final = {"min_snr_gamma": "loss_weight_fn", "save_after": "save_every"}


@pytest.mark.parametrize(("theirs", "expected"), ONETRAINER, ids=[str(k) for k, _ in ONETRAINER])
def test_a_key_of_onetrainer(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    key = next(iter(theirs)).replace("__", ".")
    nested = {k: v for k, v in theirs.items() if isinstance(v, dict)}
    imported = one(tmp_path, **nested, **{k: v for k, v in theirs.items() if k not in nested})
    check(imported, RENAMED.get(key, key), expected)


CONCEPTS: Final[Cells] = [
    ({"path": "c"}, {"dataset": "c", "missing_captions": "empty", "caption_lines": "variants"}),
    ({"balancing": 3.0}, {"datasets": [{"path": "d", "repeats": 3}]}),
    ({"balancing": 0.5}, Lost),
    ({"balancing": 90, "balancing_strategy": "SAMPLES"}, Lost),
    ({"loss_weight": 0.5}, {"datasets": [{"path": "d", "loss_weight": 0.5}]}),
    ({"image": {"enable_crop_jitter": False}}, {"crop": "center"}),
    ({"image": {"enable_random_flip": True}}, {"random_flip": True}),
    ({"image": {"enable_random_hue": True}}, Lost),
    ({"image": {"resolution_override": "640"}}, Needless),
    (
        {"image": {"resolution_override": "640", "enable_resolution_override": True}},
        {"resolution": 640},
    ),
    ({"text": {"prompt_source": "filename"}}, Lost),
    ({"text": {"prompt_source": "concept", "prompt_path": "nowhere.txt"}}, Lost),
    (
        {"text": {"keep_tags_count": 2, "enable_tag_shuffling": True}},
        {"shuffle_captions": True, "keep_tags": 2},
    ),
    ({"text": {"tag_dropout_enable": True}}, Lost),
]


@pytest.mark.parametrize(("theirs", "expected"), CONCEPTS, ids=[str(k) for k, _ in CONCEPTS])
def test_a_concept_of_onetrainer(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    name, value = next(iter(theirs.items()))
    name = f"{name}.{next(iter(value))}" if isinstance(value, dict) else name
    imported = one(tmp_path, concept=theirs)
    found = entry(imported, f"concepts[0].{name}")
    if isinstance(expected, Kind):
        assert found.kind is expected
        return
    values = imported.spec.model_dump(mode="json") | imported.to_dict()
    assert {key: values.get(key) for key in expected} == expected


def test_a_prior_of_onetrainer_is_held_to_the_base(tmp_path: Path) -> None:
    imported = one(tmp_path, concept={"type": "PRIOR_PREDICTION", "path": "d"})
    assert imported.spec.regularization_target == "base"
    assert [dataset.regularization for dataset in imported.spec.datasets or []] == [True]


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [
        ({"enabled": False}, Needless),
        ({"type": "VALIDATION"}, Needless),
        ({"validation_concept": True}, Needless),
        ({"type": "NEW_KIND"}, Lost),
    ],
)
def test_a_concept_that_is_not_trained_is_no_dataset(
    theirs: dict[str, Any], kind: Kind, tmp_path: Path
) -> None:
    imported = one(tmp_path, concept=theirs)
    assert entry(imported, "concepts[0]").kind is kind
    assert not imported.spec.dataset
    assert not imported.spec.datasets


def test_concepts_and_samples_of_onetrainer_may_be_in_files(tmp_path: Path) -> None:
    (tmp_path / "concepts.json").write_text('[{"path": "d", "repeats": 2.0}]')
    (tmp_path / "caption.txt").write_text("a pot\n")
    (tmp_path / "samples.json").write_text('[{"prompt": "a"}, {"prompt": "b", "enabled": false}]')
    files = {"concept_file_name": "training_concepts/concepts.json"}
    files |= {"sample_definition_file_name": "x/samples.json", "sample_after_unit": "STEP"}
    imported = one(tmp_path, sample_after=50, **files)
    assert imported.to_dict()["datasets"] == [{"path": "d", "repeats": 2}]
    assert imported.to_dict()["validation_prompts"] == ["a"]
    assert imported.spec.validation_steps == 50
    text = {"text": {"prompt_source": "concept", "prompt_path": str(tmp_path / "caption.txt")}}
    assert one(tmp_path, concept=text).spec.trigger_word == "a pot"


def test_onetrainers_oldest_files_say_the_same_as_its_newest(tmp_path: Path) -> None:
    new = {
        "model_type": "STABLE_DIFFUSION_15",
        "optimizer__optimizer": "LION",
        "optimizer__weight_decay": 0.1,
        "unet__learning_rate": 1e-4,
        "unet__gradient_checkpointing": False,
        "text_encoder__train": False,
        "unet__weight_dtype": "INT_8",
    }
    old = {
        "__version": 0,
        "model_type": "STABLE_DIFFUSION_15",
        "optimizer": "LION",
        "optimizer_weight_decay": 0.1,
        "unet_learning_rate": 1e-4,
        "gradient_checkpointing": False,
        "train_text_encoder": False,
        "unet_weight_dtype": "INT_8",
    }
    path = tmp_path / "config.json"
    newest = one(tmp_path, **new)
    path.write_text(
        json.dumps({"training_method": "LORA", "layer_filter": "attn", "tensorboard": False} | old)
    )
    assert import_onetrainer(path).to_dict() == newest.to_dict()
    assert newest.spec.optimizer == "lion"


@pytest.mark.parametrize("method", ["EMBEDDING", "FINE_TUNE_VAE"])
def test_what_onetrainer_trains_besides_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"training_method {method} is not supported"):
        one(tmp_path, training_method=method)


# -- diffusion-pipe --------------------------------------------------------------------------


def toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def pipe(folder: Path, directory: Any = None, /, **keys: Any) -> Imported:
    """Import a LoRA of FLUX.1 for diffusion-pipe; `__` in a key is a dot."""
    values: dict[str, Any] = {"micro_batch_size_per_gpu": 1, "epochs": 5, "save_every_n_epochs": 1}
    tables: dict[str, dict[str, Any]] = {
        "model": {"type": "flux", "dtype": "bfloat16"},
        "adapter": {"type": "lora", "rank": 16},
        "optimizer": {"type": "adamw", "lr": 1e-4},
    }
    for key, value in keys.items():
        name, _, inner = key.partition("__")
        if inner:
            tables.setdefault(name, {})[inner] = value
        else:
            values[name] = value
    if tables["adapter"].get("type") == "":
        del tables["adapter"]
    if directory is not None:
        text = "".join(f"{k} = {toml(v)}\n" for k, v in directory.items())
        (folder / "dataset.toml").write_text(f"resolutions = [512]\n[[directory]]\n{text}")
        values["dataset"] = "somewhere/dataset.toml"
    lines = [f"{key} = {toml(value)}" for key, value in values.items()]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{k} = {toml(v)}" for k, v in table.items())]
    path = folder / "config.toml"
    path.write_text("\n".join(lines))
    return import_diffusion_pipe(path)


PIPE: Final[Cells] = [
    ({"optimizer__lr": 2e-5}, {"learning_rate": 2e-5, "weight_decay": 0.01}),
    (
        {"optimizer__type": "adamw_optimi"},
        {"optimizer": "adamw", "adam_beta2": 0.99, "weight_decay": 0.01},
    ),
    ({"optimizer__type": "sgd"}, {"optimizer": "sgd", "weight_decay": 0.0}),
    ({"optimizer__type": "AdamW8bitKahan"}, {"optimizer": "adamw_8bit", "weight_decay": 0.01}),
    ({"optimizer__type": "automagic"}, Lost),
    ({"optimizer__gradient_release": True}, Lost),
    ({"optimizer__betas": [0.9, 0.95]}, {"adam_beta2": 0.95}),
    ({"optimizer__stabilize": False}, Needless),
    ({"optimizer__d_coef": 2.0}, Lost),
    ({"force_constant_lr": 1e-5}, {"learning_rate": 1e-5, "lr_scheduler": "constant"}),
    ({"warmup_steps": 10}, {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 10}),
    ({"lr_scheduler": "cosine"}, {"lr_scheduler": "cosine"}),
    ({"lr_scheduler": "rex", "warmup_steps": 10}, Lost),
    ({"epochs": 7}, {"num_train_epochs": 7.0, "max_train_steps": None}),
    ({"epochs": 7, "max_steps": 100}, Lost),
    ({"max_steps": 100}, {"max_train_steps": 100}),
    ({"micro_batch_size_per_gpu": [[512, 4], [1024, 4]]}, {"train_batch_size": 4}),
    ({"micro_batch_size_per_gpu": [[512, 4], [1024, 1]]}, Lost),
    ({"pipeline_stages": 2}, Lost),
    ({"blocks_to_swap": 20}, {"swap_blocks": 20}),
    ({"activation_checkpointing": "unsloth"}, {"gradient_checkpointing": True}),
    ({"gradient_clipping": 0.5}, {"max_grad_norm": 0.5}),
    ({"save_dtype": "float32"}, {"export_dtype": "fp32"}),
    ({"model__dtype": "float16"}, {"mixed_precision": "fp16", "export_dtype": "fp16"}),
    ({"save_every_n_steps": 50}, {"checkpointing_steps": 50}),
    ({"save_every_n_epochs": 2}, {"checkpointing_steps": "2 epochs"}),
    ({"save_every_n_epochs": 2, "save_every_n_steps": 50}, Needless),
    ({"save_every_n_examples": 2}, Needless),
    ({"huber_delta": 0.5}, {"loss_type": "huber", "huber_c": 0.5}),
    ({"uncond_fraction": 0.1}, {"caption_dropout_probability": 0.1}),
    ({"eval_datasets": [["a", "b"]]}, Lost),
    ({"monitoring__enable_wandb": True}, {"report_to": ["wandb"]}),
    ({"model__type": "cosmos"}, Lost),
    ({"model__type": "lumina_2"}, {"model_family": "lumina2"}),
    ({"model__type": "anima"}, {"model_family": "anima", "timestep_sampling": "logit_normal"}),
    (
        {"model__shift": 8, "model__type": "minimax_h3"},
        {"model_family": "minimax_h3", "timestep_sampling": "shift", "flow_shift": 8.0},
    ),
    ({"model__cfg": 4, "model__type": "minimax_h3"}, Lost),
    (
        {"model__type": "ideogram4"},
        {"model_family": "ideogram4", "timestep_sampling": "logit_normal", "logit_std": 1.0},
    ),
    ({"model__llm_adapter_lr": 0, "model__type": "anima"}, Needless),
    ({"model__llm_adapter_lr": 1e-5, "model__type": "anima"}, Lost),
    ({"model__diffusers_path": "a/FLUX.1-Kontext-dev"}, {"model_flavour": "kontext"}),
    (
        {"model__ckpt_path": "m/Wan2.1-FLF2V-14B-720P", "model__type": "wan"},
        {"model_flavour": "2.1-flf2v-14b-720p"},
    ),
    (
        {"model__ckpt_path": "m/Wan2.2-I2V-A14B/low_noise_model", "model__type": "wan"},
        Lost,
    ),
    ({"model__transformer_path": "a.safetensors"}, Lost),
    ({"model__transformer_dtype": "float8"}, {"base_precision": "fp8"}),
    ({"model__transformer_dtype": "float8_e5m2"}, Lost),
    ({"model__transformer_dtype": "float8", "adapter__type": ""}, Lost),
    ({"model__guidance": 3.5}, {"train_guidance": 3.5}),
    ({"model__timestep_sample_method": "uniform"}, {"timestep_sampling": "uniform"}),
    ({"model__sigmoid_scale": 1.3}, {"logit_std": 1.3}),
    ({"model__shift": 3}, {"timestep_sampling": "shift", "flow_shift": 3.0}),
    ({"model__flux_shift": True}, {"timestep_sampling": "shift", "flow_shift": None}),
    ({"model__flux_shift": True, "model__type": "sd3"}, {"flow_shift": 3.158}),
    ({"model__max_t": 0.875, "model__type": "wan"}, {"sigma_max": 0.875}),
    ({"model__max_t": 1, "model__type": "wan", "model__ckpt_path": "Wan2.2/low"}, Lost),
    ({"model__shift": 3, "model__type": "ltx-video"}, Needless),
    ({"model__first_frame_conditioning_p": 0.2}, Needless),
    ({"model__type": "ltx2"}, {"model_family": "ltx2", "model_flavour": "2.3-22b"}),
    ({"model__shift": 3, "model__type": "ltx2"}, {"timestep_sampling": "shift", "flow_shift": 3.0}),
    ({"model__min_snr_gamma": 5, "model__type": "sdxl"}, {"snr_gamma": 5.0}),
    ({"model__text_encoder_1_lr": 2e-5, "model__text_encoder_2_lr": 2e-5}, Needless),
    (
        {
            "model__text_encoder_1_lr": 2e-5,
            "model__text_encoder_2_lr": 2e-5,
            "model__type": "sdxl",
        },
        {"text_encoder_lora_rank": 16, "text_encoder_learning_rate": 2e-5},
    ),
    ({"adapter__rank": 8}, {"lora_rank": 8, "lora_alpha": None}),
    ({"adapter__rank": 1e6, "adapter__type": "lokr"}, {"lokr_full_matrix": True}),
    ({"adapter__alpha": 8}, Lost),
    ({"adapter__type": "lora", "model__type": "wan"}, Lost),
    ({"adapter__init_from_existing": "epoch50"}, {"init_lora": "epoch50"}),
]


@pytest.mark.parametrize(("theirs", "expected"), PIPE, ids=[str(k) for k, _ in PIPE])
def test_a_key_of_diffusion_pipe(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    check(pipe(tmp_path, **theirs), next(iter(theirs)).replace("__", "."), expected)


def test_a_curve_that_max_steps_cuts_off_is_told(tmp_path: Path) -> None:
    """It is as long as all epochs there, and as max_train_steps here."""
    for theirs, lost in (({}, False), ({"max_steps": 100}, True)):
        imported = pipe(tmp_path, lr_scheduler="cosine", **theirs)
        assert imported.spec.lr_scheduler == "cosine"
        assert (Lost in [e.kind for e in entries(imported, "lr_scheduler")]) is lost


DIRECTORIES: Final[Cells] = [
    ({"path": "d"}, {"dataset": "d", "crop": "square"}),
    ({"num_repeats": 3}, {"datasets": [{"path": "d", "repeats": 3}]}),
    ({"num_repeats": 0.5}, Lost),
    ({"resolutions": [512, 1024]}, {"resolution": [512, 1024]}),
    ({"resolutions": [[1280, 720]]}, {"resolution": 960}),
    ({"resolutions": "big"}, Kind.UNREADABLE),
    ({"max_ar": 3.0, "min_ar": 0.25, "enable_ar_bucket": True}, {"max_bucket_aspect_ratio": 4.0}),
    ({"max_ar": 3.0}, Needless),
    ({"ar_buckets": [1.0, 1.5]}, Lost),
    ({"size_buckets": [[512, 512, 1]]}, Lost),
    ({"frame_buckets": [1, 33]}, Needless),
    ({"mask_path": "m"}, {"datasets": [{"path": "d", "mask_path": "m"}], "masked_loss": "file"}),
    ({"control_path": "c"}, Lost),
    ({"caption_prefix": "sks, "}, {"trigger_word": "sks"}),
    ({"caption_prefix": "a drawing of "}, Lost),
    ({"skip_empty_caption": False}, {"missing_captions": "empty"}),
    ({"cache_shuffle_num": 4}, {"shuffle_captions": True}),
    ({"cache_shuffle_delimiter": ";", "shuffle_tags": True}, Lost),
]


@pytest.mark.parametrize(("theirs", "expected"), DIRECTORIES, ids=[str(k) for k, _ in DIRECTORIES])
def test_a_directory_of_diffusion_pipe(
    theirs: dict[str, Any], expected: dict[str, Any] | Kind, tmp_path: Path
) -> None:
    imported = pipe(tmp_path, {"path": "d"} | theirs)
    found = entry(imported, f"dataset.toml[0].{next(iter(theirs))}")
    if isinstance(expected, Kind):
        assert found.kind is expected
        return
    values = imported.spec.model_dump(mode="json") | imported.to_dict()
    assert {key: values.get(key) for key in expected} == expected


@pytest.mark.parametrize(("share", "ours"), [(0.2, 0.2), (1.0, True), (0, False)])
def test_diffusion_pipes_first_frames_are_the_directories(
    share: float, ours: float, tmp_path: Path
) -> None:
    theirs = {"model__type": "ltx-video", "model__first_frame_conditioning_p": share}
    spec = pipe(tmp_path, {"path": "d"}, **theirs).spec
    assert [one.first_frame for one in datasets_of(spec)] == [ours]


def test_no_image_is_skipped_for_its_shape(tmp_path: Path) -> None:
    for imported in (one(tmp_path), pipe(tmp_path)):
        assert imported.spec.max_aspect_ratio == 0
        assert "max_aspect_ratio" in imported.report.assumed[-1].ours


def test_videos_of_diffusion_pipe_have_one_length(tmp_path: Path) -> None:
    directory = {"path": "d", "frame_buckets": [1, 33, 65]}
    keys = {"model__type": "hunyuan-video", "video_clip_mode": "single_middle"}
    imported = pipe(tmp_path, directory, **keys)
    assert imported.spec.num_frames == 65
    kinds = {one.kind for one in entries(imported, "dataset.toml[0].frame_buckets")}
    assert kinds == {Kind.TRANSLATED, Lost}
    assert entry(imported, "video_clip_mode").kind is Lost


@pytest.mark.parametrize(
    ("frames", "keys", "sound"),
    [
        (90, {}, True),
        (1, {}, False),
        (90, {"huber_delta": 0.5}, None),
        (90, {"model__type": "ltx2"}, False),
    ],
)
def test_diffusion_pipe_trains_the_sound_of_minimax_h3_unasked(
    frames: int, keys: dict[str, Any], sound: bool | None, tmp_path: Path
) -> None:
    directory = {"path": "d", "frame_buckets": [1, frames]}
    imported = pipe(tmp_path, directory, **{"model__type": "minimax_h3"} | keys)
    assert imported.spec.train_audio is bool(sound)
    said = {e.kind for e in imported.report.assumed if e.key == "sound"}
    assert said == {True: {Kind.TRANSLATED}, False: set(), None: {Lost}}[sound]


def test_a_dataset_file_of_diffusion_pipe_is_told_from_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "dataset.toml"
    path.write_text('resolutions = [512]\n[[directory]]\npath = "d"\n')
    with pytest.raises(UserError, match=r"it has no \[model\]"):
        import_file(path)


def test_a_rate_that_diffusion_pipes_config_leaves_to_the_optimizer_is_to_fill_in(
    tmp_path: Path,
) -> None:
    """Which the job would take to be its own default."""
    text = "learning_rate: the config has no optimizer.lr"
    assert text not in pipe(tmp_path).report.to_fill_in
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.0001", ""))
    assert text in import_diffusion_pipe(path).report.to_fill_in


# -- ltx-trainer -----------------------------------------------------------------------------

# Of Lightricks/LTX-2's packages/ltx-trainer, of September 2026.
LTX_KEYS: Final = """
model.model_path model.text_encoder_path model.video_vae_path model.audio_vae_path
model.training_mode model.load_checkpoint lora.rank lora.alpha lora.dropout lora.target_modules
training_strategy.name training_strategy.first_frame_conditioning_p training_strategy.with_audio
training_strategy.audio_latents_dir training_strategy.reference_latents_dir
training_strategy.video training_strategy.audio training_strategy.video.is_generated
training_strategy.video.latents_dir training_strategy.video.conditions
training_strategy.audio.is_generated training_strategy.audio.latents_dir
training_strategy.audio.conditions optimization.learning_rate optimization.steps
optimization.batch_size optimization.gradient_accumulation_steps optimization.max_grad_norm
optimization.optimizer_type optimization.scheduler_type optimization.scheduler_params
optimization.enable_gradient_checkpointing acceleration.mixed_precision_mode
acceleration.quantization acceleration.load_text_encoder_in_8bit
acceleration.offload_optimizer_during_validation data.preprocessed_data_root
data.num_dataloader_workers validation.samples validation.prompts validation.negative_prompt
validation.images validation.reference_videos validation.reference_downscale_factor
validation.video_dims validation.frame_rate validation.seed validation.inference_steps
validation.interval validation.video_cfg_scale validation.audio_cfg_scale
validation.video_stg_scale validation.audio_stg_scale validation.stg_blocks
validation.guidance_rescale validation.video_modality_guidance_scale
validation.audio_modality_guidance_scale validation.generate_audio validation.generate_video
validation.skip_initial_validation validation.include_reference_in_output checkpoints.interval
checkpoints.keep_last_n checkpoints.precision checkpoints.no_resume
checkpoints.save_training_state flow_matching.timestep_sampling_mode
flow_matching.timestep_sampling_params hub.push_to_hub hub.hub_model_id wandb.enabled
wandb.project wandb.entity wandb.tags wandb.log_validation_videos seed output_dir
"""


def test_a_job_of_ltx_trainer_is_its_job() -> None:
    imported = import_file(IMPORT_EXAMPLES / "ltx-trainer" / "i2v-lora.yaml")
    spec = imported.spec
    assert (spec.model_family, spec.model_flavour) == ("ltx2", "2.3-22b")
    assert spec.lora_target_modules == ["to_k", "to_q", "attn1.to_v", "audio_ff.net.2"]
    assert spec.train_audio
    assert [one.first_frame for one in spec.datasets or []] == [0.5]
    assert (spec.lr_scheduler, spec.lr_power, spec.lr_end) == ("polynomial", 1.0, 1e-5)
    assert (spec.weight_decay, spec.train_batch_size, spec.base_precision) == (0.01, 2, "int8")
    assert (spec.validation_on_startup, spec.checkpoints_total_limit) == (False, None)
    first, second = requests_of(spec)
    assert [one.rpartition("/")[2] for one in first.conditioning] == ["lighthouse.png"]
    assert (first.width, first.height, first.frames, first.guidance) == (960, 544, 89, 4.0)
    assert (second.width, second.height, second.frames, second.conditioning) == (768, 512, 49, ())
    assert {one.key for one in imported.report.of(Lost)} == {
        "validation.samples: reference",
        "data.preprocessed_data_root",
    }
    assert not imported.report.of(Kind.UNKNOWN)


@pytest.mark.parametrize(
    ("file", "flavour"),
    [
        ("ltx-2-19b-dev.safetensors", "2-19b"),
        ("ltx-2.3-22b-distilled.safetensors", "2.3-22b"),
        ("a\\diffusion_models\\ltx-2.5-22b-dev-transformer-bf16.safetensors", "2.5-22b"),
        ("checkpoint-22b.safetensors", "2.3-22b"),
    ],
)
def test_ltx_trainers_file_says_which_model_it_is(file: str, flavour: str, tmp_path: Path) -> None:
    imported = ltx(tmp_path, {"model": {"model_path": file}})
    assert imported.spec.model_flavour == flavour
    lost = {one.key for one in imported.report.of(Lost)}
    assert ("model.model_path" in lost) is ("distilled" in file)


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        ({}, 0.1),  # its default
        ({"name": "text_to_video", "first_frame_conditioning_p": 0.3}, 0.3),
        ({"name": "flexible"}, False),
        ({"name": "flexible", "video": {"conditions": [{"type": "first_frame"}]}}, True),
        ({"name": "flexible", "video": {"conditions": [{"type": "mask"}]}}, False),
    ],
)
def test_ltx_trainers_first_frames_are_the_datasets(
    strategy: dict[str, Any], share: float, tmp_path: Path
) -> None:
    values = {"training_strategy": strategy, "data": {"preprocessed_data_root": "d"}}
    assert [one.first_frame for one in datasets_of(ltx(tmp_path, values).spec)] == [share]


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ({"video": {"is_generated": True}, "audio": {"is_generated": True}}, set()),
        ({"video": {"is_generated": True}}, set()),
        ({"audio": {"is_generated": True}}, {"video"}),
        (
            {"video": {"is_generated": False}, "audio": {"is_generated": True}},
            {"video.is_generated"},
        ),
        (
            {"video": {"is_generated": True}, "audio": {"is_generated": False}},
            {"audio.is_generated"},
        ),
    ],
)
def test_what_ltx_trainer_conditions_on_video_or_sound_is_named(
    strategy: dict[str, Any], lost: set[str], tmp_path: Path
) -> None:
    imported = ltx(tmp_path, {"training_strategy": {"name": "flexible"} | strategy})
    named = {one.key for one in imported.report.of(Lost)}
    assert named == {f"training_strategy.{key}" for key in lost}
    generated = strategy.get("audio", {}).get("is_generated", False)
    assert imported.spec.train_audio is generated


def test_without_sound_ltx_trainers_adapter_is_of_the_video(tmp_path: Path) -> None:
    values = {"lora": {"rank": 8, "target_modules": ["to_k", "attn1.to_v", "audio_ff.net.2"]}}
    spec = ltx(tmp_path, values).spec
    assert spec.lora_target_modules == ["attn1.to_k", "attn2.to_k", "attn1.to_v"]
    assert not spec.train_audio


def test_ltx_trainer_samples_before_the_first_step_unless_it_says_no(tmp_path: Path) -> None:
    assert ltx(tmp_path, {}).spec.validation_on_startup
    skips = {"validation": {"skip_initial_validation": True}}
    assert not ltx(tmp_path, skips).spec.validation_on_startup


def test_the_trainer_of_ltx_video_is_another(tmp_path: Path) -> None:
    """Its keys are alike, and the job would be of LTX-2."""
    with pytest.raises(UserError, match=r"LTX-Video-Trainer, which trains LTX-Video, .*ltxvideo"):
        ltx(tmp_path, {"model": {"model_source": "LTXV_13B_097_DEV"}})


def ltx(folder: Path, values: dict[str, Any]) -> Imported:
    path = folder / "config.yaml"
    values = {"model": {"model_path": "ltx-2-19b.safetensors"}} | values
    path.write_text(json.dumps(values, ensure_ascii=False))
    return import_ltx_trainer(path)


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_no_value_of_any_key_breaks_an_import_of_ltx_trainer(value: Any, tmp_path: Path) -> None:
    odd: dict[str, Any] = {}
    for key in named(LTX_KEYS):
        part, _, inner = key.partition(".")
        if inner and "." not in inner:
            odd.setdefault(part, {})[inner] = value
    check_written(ltx(tmp_path, odd), tmp_path)
    video = {"conditions": [value, {"type": value, "probability": value}]}
    samples = [value, {"prompt": value, "conditions": value, "video_dims": value}]
    odd["training_strategy"] = {"name": "flexible", "video": video}
    odd["validation"] |= {"samples": samples, "images": [value]}
    check_written(ltx(tmp_path, odd), tmp_path)


# -- SimpleTuner's config.env ------------------------------------------------------------------


def test_simpletuners_variables_are_its_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.env"
    path.write_text(
        """# a comment
export MODEL_FAMILY='sdxl'
export MODEL_TYPE=lora
export MODEL_NAME="a/b"
export RESOLUTION=1024
export VALIDATION_RESOLUTION="${RESOLUTION}x512"
export USE_EMA=false
export USE_GRADIENT_CHECKPOINTING=true
export MAX_NUM_STEPS=300 # of all epochs
export LEARNING_RATE=8e-7 #@param {type:"number"}
export TRACKER_RUN_NAME="run #2"  # the name
export TRAINER_EXTRA_ARGS="--lora_rank=32 --snr_gamma 5"
TRAINER_EXTRA_ARGS+=" --use_dora"
export SOMETHING_ELSE=1
"""
    )
    imported = import_file(path)
    job = imported.to_dict()
    assert (job["model_family"], job["lora_rank"], job["snr_gamma"]) == ("sdxl", 32, 5.0)
    assert (job["max_train_steps"], job["lora_variant"]) == (300, "dora")
    assert job["learning_rate"] == 8e-7
    assert entry(imported, "tracker_run_name").value == "run #2"
    assert entry(imported, "use_ema").kind is Needless
    assert imported.spec.validation_resolution == "1024x512"
    assert entry(imported, "something_else").kind is Kind.UNKNOWN


# -- the examples ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["onetrainer/flux-lora.json", "diffusion-pipe/flux-lora.toml"])
def test_an_example_is_told_whole_and_its_job_can_be_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported = import_file(IMPORT_EXAMPLES / name)
    assert not imported.report.of(Kind.UNKNOWN)
    assert not imported.report.of(Kind.UNREADABLE)
    assert "hf_AbCdEf" not in imported.to_yaml() + json.dumps(imported.report.to_dict())
    path = tmp_path / "job.yaml"
    path.write_text(imported.to_yaml())
    assert load_spec(path, ignoring=("pretrained_model_name_or_path", "dataset")) == imported.spec
    job = imported.to_dict()
    assert (job["lora_rank"], job["train_batch_size"]) == (32, 2)


# -- all keys ----------------------------------------------------------------------------------


def named(text: str, prefix: str = "") -> list[str]:
    return [prefix + name for name in text.split()]


def test_every_key_of_the_tools_has_a_rule() -> None:
    keys = named(CONFIG_KEYS) + named(OPTIMIZER_KEYS, "optimizer.")
    keys += [f"{part}.{key}" for part in PARTS.split() for key in PART_KEYS.split()]
    keys += named("enabled host gpu_type", "cloud.") + named(
        "layer_filter svd_rank", "quantization."
    )
    tables = [
        (keys, onetrainer.CONFIG.rules, onetrainer.CONFIG.beginnings),
        (named(CONCEPT_KEYS), onetrainer_data.CONCEPT.rules, onetrainer_data.CONCEPT.beginnings),
        (named(PIPE_KEYS), diffusion_pipe.CONFIG.rules, diffusion_pipe.CONFIG.beginnings),
        (named(DIRECTORY_KEYS), diffusion_pipe.DIRECTORY.rules, {}),
        (named(LTX_KEYS), ltx_trainer.CONFIG.rules, ltx_trainer.CONFIG.beginnings),
    ]
    for names, rules, prefixes in tables:
        assert [
            key for key in names if key not in rules and not key.startswith(tuple(prefixes))
        ] == []


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_no_value_of_any_key_breaks_an_import_of_other_tools(value: Any, tmp_path: Path) -> None:
    """All keys at once; each is in the report, and what is left is a job that can be read."""
    odd = dict.fromkeys(named(CONFIG_KEYS), value)
    odd |= {part: dict.fromkeys(PART_KEYS.split(), value) for part in PARTS.split()}
    odd |= {"optimizer": dict.fromkeys(OPTIMIZER_KEYS.split(), value)}
    odd |= {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE"}
    concept: dict[str, Any] = {}
    for key in named(CONCEPT_KEYS):
        place, _, inner = key.rpartition(".")
        (concept.setdefault(place, {}) if place else concept)[inner] = value
    path = tmp_path / "config.json"
    for concepts in ([concept], [value], value):
        path.write_text(json.dumps(odd | {"concepts": concepts, "samples": [value, odd]}))
        imported = import_onetrainer(path)
        keys = [key for key in named(CONFIG_KEYS) if key not in ("concepts", "samples")]
        told = [e.key for e in imported.report.entries]
        assert all(any(one.startswith(key) for one in told) for key in keys)
        check_written(imported, tmp_path)
    for kind in (value, "flux", "sdxl", "wan"):
        flags = {key.replace(".", "__"): value for key in named(PIPE_KEYS) if valid(value)}
        flags |= {"model__type": kind if valid(kind) else "flux"}
        directory = dict.fromkeys(DIRECTORY_KEYS.split(), value) if valid(value) else {"path": "d"}
        check_written(pipe(tmp_path, directory, **flags), tmp_path)


def valid(value: Any) -> bool:
    """Whether TOML can say it as JSON does."""
    text = json.dumps(value)
    return not any(word in text for word in ("null", "NaN", "Infinity", "{")) and len(text) < 300


def check_written(imported: Imported, folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_text(imported.to_yaml().replace("~nobody-here", "nobody-here"))
    every = tuple(type(imported.spec).model_fields)
    assert load_spec(path, ignoring=every).model_family == imported.spec.model_family


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_a_damaged_file_is_one_sentence(cut: int, tmp_path: Path) -> None:
    for read, imported in (
        (import_onetrainer, one(tmp_path, concept={"balancing": 2}, samples=[{"prompt": "a"}])),
        (import_diffusion_pipe, pipe(tmp_path, {"path": "d"})),
    ):
        path = tmp_path / imported.source
        text = path.read_text()
        at = len(text) * cut // 100
        for damaged in (text[:at], text[:at] + "\x1b" + text[at:], text[:at] + text[at + 5 :]):
            path.write_text(damaged)
            with contextlib.suppress(UserError):  # and nothing else
                read(path)
