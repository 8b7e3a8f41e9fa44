"""Combinations of settings that cannot run, found before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec import JobSpec


@dataclass(frozen=True)
class Conflict:
    """A combination that cannot run: the key to look at, and one sentence."""

    key: str
    message: str


def world_size(spec: JobSpec) -> int:
    """The number of ranks the job asks for."""
    if spec.num_processes is not None:
        return spec.num_processes
    if isinstance(spec.gpus, int):
        return spec.gpus
    return len(spec.gpus) if spec.gpus else 1


def chosen_strategy(spec: JobSpec) -> tuple[str, str]:
    """The strategy that will run, and why.

    Returns:
        `(strategy, reason)`, the strategy one of single, ddp, fsdp2.
    """
    if spec.strategy != "auto":
        return spec.strategy, "as asked"
    if spec.fsdp_enable:
        return "fsdp2", "fsdp_enable is on"
    ranks = world_size(spec)
    if ranks <= 1:
        return "single", "there is one rank"
    if spec.fsdp_enable is False:
        return "ddp", f"fsdp_enable is off and there are {ranks} ranks"
    return "fsdp2", f"there are {ranks} ranks, so that each holds 1/{ranks} of the weights"


def find_conflicts(spec: JobSpec) -> list[Conflict]:
    """Every conflict in the job, in the order of the table below."""
    found = (rule(spec) for rule in _RULES)
    return [conflict for conflict in found if conflict is not None]


def _no_model(spec: JobSpec) -> Conflict | None:
    key = "pretrained_model_name_or_path"
    return None if spec.pretrained_model_name_or_path else Conflict(key, f"{key} is missing")


def _no_dataset(spec: JobSpec) -> Conflict | None:
    return None if spec.dataset else Conflict("dataset", "dataset is missing")


def _gpu_count(spec: JobSpec) -> Conflict | None:
    if spec.gpus is None:
        return None
    asked = spec.gpus if isinstance(spec.gpus, int) else len(spec.gpus)
    if spec.device == "cpu":
        return Conflict("gpus", "gpus and device: cpu exclude each other")
    if asked < 1:
        return Conflict("gpus", "gpus asks for none; leave it out, or write [0] for GPU number 0")
    if isinstance(spec.gpus, list) and len(set(spec.gpus)) != len(spec.gpus):
        return Conflict("gpus", "gpus names the same GPU twice")
    if spec.num_processes is not None and spec.num_processes != asked:
        return Conflict(
            "num_processes",
            f"num_processes is {spec.num_processes} but gpus names {asked}; "
            "give one of them, or the same number",
        )
    return None


def _strategy(spec: JobSpec) -> Conflict | None:
    strategy, _ = chosen_strategy(spec)
    ranks = world_size(spec)
    if spec.fsdp_enable and spec.strategy not in ("auto", "fsdp2"):
        return Conflict("strategy", f"fsdp_enable: true and strategy: {spec.strategy} contradict")
    if spec.fsdp_enable is False and spec.strategy == "fsdp2":
        return Conflict("strategy", "fsdp_enable: false and strategy: fsdp2 contradict")
    if strategy == "single" and ranks > 1:
        return Conflict("strategy", f"strategy: single runs one rank, not {ranks}")
    if strategy in ("fsdp2", "ddp") and ranks < 2:
        return Conflict(
            "strategy",
            f"{strategy} needs two or more ranks; raise num_processes, or use strategy: single",
        )
    return None


def _fsdp_version(spec: JobSpec) -> Conflict | None:
    if spec.fsdp_version == 1:
        return Conflict("fsdp_version", "FSDP v1 is deprecated and not run; use fsdp_version: 2")
    return None


def _state_dict(spec: JobSpec) -> Conflict | None:
    if spec.fsdp_state_dict_type == "FULL_STATE_DICT":
        return Conflict(
            "fsdp_state_dict_type",
            "FULL_STATE_DICT checkpoints are not written yet; use SHARDED_STATE_DICT "
            "(the export is whole either way)",
        )
    return None


def _wrap(spec: JobSpec) -> Conflict | None:
    if spec.fsdp_transformer_layer_cls_to_wrap and (
        spec.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP"
    ):
        return Conflict(
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_transformer_layer_cls_to_wrap needs fsdp_auto_wrap_policy: "
            "TRANSFORMER_BASED_WRAP",
        )
    return None


def _fp16(spec: JobSpec) -> Conflict | None:
    if spec.mixed_precision == "fp16":
        return Conflict(
            "mixed_precision", "fp16 needs a loss scaler, which is not here yet; use bf16 or no"
        )
    return None


def _text_encoders(spec: JobSpec) -> Conflict | None:
    if not spec.cache_text_embeddings:
        return Conflict(
            "cache_text_embeddings",
            "captions are always encoded once, before training; leave cache_text_embeddings on",
        )
    if not spec.unload_text_encoder:
        return Conflict(
            "unload_text_encoder",
            "text encoders are always freed before training; leave unload_text_encoder on",
        )
    return None


def _warmup(spec: JobSpec) -> Conflict | None:
    if spec.lr_warmup_steps and spec.lr_scheduler == "constant":
        return Conflict(
            "lr_warmup_steps",
            "lr_scheduler: constant has no warm-up; use constant_with_warmup",
        )
    if spec.lr_warmup_steps > spec.max_train_steps:
        return Conflict(
            "lr_warmup_steps",
            f"lr_warmup_steps ({spec.lr_warmup_steps}) is more than max_train_steps "
            f"({spec.max_train_steps})",
        )
    return None


_RULES: tuple[Callable[[JobSpec], Conflict | None], ...] = (
    _no_model,
    _no_dataset,
    _gpu_count,
    _strategy,
    _fsdp_version,
    _state_dict,
    _wrap,
    _fp16,
    _text_encoders,
    _warmup,
)
