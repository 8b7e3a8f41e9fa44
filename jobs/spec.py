"""One description of a job. YAML, flags, the form and the documentation all come from here.

A field exists once: its name, type, default, limits, group and help text. `jobs.specfile` reads
it from YAML and flags; `jobs.conflicts` says which combinations cannot run.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from jobs.fields import (
    AttentionBackend,
    Bool,
    CheckpointPolicy,
    ContextParallelStrategy,
    Device,
    EmaDevice,
    Loss,
    LRScheduler,
    ModelType,
    NonFinite,
    Optimizer,
    OptionalBool,
    OptionalText,
    OptionalTextList,
    Placement,
    Precision,
    StateDictType,
    Strategy,
    TextList,
    TimestepSampling,
    WrapPolicy,
    choice,
    field,
    read_gpus,
    read_loss,
    read_prefetch,
    read_reshard,
    read_state_dict_type,
    read_wrap_policy,
)
from jobs.spellings import as_none


class JobSpec(BaseModel):
    """A validated job. Raises `pydantic.ValidationError`; `jobs.specfile` turns it into words."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )

    # -- what to train ---------------------------------------------------------------------
    name: str = field(
        "job", "job", "Short name of the job; part of its run directory.",
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )  # fmt: skip
    model_type: Annotated[ModelType, choice(ModelType)] = field(
        "lora", "job", "What is trained: a LoRA adapter, or every weight of the transformer."
    )
    model_family: str = field("flux", "job", "Model family; `fsdp-tui families` lists them.")
    model_flavour: OptionalText = field(None, "job", "Published variant of the family.")
    pretrained_model_name_or_path: str = field(
        "", "job", "Diffusers model directory, or a hub id that is already in the local cache."
    )
    dataset: str = field(
        "", "job", "Folder of pictures, each with a .txt caption of the same name beside it."
    )

    # -- how to train ----------------------------------------------------------------------
    resolution: int = field(
        1024, "training", "Pictures are resized to about this many pixels squared, in buckets "
        "of similar aspect ratio.", ge=16, le=8192,
    )  # fmt: skip
    train_batch_size: int = field(1, "training", "Pictures per rank in one forward.", ge=1)
    gradient_accumulation_steps: int = field(
        1, "training", "Forwards per optimizer step; exact, not approximate.", ge=1
    )
    max_train_steps: int = field(
        1000, "training", "Optimizer steps of the whole job.", ge=1, le=1_000_000_000
    )
    learning_rate: float = field(1e-4, "training", "Peak learning rate.", gt=0, le=10)
    optimizer: Annotated[Optimizer, choice(Optimizer)] = field(
        "adamw", "training",
        "adamw runs fused on GPUs; adamw_8bit, prodigy and lion come with the extra "
        "`fsdp-tui[optimizers]`.",
    )  # fmt: skip
    adam_beta1: float = field(0.9, "training", "Beta 1 of adamw, adamw_8bit, prodigy.", ge=0, lt=1)
    adam_beta2: float = field(
        0.999, "training", "Beta 2 of adamw, adamw_8bit, prodigy.", ge=0, lt=1
    )
    adam_epsilon: float = field(1e-8, "training", "Epsilon of adamw, adamw_8bit, prodigy.", gt=0)
    weight_decay: float = field(0.0, "training", "Weight decay of the optimizer.", ge=0)
    lr_scheduler: Annotated[LRScheduler, choice(LRScheduler)] = field(
        "constant", "training", "Learning-rate schedule; advances once per optimizer step."
    )
    lr_warmup_steps: int = field(0, "training", "Steps of linear warm-up.", ge=0)
    max_grad_norm: float = field(
        1.0, "training", "Clip the global gradient norm to this; 0 turns clipping off.", ge=0
    )
    mixed_precision: Annotated[Precision, choice(Precision)] = field(
        "bf16", "training", "Compute precision; trained weights stay in fp32 either way."
    )
    gradient_checkpointing: Bool = field(
        False, "training", "Recompute activations in backward: less memory, about 30 % slower."
    )
    gradient_checkpointing_policy: Annotated[CheckpointPolicy, choice(CheckpointPolicy)] = field(
        "full", "training",
        "full recomputes whole blocks; selective keeps the results of matrix products and "
        "attention, and recomputes the cheap rest.",
    )  # fmt: skip
    torch_compile: Bool = field(
        False, "training", "Compile each repeated block: slow first steps, faster ones after."
    )
    torch_compile_backend: str = field(
        "inductor", "training", "Backend of torch.compile.", min_length=1
    )
    attention_backend: Annotated[AttentionBackend, choice(AttentionBackend)] = field(
        "auto", "training", "Kernel of scaled-dot-product attention; auto lets torch choose."
    )
    allow_tf32: Bool = field(
        True, "training", "Let GPUs round fp32 matrix products to TF32 (mixed_precision: no)."
    )
    deterministic: Bool = field(
        False, "training", "Only kernels that give the same bits every time; slower on GPUs."
    )
    on_nonfinite: Annotated[NonFinite, choice(NonFinite)] = field(
        "fail", "training",
        "When a loss or gradient is not finite, on any rank: fail ends the job, skip leaves the "
        "step out on all ranks and goes on (20 in a row end the job).",
    )  # fmt: skip
    seed: int = field(42, "training", "Seed of everything that is drawn.", ge=0, le=2**31 - 1)
    timestep_sampling: Annotated[TimestepSampling, choice(TimestepSampling)] = field(
        "logit_normal", "training",
        "How sigma is drawn: uniform, logit-normal, or logit-normal with the family's "
        "resolution-dependent shift.",
    )  # fmt: skip
    logit_mean: float = field(0.0, "training", "Mean of the logit-normal sigma.")
    logit_std: float = field(1.0, "training", "Standard deviation of the logit-normal.", gt=0)
    flow_shift: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "training", "Shift of sigma; the family's own, by resolution, when left out.", gt=0
    )
    loss_type: Annotated[Loss, BeforeValidator(read_loss)] = field(
        "mse", "training", "What is minimised: mse, huber or smooth_l1."
    )
    huber_c: float = field(
        0.1, "training", "Where huber and smooth_l1 turn from square to linear.", gt=0
    )
    snr_gamma: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "training", "Min-SNR weighting of epsilon and v-prediction models, 5 is usual.", gt=0
    )
    caption_dropout_probability: float = field(
        0.0, "training", "Share of samples trained with an empty caption.", ge=0, le=1
    )
    use_ema: Bool = field(
        False, "training", "Keep a moving average of what is trained; samples and export use it."
    )
    ema_decay: float = field(0.999, "training", "Decay of the moving average per step.", ge=0, lt=1)
    ema_device: Annotated[EmaDevice, choice(EmaDevice)] = field(
        "accelerator", "training", "Where the moving average is kept."
    )
    train_guidance: float = field(
        1.0, "training", "Guidance fed to guidance-distilled models while training.", ge=0
    )

    # -- LoRA ------------------------------------------------------------------------------
    lora_rank: int = field(16, "lora", "Rank of the adapter.", ge=1, le=4096)
    lora_alpha: Annotated[float | None, BeforeValidator(as_none)] = field(
        None, "lora", "Scale numerator; the rank when left out.", gt=0
    )
    lora_dropout: float = field(0.0, "lora", "Dropout in front of the adapter.", ge=0, lt=1)
    lora_placement: Annotated[Placement, choice(Placement)] = field(
        "replicated", "lora",
        "replicated: whole on every rank, gradients averaged in one bucket; sharded: split "
        "like the base weights.",
    )  # fmt: skip
    lora_target_modules: OptionalTextList = field(
        None, "lora", "Module name endings that get an adapter; the family's choice when left out."
    )

    # -- devices and sharding --------------------------------------------------------------
    device: Annotated[Device, choice(Device)] = field(
        "auto", "devices", "auto takes GPUs where there are any, else CPU ranks over gloo."
    )
    gpus: Annotated[int | list[int | str] | None, BeforeValidator(read_gpus)] = field(
        None, "devices", "GPUs by index or UUID, or a count for any so many free ones."
    )
    share_gpus: Bool = field(
        False, "devices", "Also take GPUs on which processes of others hold memory."
    )
    priority: int = field(
        0, "running", "Queued jobs of higher priority start first.", ge=-1_000_000, le=1_000_000
    )
    num_processes: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices", "Ranks; as many as there are gpus when left out.", ge=1, le=4096
    )
    strategy: Annotated[Strategy, choice(Strategy)] = field(
        "auto", "devices", "How ranks share the work; auto says in the log what it chose and why."
    )
    dp_replicate_size: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "devices",
        "hsdp: how many replicas of the sharded model there are; each is sharded over "
        "num_processes / dp_replicate_size ranks.", ge=1, le=4096,
    )  # fmt: skip
    context_parallel_size: int = field(
        1, "devices", "Ranks that share one sample's tokens; needs FSDP2 and GPUs.", ge=1, le=4096
    )
    context_parallel_comm_strategy: Annotated[
        ContextParallelStrategy, choice(ContextParallelStrategy)
    ] = field("allgather", "devices", "allgather: ring attention; alltoall: Ulysses, by heads.")
    deepspeed_config: OptionalText = field(
        None, "devices", "Not run; named here so that configurations of other tools are understood."
    )
    fsdp_enable: OptionalBool = field(
        None, "fsdp", "Shard the model over the ranks (the same as strategy: fsdp2)."
    )
    fsdp_version: int = field(2, "fsdp", "FSDP version; 1 is deprecated, and run as 2.", ge=1, le=2)
    fsdp_reshard_after_forward: Annotated[bool | int, BeforeValidator(read_reshard)] = field(
        True, "fsdp",
        "Free gathered weights after forward: least memory, one more all-gather. A number "
        "keeps them in so many larger shards, a divisor of the ranks that shard.",
    )  # fmt: skip
    fsdp_cpu_offload: Bool = field(
        False, "fsdp", "Keep shards, gradients and optimizer state in host memory; slow."
    )
    fsdp_activation_checkpointing: Bool = field(
        False, "fsdp", "The same as gradient_checkpointing."
    )
    fsdp_forward_prefetch: Annotated[int, BeforeValidator(read_prefetch)] = field(
        0, "fsdp", "Units gathered ahead in forward, besides the implicit one.", ge=0, le=16
    )
    fsdp_backward_prefetch: Annotated[int, BeforeValidator(read_prefetch)] = field(
        0, "fsdp", "Units gathered ahead in backward; 0: the implicit one.", ge=0, le=16
    )
    fsdp_state_dict_type: Annotated[StateDictType, BeforeValidator(read_state_dict_type)] = field(
        "SHARDED_STATE_DICT", "fsdp", "How checkpoints are laid out."
    )
    fsdp_cpu_ram_efficient_loading: Bool = field(
        True, "fsdp", "Every rank reads only its own shard from disk; this is always so."
    )
    fsdp_auto_wrap_policy: Annotated[WrapPolicy, BeforeValidator(read_wrap_policy)] = field(
        "TRANSFORMER_BASED_WRAP", "fsdp", "Which modules become their own FSDP unit."
    )
    fsdp_min_num_params: int = field(
        10_000_000, "fsdp", "Smallest unit of SIZE_BASED_WRAP, in parameters.", ge=1
    )
    fsdp_transformer_layer_cls_to_wrap: OptionalTextList = field(
        None, "fsdp", "Block classes to wrap; the model's own repeated blocks when left out."
    )

    # -- text encoders and caches ----------------------------------------------------------
    cache_text_embeddings: Bool = field(
        True, "data", "Encode every caption once, before training, and keep the result on disk."
    )
    unload_text_encoder: Bool = field(
        True, "data", "Free the text encoders before the transformer is placed."
    )
    cache_dir: OptionalText = field(
        None, "data", "Where latents and embeddings are kept; the user cache when left out."
    )
    max_sequence_length: int = field(512, "data", "Text tokens given to the model.", ge=1)

    # -- checkpoints and samples -----------------------------------------------------------
    checkpointing_steps: int = field(
        500, "output", "Save every so many steps; the end and a stop always save. 0: only then.",
        ge=0,
    )  # fmt: skip
    checkpoints_total_limit: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "output", "Keep only the newest so many checkpoints.", ge=1
    )
    validation_prompts: TextList = field([], "output", "Prompts that are sampled while training.")
    validation_steps: int = field(
        0, "output", "Sample every so many steps; 0 samples at the end only.", ge=0
    )
    validation_num_inference_steps: int = field(20, "output", "Denoising steps.", ge=1)
    validation_guidance: float = field(3.5, "output", "Guidance scale of samples.", ge=0)
    validation_resolution: Annotated[int | None, BeforeValidator(as_none)] = field(
        None, "output", "Side of the sampled pictures; the training resolution when left out.",
        ge=16,
    )  # fmt: skip

    # -- running ---------------------------------------------------------------------------
    stop_grace_seconds: float = field(
        600.0, "running",
        "After a stop request, wait this long for the step and the save before ranks get "
        "SIGTERM.", gt=0,
    )  # fmt: skip
    hang_timeout: float = field(
        1800.0, "running",
        "End the job, with every rank's stack in its log, when no rank has moved on for so many "
        "seconds; 0 turns this off.", ge=0,
    )  # fmt: skip
    max_restarts: int = field(
        0, "running", "After a failure, start again from the newest checkpoint, so many times.",
        ge=0, le=1000,
    )  # fmt: skip
    auto_resume: Bool = field(
        False, "running", "Queue the job again by itself after the machine was restarted."
    )
    distributed_timeout_seconds: float = field(
        1800.0, "running", "A collective that waits longer than this fails the job.", gt=0
    )

    @model_validator(mode="before")
    @classmethod
    def _forget_unset(cls, data: Any) -> Any:
        """A key written with no value (`lora_alpha:`) means its default."""
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    def to_dict(self, *, only_set: bool = False) -> dict[str, Any]:
        """Plain values, in field order; with `only_set`, those that differ from the default."""
        return self.model_dump(mode="json", exclude_defaults=only_set)

    def digest(self) -> str:
        """A hash of what decides the result; used to tell whether a resume changes anything."""
        payload = json.dumps(self.to_dict(), sort_keys=True).encode()
        return hashlib.sha256(payload).hexdigest()[:16]


def field_names() -> list[str]:
    """Every key a job file may have."""
    return list(JobSpec.model_fields)


def field_group(name: str) -> str:
    """The heading under which a field is documented and shown in the form."""
    extra = JobSpec.model_fields[name].json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else "other"


def field_choices(name: str) -> tuple[str, ...]:
    """The words a field allows, or an empty tuple when it is not a choice."""
    annotation = JobSpec.model_fields[name].annotation
    choices = get_args(annotation)
    return choices if choices and all(isinstance(c, str) for c in choices) else ()


def is_switch(name: str) -> bool:
    """Whether a field is just on or off, so that a bare flag turns it on."""
    field = JobSpec.model_fields.get(name)
    return field is not None and field.annotation in (bool, bool | None, bool | int)


def takes_number(name: str) -> bool:
    """Whether a field that is on or off may also be a number."""
    field = JobSpec.model_fields.get(name)
    return field is not None and field.annotation == bool | int


def takes_many(name: str) -> bool:
    """Whether a field holds a list."""
    field = JobSpec.model_fields.get(name)
    return field is not None and "list[" in str(field.annotation)
