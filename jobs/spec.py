"""One description of a job. YAML, flags, the form and the documentation all come from here.

A field exists once: its name, type, default, limits, group and help text. `jobs.specfile` reads
it from YAML and flags; `jobs.conflicts` says which combinations cannot run.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jobs.spellings import as_bool, as_choice, as_list, as_none

ModelType = Literal["lora", "full"]
Strategy = Literal["auto", "single", "ddp", "fsdp2"]
Precision = Literal["no", "bf16", "fp16"]
Optimizer = Literal["adamw", "sgd"]
LRScheduler = Literal["constant", "constant_with_warmup", "linear", "cosine"]
TimestepSampling = Literal["uniform", "logit_normal", "shift"]
Placement = Literal["replicated", "sharded"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
Device = Literal["auto", "cuda", "cpu"]


def _choice(literal: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: as_choice(value, get_args(literal)))


def _state_dict_type(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in {"full", "sharded"}:
        value = f"{value.strip()}_state_dict"
    return as_choice(value, get_args(StateDictType))


def _wrap_policy(value: Any) -> Any:
    if isinstance(value, str) and not value.strip().lower().endswith("wrap"):
        value = f"{value.strip()}_wrap"
    return as_choice(value, get_args(WrapPolicy))


def _gpus(value: Any) -> Any:
    """A count (`4`), a list (`[0, 1]`, `0,1`, UUIDs), or nothing."""
    value = as_none(value)
    if isinstance(value, str):
        value = int(value) if value.strip().isdigit() and "," not in value else as_list(value)
    if isinstance(value, (list, tuple)):
        return [int(v) if isinstance(v, str) and v.isdigit() else v for v in value]
    return value


Bool = Annotated[bool, BeforeValidator(as_bool)]
OptionalBool = Annotated[bool | None, BeforeValidator(as_none), BeforeValidator(as_bool)]
OptionalText = Annotated[str | None, BeforeValidator(as_none)]
TextList = Annotated[list[str], BeforeValidator(as_list)]
OptionalTextList = Annotated[list[str] | None, BeforeValidator(as_list), BeforeValidator(as_none)]


def _field(default: Any, group: str, help_text: str, **limits: Any) -> Any:
    return Field(default, description=help_text, json_schema_extra={"group": group}, **limits)


class JobSpec(BaseModel):
    """A validated job. Raises `pydantic.ValidationError`; `jobs.specfile` turns it into words."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False
    )

    # -- what to train ---------------------------------------------------------------------
    name: str = _field(
        "job", "job", "Short name of the job; part of its run directory.",
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )  # fmt: skip
    model_type: Annotated[ModelType, _choice(ModelType)] = _field(
        "lora", "job", "What is trained: a LoRA adapter, or every weight of the transformer."
    )
    model_family: str = _field("flux", "job", "Model family; `fsdp-tui families` lists them.")
    model_flavour: OptionalText = _field(None, "job", "Published variant of the family.")
    pretrained_model_name_or_path: str = _field(
        "", "job", "Diffusers model directory, or a hub id that is already in the local cache."
    )
    dataset: str = _field(
        "", "job", "Folder of pictures, each with a .txt caption of the same name beside it."
    )

    # -- how to train ----------------------------------------------------------------------
    resolution: int = _field(
        1024, "training", "Pictures are resized to about this many pixels squared, in buckets "
        "of similar aspect ratio.", ge=16, le=8192,
    )  # fmt: skip
    train_batch_size: int = _field(1, "training", "Pictures per rank in one forward.", ge=1)
    gradient_accumulation_steps: int = _field(
        1, "training", "Forwards per optimizer step; exact, not approximate.", ge=1
    )
    max_train_steps: int = _field(
        1000, "training", "Optimizer steps of the whole job.", ge=1, le=1_000_000_000
    )
    learning_rate: float = _field(1e-4, "training", "Peak learning rate.", gt=0, le=10)
    optimizer: Annotated[Optimizer, _choice(Optimizer)] = _field(
        "adamw", "training", "Optimizer; AdamW runs fused on GPUs."
    )
    adam_beta1: float = _field(0.9, "training", "AdamW beta 1.", ge=0, lt=1)
    adam_beta2: float = _field(0.999, "training", "AdamW beta 2.", ge=0, lt=1)
    adam_epsilon: float = _field(1e-8, "training", "AdamW epsilon.", gt=0)
    weight_decay: float = _field(0.0, "training", "Weight decay of the optimizer.", ge=0)
    lr_scheduler: Annotated[LRScheduler, _choice(LRScheduler)] = _field(
        "constant", "training", "Learning-rate schedule; advances once per optimizer step."
    )
    lr_warmup_steps: int = _field(0, "training", "Steps of linear warm-up.", ge=0)
    max_grad_norm: float = _field(
        1.0, "training", "Clip the global gradient norm to this; 0 turns clipping off.", ge=0
    )
    mixed_precision: Annotated[Precision, _choice(Precision)] = _field(
        "bf16", "training", "Compute precision; trained weights stay in fp32 either way."
    )
    gradient_checkpointing: Bool = _field(
        False, "training", "Recompute activations in backward: less memory, about 30 % slower."
    )
    seed: int = _field(42, "training", "Seed of everything that is drawn.", ge=0, le=2**31 - 1)
    timestep_sampling: Annotated[TimestepSampling, _choice(TimestepSampling)] = _field(
        "logit_normal", "training",
        "How sigma is drawn: uniform, logit-normal, or logit-normal with the family's "
        "resolution-dependent shift.",
    )  # fmt: skip
    train_guidance: float = _field(
        1.0, "training", "Guidance fed to guidance-distilled models while training.", ge=0
    )

    # -- LoRA ------------------------------------------------------------------------------
    lora_rank: int = _field(16, "lora", "Rank of the adapter.", ge=1, le=4096)
    lora_alpha: Annotated[float | None, BeforeValidator(as_none)] = _field(
        None, "lora", "Scale numerator; the rank when left out.", gt=0
    )
    lora_dropout: float = _field(0.0, "lora", "Dropout in front of the adapter.", ge=0, lt=1)
    lora_placement: Annotated[Placement, _choice(Placement)] = _field(
        "replicated", "lora",
        "replicated: whole on every rank, gradients averaged in one bucket; sharded: split "
        "like the base weights.",
    )  # fmt: skip
    lora_target_modules: OptionalTextList = _field(
        None, "lora", "Module name endings that get an adapter; the family's choice when left out."
    )

    # -- devices and sharding --------------------------------------------------------------
    device: Annotated[Device, _choice(Device)] = _field(
        "auto", "devices", "auto takes GPUs where there are any, else CPU ranks over gloo."
    )
    gpus: Annotated[int | list[int | str] | None, BeforeValidator(_gpus)] = _field(
        None, "devices", "GPUs by index or UUID, or a count for any so many free ones."
    )
    share_gpus: Bool = _field(
        False, "devices", "Also take GPUs on which processes of others hold memory."
    )
    priority: int = _field(
        0, "running", "Queued jobs of higher priority start first.", ge=-1_000_000, le=1_000_000
    )
    num_processes: Annotated[int | None, BeforeValidator(as_none)] = _field(
        None, "devices", "Ranks; as many as there are gpus when left out.", ge=1, le=4096
    )
    strategy: Annotated[Strategy, _choice(Strategy)] = _field(
        "auto", "devices", "How ranks share the work; auto says in the log what it chose and why."
    )
    fsdp_enable: OptionalBool = _field(
        None, "fsdp", "Shard the model over the ranks (the same as strategy: fsdp2)."
    )
    fsdp_version: int = _field(2, "fsdp", "FSDP version; only 2 is run.", ge=1, le=2)
    fsdp_reshard_after_forward: Bool = _field(
        True, "fsdp", "Free gathered weights after forward: least memory, one more all-gather."
    )
    fsdp_state_dict_type: Annotated[StateDictType, BeforeValidator(_state_dict_type)] = _field(
        "SHARDED_STATE_DICT", "fsdp", "How checkpoints are laid out."
    )
    fsdp_cpu_ram_efficient_loading: Bool = _field(
        True, "fsdp", "Every rank reads only its own shard from disk; this is always so."
    )
    fsdp_auto_wrap_policy: Annotated[WrapPolicy, BeforeValidator(_wrap_policy)] = _field(
        "TRANSFORMER_BASED_WRAP", "fsdp", "Which modules become their own FSDP unit."
    )
    fsdp_min_num_params: int = _field(
        10_000_000, "fsdp", "Smallest unit of SIZE_BASED_WRAP, in parameters.", ge=1
    )
    fsdp_transformer_layer_cls_to_wrap: OptionalTextList = _field(
        None, "fsdp", "Block classes to wrap; the model's own repeated blocks when left out."
    )

    # -- text encoders and caches ----------------------------------------------------------
    cache_text_embeddings: Bool = _field(
        True, "data", "Encode every caption once, before training, and keep the result on disk."
    )
    unload_text_encoder: Bool = _field(
        True, "data", "Free the text encoders before the transformer is placed."
    )
    cache_dir: OptionalText = _field(
        None, "data", "Where latents and embeddings are kept; the user cache when left out."
    )
    max_sequence_length: int = _field(512, "data", "Text tokens given to the model.", ge=1)

    # -- checkpoints and samples -----------------------------------------------------------
    checkpointing_steps: int = _field(
        500, "output", "Save every so many steps; the end and a stop always save. 0: only then.",
        ge=0,
    )  # fmt: skip
    checkpoints_total_limit: Annotated[int | None, BeforeValidator(as_none)] = _field(
        None, "output", "Keep only the newest so many checkpoints.", ge=1
    )
    validation_prompts: TextList = _field([], "output", "Prompts that are sampled while training.")
    validation_steps: int = _field(
        0, "output", "Sample every so many steps; 0 samples at the end only.", ge=0
    )
    validation_num_inference_steps: int = _field(20, "output", "Denoising steps.", ge=1)
    validation_guidance: float = _field(3.5, "output", "Guidance scale of samples.", ge=0)
    validation_resolution: Annotated[int | None, BeforeValidator(as_none)] = _field(
        None, "output", "Side of the sampled pictures; the training resolution when left out.",
        ge=16,
    )  # fmt: skip

    # -- running ---------------------------------------------------------------------------
    stop_grace_seconds: float = _field(
        600.0, "running",
        "After a stop request, wait this long for the step and the save before ranks get "
        "SIGTERM.", gt=0,
    )  # fmt: skip
    hang_timeout: float = _field(
        1800.0, "running",
        "End the job, with every rank's stack in its log, when no rank has moved on for so many "
        "seconds; 0 turns this off.", ge=0,
    )  # fmt: skip
    max_restarts: int = _field(
        0, "running", "After a failure, start again from the newest checkpoint, so many times.",
        ge=0, le=1000,
    )  # fmt: skip
    auto_resume: Bool = _field(
        False, "running", "Queue the job again by itself after the machine was restarted."
    )
    distributed_timeout_seconds: float = _field(
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
    return field is not None and field.annotation in (bool, bool | None)


def takes_many(name: str) -> bool:
    """Whether a field holds a list."""
    field = JobSpec.model_fields.get(name)
    return field is not None and "list[" in str(field.annotation)
