"""Explain in a few words why a key has no effect in a job.

Each function says when keys do nothing; a key's definition names the functions that apply to it.
`jobs.spec.rules.conflicts` rejects what cannot run; this tells beforehand which keys can be
skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.run.judging import LOSS
from jobs.spec.families import FAMILIES, experts_of, references_of
from jobs.spec.noise_levels import SHIFTED, SHIFTED_IN_WORDS
from jobs.spec.rules.lora_conflicts import ONE_RATE, may_scale, trains_text
from jobs.spec.rules.steps import accumulation_steps
from jobs.spec.rules.strategy import checkpoints_activations, shards, world_size
from jobs.spec.values.datasets import regularizes
from jobs.spec.values.field import facts_of
from jobs.spec.values.resolutions import has_several

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.spec.families import Family
    from jobs.spec.job_spec import DataPlanKeys, InputKeys, JobSpec, RecipeKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.devices import DeviceKeys
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.lora import LoraKeys
    from jobs.spec.keys.noise import NoiseKeys
    from jobs.spec.keys.output import HubKeys, OutputKeys
    from jobs.spec.keys.running import SlurmKeys
    from jobs.spec.keys.tracking import TrackingKeys
    from jobs.spec.keys.training import TrainingKeys
    from jobs.spec.keys.validation import ValidationKeys

_SHARDED: Final = "needs strategy: fsdp2 or hsdp"
ONE_RANK: Final = "no effect on 1 rank"
_NO_PROMPTS: Final = "needs validation_prompts"


def find_inapplicable(spec: JobSpec) -> dict[str, str]:
    """Return the keys that have no effect in this job, each with a short reason."""
    reasons: dict[str, str] = {}
    for key, facts in facts_of(type(spec)).items():
        if why := next(filter(None, (reason(spec) for reason in facts.no_effect)), ""):
            reasons[key] = why
    return reasons


def find_unsuited(spec: JobSpec, reasons: Mapping[str, str]) -> set[str]:
    """Return the keys of `find_inapplicable` that its model or launcher leaves without effect.

    No other setting of the job makes them count, so a form need not offer them.
    """
    unsuited = {reason(spec) for reason in _UNSUITED}
    return {key for key, why in reasons.items() if why in unsuited}


def counts(key: str, spec: JobSpec) -> bool:
    """Return whether a key has an effect in this job."""
    return not any(reason(spec) for reason in facts_of(type(spec))[key].no_effect)


def _family(spec: JobKeys) -> Family | None:
    return FAMILIES.get(spec.model_family)


# -- devices and sharding ------------------------------------------------------------------


def one_rank(spec: DeviceKeys) -> str:
    return ONE_RANK if world_size(spec) == 1 else ""


def sharded(spec: RecipeKeys) -> str:
    return "needs strategy: single or ddp" if shards(spec) else ""


def not_sharded(spec: RecipeKeys) -> str:
    return one_rank(spec) or ("" if shards(spec) else _SHARDED)


def always_on(spec: JobSpec) -> str:
    return "always on with FSDP2"


def not_hsdp(spec: DeviceKeys) -> str:
    return one_rank(spec) or ("" if spec.strategy == "hsdp" else "needs strategy: hsdp")


def no_context_parallelism(spec: RecipeKeys) -> str:
    """Return why tokens cannot be split over ranks; "" if they can."""
    family = _family(spec)
    if why := not_sharded(spec):
        return why
    if spec.device == "cpu":
        return "needs GPUs, not device: cpu"
    if family is not None and not family.context_parallel:
        return f"{family.title} has no context-parallel plan in diffusers"
    return ""


def not_context_parallel(spec: RecipeKeys) -> str:
    several = spec.context_parallel_size > 1 and not no_context_parallelism(spec)
    return "" if several else "needs context_parallel_size > 1"


def with_context_parallel(spec: RecipeKeys) -> str:
    return "" if not_context_parallel(spec) else "context parallelism chooses its own"


def on_cpu(spec: DeviceKeys) -> str:
    return "needs GPUs, not device: cpu" if spec.device == "cpu" else ""


def one_machine(spec: SlurmKeys) -> str:
    return "" if spec.launcher == "slurm" else "a local job runs on one machine"


def with_slurm(spec: SlurmKeys) -> str:
    return "Slurm decides" if spec.launcher == "slurm" else ""


def no_accelerate_launch(spec: SlurmKeys) -> str:
    return "Slurm starts ranks itself" if spec.launcher == "slurm" else ""


def set_by_slurm(spec: SlurmKeys) -> str:
    return one_machine(spec) or "Slurm sets it"


def not_slurm(spec: SlurmKeys) -> str:
    return "" if spec.launcher == "slurm" else "needs launcher: slurm"


def no_deepspeed(spec: JobSpec) -> str:
    return "DeepSpeed is not supported"


def other_policy_than(policy: str) -> Callable[[JobSpec], str]:
    def reason(spec: JobSpec) -> str:
        fits = spec.fsdp_auto_wrap_policy == policy
        return "" if fits else f"needs fsdp_auto_wrap_policy: {policy}"

    return reason


# -- training ------------------------------------------------------------------------------


def with_global_batch(spec: RecipeKeys) -> str:
    if spec.global_batch_size is None:
        return ""
    return f"global_batch_size sets it to {accumulation_steps(spec)}"


def with_epochs(spec: TrainingKeys) -> str:
    return "num_train_epochs decides" if spec.num_train_epochs is not None else ""


def not_lora(spec: JobKeys) -> str:
    return "" if spec.model_type == "lora" else "needs model_type: lora"


def not_lokr(spec: LoraKeys) -> str:
    return "" if spec.lora_variant == "lokr" else "needs lora_variant: lokr"


def no_text_lora(spec: JobKeys) -> str:
    family = _family(spec)
    able = family is None or family.text_lora
    return "" if able or family is None else f"{family.title} trains the denoiser only"


def text_not_trained(spec: RecipeKeys) -> str:
    return "" if trains_text(spec) else "needs text_encoder_lora_rank"


def text_trained(spec: RecipeKeys) -> str:
    return "text encoders are trained and stay" if trains_text(spec) else ""


def with_text_lora(spec: RecipeKeys) -> str:
    return "needs text_encoder_lora_rank: 0" if trains_text(spec) else ""


def with_one_rate(spec: TrainingKeys) -> str:
    return ONE_RATE.get(spec.optimizer, "")


def with_full_matrix(spec: LoraKeys) -> str:
    whole = spec.lora_variant == "lokr" and spec.lokr_full_matrix
    return "no effect with lokr_full_matrix" if whole else ""


def not_quantized(spec: LoraKeys) -> str:
    return "" if spec.base_precision != "none" else "needs base_precision"


def chosen_by_name(spec: LoraKeys) -> str:
    chosen = spec.keep_in_full_precision is not None
    return "keep_in_full_precision decides" if chosen else ""


def not_fp8(spec: RecipeKeys) -> str:
    return "" if may_scale(spec) else "needs base_precision: fp8_scaled or fp8"


def not_adam(spec: TrainingKeys) -> str:
    fits = spec.optimizer in ("adamw", "adamw_8bit", "adamw_schedule_free", "prodigy", "muon")
    return "" if fits else f"optimizer: {spec.optimizer} has none"


def no_warmup(spec: TrainingKeys) -> str:
    return "" if spec.lr_scheduler != "constant" else "lr_scheduler: constant has no warm-up"


def no_size_conditioning(spec: JobKeys) -> str:
    family = _family(spec)
    conditioned = family is None or family.told_sizes
    return "" if conditioned or family is None else f"{family.title} has no size conditioning"


def no_experts(spec: RecipeKeys) -> str:
    if spec.lora_target_modules:
        return "lora_target_modules decides what is adapted"
    return _without_experts(spec)


def _without_experts(spec: JobKeys) -> str:
    family = _family(spec)
    return "" if family is None or family.experts else f"{family.title} has none"


def one_denoiser(spec: JobKeys) -> str:
    if experts_of(spec):
        return ""
    return "needs a model with two experts, such as model_flavour: 2.2-t2v-a14b-high of wan"


def no_decay(spec: TrainingKeys) -> str:
    constant = spec.lr_scheduler in ("constant", "constant_with_warmup")
    return f"lr_scheduler: {spec.lr_scheduler} does not decay" if constant else ""


def no_restarts(spec: TrainingKeys) -> str:
    restarts = spec.lr_scheduler == "cosine_with_restarts"
    return "" if restarts else "needs lr_scheduler: cosine_with_restarts"


def not_polynomial(spec: TrainingKeys) -> str:
    return "" if spec.lr_scheduler == "polynomial" else "needs lr_scheduler: polynomial"


def no_recomputation(spec: RecipeKeys) -> str:
    meant = checkpoints_activations(spec) and (spec.gradient_checkpointing or shards(spec))
    return "" if meant else "needs gradient_checkpointing: yes"


def not_compiled(spec: TrainingKeys) -> str:
    return "" if spec.torch_compile else "needs torch_compile: yes"


def no_sigmas(spec: JobKeys) -> str:
    family = _family(spec)
    flows = family is None or family.objective == "flow"
    return "" if flows else f"{family.title if family else ''} draws discrete timesteps"


def not_logit_normal(spec: RecipeKeys) -> str:
    normal = spec.timestep_sampling in ("logit_normal", "shift", "stretched")
    needed = "needs timestep_sampling: logit_normal, shift or stretched"
    return no_sigmas(spec) or ("" if normal else needed)


def not_mode(spec: RecipeKeys) -> str:
    mode = spec.timestep_sampling == "mode"
    return no_sigmas(spec) or ("" if mode else "needs timestep_sampling: mode")


def not_shifted(spec: RecipeKeys) -> str:
    shifted = spec.timestep_sampling in SHIFTED
    return no_sigmas(spec) or ("" if shifted else f"needs {SHIFTED_IN_WORDS}")


def flow_matching(spec: JobKeys) -> str:
    family = _family(spec)
    flows = family is not None and family.objective == "flow"
    return f"{family.title} is a flow-matching model" if flows and family else ""


def mse_loss(spec: NoiseKeys) -> str:
    return "" if spec.loss_type != "mse" else "needs loss_type: huber or smooth_l1"


def no_ema(spec: NoiseKeys) -> str:
    return "" if spec.use_ema else "needs use_ema: yes"


def sharded_ema(spec: RecipeKeys) -> str:
    return no_ema(spec) or ("sharded with the model under FSDP" if shards(spec) else "")


def no_embedded_guidance(spec: JobKeys) -> str:
    family = _family(spec)
    distilled = family is None or family.guidance_of(spec.model_flavour) == "embedded"
    return "" if distilled else "only for guidance-distilled models"


# -- data and samples ----------------------------------------------------------------------


def dataset_list(spec: DataKeys) -> str:
    return "set by datasets" if spec.datasets else ""


def center_crop(spec: DataKeys) -> str:
    return "" if spec.crop == "random" else "needs crop: random"


def no_references(spec: JobKeys) -> str:
    family = _family(spec)
    takes = references_of(spec)
    if family is None or (takes is not None and takes.fit is not None):
        return ""
    if takes is not None:
        return f"{takes.noun}s are made as large as their samples"
    return f"{family.title} {spec.model_flavour or ''}".strip() + " takes no conditioning images"


def no_masks_drawn(spec: InputKeys) -> str:
    takes = references_of(spec)
    if _family(spec) is None:
        return ""
    if takes is None or not takes.masks:
        return "the model fills in no masked parts of images"
    if spec.datasets and all(dataset.references for dataset in spec.datasets):
        return "all datasets have conditioning images, which are the masks"
    return ""


def one_resolution(spec: DataPlanKeys) -> str:
    return "" if has_several(spec) else "needs several resolutions"


def no_regularization(spec: DataKeys) -> str:
    return "" if regularizes(spec) else "needs regularization images"


def no_preservation(spec: DataKeys) -> str:
    return "needs preservation" if spec.preservation == "none" else ""


def no_class(spec: DataKeys) -> str:
    return "" if spec.preservation == "class" else "needs preservation: class"


def no_masks(spec: DataKeys) -> str:
    return "needs masked_loss" if spec.masked_loss == "none" else ""


def square_crop(spec: DataKeys) -> str:
    return "crop: square has square buckets" if spec.crop == "square" else ""


def images_only(spec: JobKeys, does: str = "trains on") -> str:
    family = _family(spec)
    return f"{family.title} {does} images" if family and not family.frame_step else ""


def captions_in_order(spec: DataKeys) -> str:
    return "" if spec.shuffle_captions else "needs shuffle_captions: yes"


def no_sound(spec: JobKeys) -> str:
    family = FAMILIES.get(spec.model_family)
    return f"{family.title} is trained without sound" if family and not family.sound else ""


def no_prompts(spec: ValidationKeys) -> str:
    return "" if spec.validation_prompts else _NO_PROMPTS


def nothing_sampled(spec: DataPlanKeys) -> str:
    """Class images are sampled, too."""
    return "" if spec.num_class_images else no_prompts(spec)


def no_video_samples(spec: DataPlanKeys) -> str:
    return _images_made(spec) or no_prompts(spec)


def _images_made(spec: JobKeys) -> str:
    return images_only(spec, "makes")


def no_true_cfg(spec: DataPlanKeys) -> str:
    family = _family(spec)
    fits = family is None or (
        family.true_cfg_of(spec.model_flavour)
        and family.guidance_of(spec.model_flavour) == "embedded"
    )
    return ("" if fits else "only for guidance-distilled models") or nothing_sampled(spec)


def no_validation(spec: ValidationKeys) -> str:
    either = spec.validation_prompts or spec.validation_fraction
    return "" if either else f"{_NO_PROMPTS} or validation_fraction"


def not_of_a_sweep(spec: JobKeys) -> str:
    return "" if spec.sweep else "needs sweep: the other jobs' group"


def all_checkpoints_stay(spec: OutputKeys) -> str:
    return "" if spec.checkpoints_total_limit is not None else "needs checkpoints_total_limit"


def not_pushed(spec: HubKeys) -> str:
    return "" if spec.push_to_hub else "needs push_to_hub"


def not_tracked(spec: TrackingKeys) -> str:
    return "" if spec.report_to else "needs report_to"


def no_clip(spec: ValidationKeys) -> str:
    needed = {"clip_t", "clip_i"} & set(spec.validation_scores)
    return no_prompts(spec) or ("" if needed else "needs clip_t or clip_i in validation_scores")


def no_dino(spec: ValidationKeys) -> str:
    needed = "dino_i" in spec.validation_scores
    return no_prompts(spec) or ("" if needed else "needs dino_i in validation_scores")


def nothing_judged(spec: JobSpec) -> str:
    """Without what checkpoints are judged by, none is the best."""
    return no_validation_fraction(spec) if spec.checkpoints_best_by == LOSS else no_prompts(spec)


def no_validation_fraction(spec: ValidationKeys) -> str:
    return "" if spec.validation_fraction else "needs validation_fraction"


_UNSUITED: Final[tuple[Callable[[JobSpec], str], ...]] = (
    no_deepspeed,
    one_machine,
    set_by_slurm,
    not_slurm,
    no_text_lora,
    no_size_conditioning,
    _without_experts,
    one_denoiser,
    no_sigmas,
    flow_matching,
    no_embedded_guidance,
    no_references,
    no_masks_drawn,
    images_only,
    no_sound,
    _images_made,
)
