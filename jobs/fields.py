"""The types that a job's fields are made of: what they allow, and how it may be spelled."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from jobs.spellings import as_bool, as_choice, as_list, as_none

ModelType = Literal["lora", "full"]
Strategy = Literal["auto", "single", "ddp", "fsdp2", "hsdp"]
Precision = Literal["no", "bf16", "fp16"]
Optimizer = Literal["adamw", "sgd", "adafactor", "adamw_8bit", "prodigy", "lion"]
LRScheduler = Literal["constant", "constant_with_warmup", "linear", "cosine"]
TimestepSampling = Literal["uniform", "logit_normal", "shift"]
Placement = Literal["replicated", "sharded"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
StateDictType = Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
Device = Literal["auto", "cuda", "cpu"]
Loss = Literal["mse", "huber", "smooth_l1"]
CheckpointPolicy = Literal["full", "selective"]
AttentionBackend = Literal["auto", "flash", "efficient", "cudnn", "math"]
EmaDevice = Literal["accelerator", "cpu"]
NonFinite = Literal["fail", "skip"]
SaveFailure = Literal["stop", "warn"]
ContextParallelStrategy = Literal["allgather", "alltoall"]
Crop = Literal["center", "random"]
CaptionLines = Literal["variants", "joined"]
MissingCaptions = Literal["skip", "empty"]


def choice(literal: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: as_choice(value, get_args(literal)))


def read_family(value: Any) -> Any:
    """`Qwen-Image` is `qwen_image`."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else value


def read_state_dict_type(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lower() in {"full", "sharded"}:
        value = f"{value.strip()}_state_dict"
    return as_choice(value, get_args(StateDictType))


_V1_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")


def read_loss(value: Any) -> Any:
    """`l2`, as other trainers call it, is `mse`."""
    if isinstance(value, str) and value.strip().lower() == "l2":
        return "mse"
    return as_choice(value, get_args(Loss))


def read_reshard(value: Any) -> Any:
    """Yes, no, or into how many shards; 1 and 0 are yes and no."""
    if isinstance(value, str) and value.strip().isdigit() and int(value) > 1:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value in (0, 1):
        return bool(value)
    return as_bool(value)


def read_prefetch(value: Any) -> Any:
    """A number of units; yes and no mean 1 and 0, and so do FSDP v1's words.

    What they name, FSDP2 does by itself: it gathers the next unit while one computes.
    """
    if isinstance(value, str) and value.strip().upper() in _V1_PREFETCH:
        return 0
    value = as_bool(value) if not (isinstance(value, str) and value.strip().isdigit()) else value
    return int(value) if isinstance(value, bool) else value


def read_wrap_policy(value: Any) -> Any:
    if isinstance(value, str) and not value.strip().lower().endswith("wrap"):
        value = f"{value.strip()}_wrap"
    return as_choice(value, get_args(WrapPolicy))


def read_gpus(value: Any) -> Any:
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


def field(default: Any, group: str, help_text: str, **limits: Any) -> Any:
    return Field(default, description=help_text, json_schema_extra={"group": group}, **limits)
