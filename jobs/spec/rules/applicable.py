"""Which keys of a job mean nothing beside the rest of it, and why, in a few words.

`jobs.spec.rules.conflicts` refuses what cannot run; this says beforehand which keys need not be
filled in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.spec.families import FAMILIES, references_of
from jobs.spec.rules.lora_conflicts import may_scale
from jobs.spec.rules.strategy import checkpoints_activations, shards, world_size
from jobs.spec.values.resolutions import has_several

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.families import Family
    from jobs.spec.job_spec import JobSpec

_SHARDED: Final = "needs strategy: fsdp2 or hsdp"
_ONE_RANK: Final = "no effect on 1 rank"
_NO_PROMPTS: Final = "needs validation_prompts"

# Of FSDP's own keys, those that are not about how to shard.
_OF_ANY_STRATEGY: Final = ("fsdp_enable", "fsdp_version")
_ALWAYS_ON: Final = ("fsdp_cpu_ram_efficient_loading", "fsdp_limit_all_gathers")


def find_inapplicable(spec: JobSpec) -> dict[str, str]:
    """The keys that mean nothing in this job, each with the reason in a few words."""
    found: dict[str, str] = {}
    for keys, reason in _RULES:
        if why := reason(spec):
            for key in keys:
                found.setdefault(key, why)  # the first rule is the more general one
    return found


def _family(spec: JobSpec) -> Family | None:
    return FAMILIES.get(spec.model_family)


# -- devices and sharding ------------------------------------------------------------------


def _alone(spec: JobSpec) -> str:
    return _ONE_RANK if world_size(spec) == 1 else ""


def _several(spec: JobSpec) -> str:
    return "" if world_size(spec) == 1 else "needs one rank; several can shard the base"


def _not_sharded(spec: JobSpec) -> str:
    return _alone(spec) or ("" if shards(spec) else _SHARDED)


def _always_on(spec: JobSpec) -> str:
    return "always on with FSDP2"


def _no_replicas(spec: JobSpec) -> str:
    return _alone(spec) or ("" if spec.strategy == "hsdp" else "needs strategy: hsdp")


def _not_split(spec: JobSpec) -> str:
    """Why tokens cannot be shared out over ranks."""
    family = _family(spec)
    if why := _not_sharded(spec):
        return why
    if spec.device == "cpu":
        return "needs GPUs, not device: cpu"
    if family is not None and not family.context_parallel:
        return f"{family.title} has no context-parallel plan in diffusers"
    return ""


def _not_context_parallel(spec: JobSpec) -> str:
    return "" if spec.context_parallel_size > 1 else "needs context_parallel_size > 1"


def _context_parallel(spec: JobSpec) -> str:
    return "context parallelism chooses its own" if spec.context_parallel_size > 1 else ""


def _on_cpu(spec: JobSpec) -> str:
    return "needs GPUs, not device: cpu" if spec.device == "cpu" else ""


def _one_machine(spec: JobSpec) -> str:
    return "" if spec.launcher == "slurm" else "a local job runs on one machine"


def _by_slurm(spec: JobSpec) -> str:
    return "Slurm decides" if spec.launcher == "slurm" else ""


def _no_accelerate(spec: JobSpec) -> str:
    return "Slurm starts ranks itself" if spec.launcher == "slurm" else ""


def _local(spec: JobSpec) -> str:
    return "" if spec.launcher == "slurm" else "needs launcher: slurm"


def _no_deepspeed(spec: JobSpec) -> str:
    return "DeepSpeed is not supported"


def _policy_other_than(policy: str) -> Callable[[JobSpec], str]:
    def reason(spec: JobSpec) -> str:
        fits = spec.fsdp_auto_wrap_policy == policy
        return "" if fits else f"needs fsdp_auto_wrap_policy: {policy}"

    return reason


# -- training ------------------------------------------------------------------------------


def _no_adapter(spec: JobSpec) -> str:
    return "" if spec.model_type == "lora" else "needs model_type: lora"


def _not_quantized(spec: JobSpec) -> str:
    return "" if spec.base_precision != "none" else "needs base_precision"


def _not_fp8(spec: JobSpec) -> str:
    return "" if may_scale(spec) else "needs base_precision: fp8_scaled or fp8"


def _not_adam(spec: JobSpec) -> str:
    fits = spec.optimizer in ("adamw", "adamw_8bit", "prodigy")
    return "" if fits else f"optimizer: {spec.optimizer} has none"


def _no_warmup(spec: JobSpec) -> str:
    return "" if spec.lr_scheduler != "constant" else "lr_scheduler: constant has no warm-up"


def _not_told(spec: JobSpec) -> str:
    family = _family(spec)
    told = family is None or family.told_sizes
    return "" if told or family is None else f"{family.title} has no size conditioning"


def _no_experts(spec: JobSpec) -> str:
    family = _family(spec)
    if spec.lora_target_modules:
        return "lora_target_modules decides what is adapted"
    return "" if family is None or family.experts else f"{family.title} has none"


def _no_end(spec: JobSpec) -> str:
    constant = spec.lr_scheduler in ("constant", "constant_with_warmup")
    return f"lr_scheduler: {spec.lr_scheduler} does not decay" if constant else ""


def _no_restarts(spec: JobSpec) -> str:
    restarts = spec.lr_scheduler == "cosine_with_restarts"
    return "" if restarts else "needs lr_scheduler: cosine_with_restarts"


def _no_power(spec: JobSpec) -> str:
    return "" if spec.lr_scheduler == "polynomial" else "needs lr_scheduler: polynomial"


def _nothing_recomputed(spec: JobSpec) -> str:
    return "" if checkpoints_activations(spec) else "needs gradient_checkpointing: yes"


def _not_compiled(spec: JobSpec) -> str:
    return "" if spec.torch_compile else "needs torch_compile: yes"


def _no_sigma(spec: JobSpec) -> str:
    family = _family(spec)
    flows = family is None or family.objective == "flow"
    return "" if flows else f"{family.title if family else ''} draws discrete timesteps"


def _not_normal(spec: JobSpec) -> str:
    normal = spec.timestep_sampling in ("logit_normal", "shift")
    return _no_sigma(spec) or ("" if normal else "needs timestep_sampling: logit_normal or shift")


def _not_mode(spec: JobSpec) -> str:
    mode = spec.timestep_sampling == "mode"
    return _no_sigma(spec) or ("" if mode else "needs timestep_sampling: mode")


def _not_shifted(spec: JobSpec) -> str:
    shifted = spec.timestep_sampling in ("shift", "uniform_shift")
    return _no_sigma(spec) or ("" if shifted else "needs timestep_sampling: shift or uniform_shift")


def _flow(spec: JobSpec) -> str:
    family = _family(spec)
    flows = family is not None and family.objective == "flow"
    return f"{family.title} is a flow-matching model" if flows and family else ""


def _square(spec: JobSpec) -> str:
    return "" if spec.loss_type != "mse" else "needs loss_type: huber or smooth_l1"


def _no_average(spec: JobSpec) -> str:
    return "" if spec.use_ema else "needs use_ema: yes"


def _sharded_average(spec: JobSpec) -> str:
    return _no_average(spec) or ("sharded with the model under FSDP" if shards(spec) else "")


def _takes_no_guidance(spec: JobSpec) -> str:
    family = _family(spec)
    distilled = family is None or family.guidance_of(spec.model_flavour) == "embedded"
    return "" if distilled else "only for guidance-distilled models"


# -- data and samples ----------------------------------------------------------------------


def _several_datasets(spec: JobSpec) -> str:
    return "set by datasets" if spec.datasets else ""


def _centred(spec: JobSpec) -> str:
    return "" if spec.crop == "random" else "needs crop: random"


def _takes_no_references(spec: JobSpec) -> str:
    family = _family(spec)
    if family is None or references_of(spec) is not None:
        return ""
    return f"{family.title} {spec.model_flavour or ''}".strip() + " takes no conditioning images"


def _one_resolution(spec: JobSpec) -> str:
    return "" if has_several(spec) else "needs several resolutions"


def _no_regularization(spec: JobSpec) -> str:
    known = spec.num_class_images or any(entry.regularization for entry in spec.datasets or [])
    return "" if known else "needs regularization images"


def _unmasked(spec: JobSpec) -> str:
    return "needs masked_loss" if spec.masked_loss == "none" else ""


def _squared(spec: JobSpec) -> str:
    return "crop: square has square buckets" if spec.crop == "square" else ""


def _pictures(spec: JobSpec) -> str:
    family = _family(spec)
    return f"{family.title} trains on images" if family and not family.frame_step else ""


def _in_order(spec: JobSpec) -> str:
    return "" if spec.shuffle_captions else "needs shuffle_captions: yes"


def _no_samples(spec: JobSpec) -> str:
    return "" if spec.validation_prompts else _NO_PROMPTS


def _nothing_made(spec: JobSpec) -> str:
    """Class images are sampled too."""
    return "" if spec.num_class_images else _no_samples(spec)


def _no_frames(spec: JobSpec) -> str:
    return _no_samples(spec) or _pictures(spec).replace("trains on", "makes")


def _no_true_cfg(spec: JobSpec) -> str:
    family = _family(spec)
    fits = family is None or (
        family.true_cfg and family.guidance_of(spec.model_flavour) == "embedded"
    )
    return _nothing_made(spec) or ("" if fits else "only for guidance-distilled models")


def _nothing_to_validate(spec: JobSpec) -> str:
    either = spec.validation_prompts or spec.validation_fraction
    return "" if either else f"{_NO_PROMPTS} or validation_fraction"


def _not_pushed(spec: JobSpec) -> str:
    return "" if spec.push_to_hub else "needs push_to_hub"


def _not_tracked(spec: JobSpec) -> str:
    return "" if spec.report_to else "needs report_to"


def _nothing_held_out(spec: JobSpec) -> str:
    return "" if spec.validation_fraction else "needs validation_fraction"


def _sharding_keys() -> tuple[str, ...]:
    from jobs.spec.keys.fsdp import FsdpKeys

    return tuple(key for key in FsdpKeys.model_fields if key not in _OF_ANY_STRATEGY)


def _slurm_keys() -> tuple[str, ...]:
    from jobs.spec.keys.slurm import SlurmKeys

    return tuple(key for key in SlurmKeys.model_fields if key != "launcher")


_RULES: Final[tuple[tuple[tuple[str, ...], Callable[[JobSpec], str]], ...]] = (
    (_OF_ANY_STRATEGY, _alone),
    (_sharding_keys(), _not_sharded),
    (_ALWAYS_ON, _always_on),
    (("fsdp_min_num_params",), _policy_other_than("SIZE_BASED_WRAP")),
    (("fsdp_transformer_layer_cls_to_wrap",), _policy_other_than("TRANSFORMER_BASED_WRAP")),
    (("dp_replicate_size",), _no_replicas),
    (("context_parallel_size",), _not_split),
    (("context_parallel_comm_strategy",), _not_context_parallel),
    (("attention_backend",), _context_parallel),
    (("gpus", "share_gpus"), _on_cpu),
    (("num_machines", "main_process_ip"), _one_machine),
    (("machine_rank",), lambda spec: _one_machine(spec) or "Slurm sets it"),
    (("gpus", "share_gpus", "priority"), _by_slurm),
    (("accelerate_extra_args",), _no_accelerate),
    (_slurm_keys(), _local),
    (("main_process_port", "shard_text_encoders"), _alone),
    (("deepspeed_config",), _no_deepspeed),
    (
        (
            "lora_rank",
            "lora_alpha",
            "lora_variant",
            "lora_rank_pattern",
            "lora_alpha_pattern",
            "lora_dropout",
            "lora_init",
            "lora_target_modules",
            "lora_exclude_modules",
            "base_precision",
            "init_lora",
        ),
        _no_adapter,
    ),
    (("base_matmul",), lambda spec: _no_adapter(spec) or _not_fp8(spec)),
    (("keep_in_full_precision",), lambda spec: _no_adapter(spec) or _not_quantized(spec)),
    (("swap_blocks",), lambda spec: _no_adapter(spec) or _several(spec)),
    (("lora_experts",), lambda spec: _no_adapter(spec) or _no_experts(spec)),
    (("lora_placement",), lambda spec: _no_adapter(spec) or _not_sharded(spec)),
    (("adam_beta1", "adam_beta2", "adam_epsilon"), _not_adam),
    (("lr_warmup_steps",), _no_warmup),
    (("lr_end",), _no_end),
    (("lr_num_cycles",), _no_restarts),
    (("lr_power",), _no_power),
    (("gradient_checkpointing_policy", "gradient_checkpointing_interval"), _nothing_recomputed),
    (("torch_compile_backend",), _not_compiled),
    (("timestep_sampling", "sigma_min", "sigma_max", "loss_weighting"), _no_sigma),
    (("mode_scale",), _not_mode),
    (("logit_mean", "logit_std"), _not_normal),
    (("flow_shift",), _not_shifted),
    (("snr_gamma",), _flow),
    (("size_conditioning",), _not_told),
    (("huber_c",), _square),
    (("ema_decay",), _no_average),
    (("ema_device",), _sharded_average),
    (("train_guidance",), _takes_no_guidance),
    (("dataset",), _several_datasets),
    (("crop_variants",), _centred),
    (("resolution_mode",), _one_resolution),
    (("prior_loss_weight", "class_prompt"), _no_regularization),
    (("unmasked_weight",), _unmasked),
    (("max_bucket_aspect_ratio",), _squared),
    (("tracker_project_name", "tracker_run_name", "logging_dir"), _not_tracked),
    (("push_checkpoints_to_hub", "hub_model_id", "hub_private_repo"), _not_pushed),
    (("num_frames", "fps"), _pictures),
    (("conditioning_resolution",), _takes_no_references),
    (("caption_shuffles", "keep_tags"), _in_order),
    (
        (
            "validation_num_inference_steps",
            "validation_guidance",
            "validation_negative_prompt",
        ),
        _nothing_made,
    ),
    (("validation_resolution",), _no_samples),
    (("validation_num_frames",), _no_frames),
    (("validation_true_cfg_scale",), _no_true_cfg),
    (("validation_steps", "validation_on_startup", "validation_seed"), _nothing_to_validate),
    (("validation_loss_steps", "validation_timesteps"), _nothing_held_out),
)
