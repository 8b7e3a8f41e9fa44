"""What is predicted of a job as it stands: from the cache, else from the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jobs.errors import SpecError, UserError
from jobs.machine.engine_tools import ToolError
from jobs.memory import cache
from jobs.memory.predicted import Predicted
from jobs.models.blocks.model_config import find_target
from jobs.models.model_files import check_config
from jobs.spec.families import FAMILIES
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.steps import accumulation_steps, is_whole_batch
from jobs.spec.rules.strategy import SHARDING, replicas_of, world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.memory.client import Server
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.job import JobKeys


@dataclass(frozen=True)
class Refused:
    """Why nothing is predicted for a strategy and a number of ranks."""

    strategy: str
    ranks: int
    error: str
    hint: str | None = None


def arranged(spec: JobSpec, strategy: str, ranks: int, *, on_gpus: bool) -> JobSpec:
    """Return the job with this strategy on `ranks` ranks, without keys of another strategy.

    Raises:
        SpecError: A job cannot be so.
    """
    sharding = strategy in SHARDING
    replicas = max(2, replicas_of(spec, strategy)) if strategy == "hsdp" else 1
    changes: dict[str, Any] = {
        "strategy": strategy,
        "num_processes": ranks,
        "gpus": None,
        "fsdp_enable": None,
        "device": "cuda" if on_gpus else "cpu",
        "dp_replicate_size": replicas if strategy == "hsdp" else None,
    }
    if not sharding:
        changes |= {"lora_placement": "replicated", "context_parallel_size": 1}
        if spec.fsdp_activation_checkpointing:  # the same without FSDP
            changes |= {"fsdp_activation_checkpointing": False, "gradient_checkpointing": True}
    if not (sharding and on_gpus):
        changes["fsdp_cpu_offload"] = spec.fsdp_cpu_offload and sharding
    there = spec.model_copy(update=changes)
    if not is_whole_batch(there):  # memory asks only whether a rank accumulates
        forwards = accumulation_steps(there)
        changes |= {"global_batch_size": None, "gradient_accumulation_steps": forwards}
    number, shards = spec.fsdp_reshard_after_forward, ranks // replicas
    if type(number) is int and number != 1 and not (number < shards and shards % number == 0):
        changes["fsdp_reshard_after_forward"] = True
    try:
        # As it is queued, so that what the form asks for is found again when the job starts.
        return settle(type(spec).model_validate(spec.to_dict() | changes))
    except ValidationError as error:
        raise SpecError(f"{strategy} on {ranks} ranks: {error.errors()[0]['msg']}") from None


def key_of(spec: JobSpec) -> str:
    """Names the prediction of a job whose strategy and ranks are settled.

    Raises:
        UserError: Its model is unknown, or not there.
    """
    return cache.key_of(spec.to_dict(), _config_of(spec))


def _config_of(spec: JobKeys) -> dict[str, Any]:
    """Return the config of a job's denoiser.

    Raises:
        UserError: The model is unknown, or not there.
    """
    # A snapshot of the cache and the hub id have the same config, and the same prediction.
    return find_target(
        spec.model_family, spec.model_flavour, spec.pretrained_model_name_or_path or None
    ).config


def recall(spec: JobSpec, strategy: str, ranks: int, *, on_gpus: bool) -> Predicted | None:
    """Recall a job's cached prediction; starts no process and never fails."""
    try:
        return cache.recall(key_of(arranged(spec, strategy, ranks, on_gpus=on_gpus)))
    except (UserError, OSError):
        return None


def predict(
    spec: JobSpec,
    server: Server,
    *,
    strategy: str,
    ranks: int | None = None,
    on_gpus: bool = True,
    refresh: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> Predicted | Refused:
    """Predict what one rank of a job needs.

    Args:
        spec: The job; its model need not be on this machine if it is a published one.
        server: Predicts what is not in the cache.
        strategy: One of single, ddp, fsdp2, hsdp.
        ranks: Other than the job's own.
        on_gpus: Whether for GPUs, whatever this machine has.
        refresh: Predict again, and keep that instead.
        cancelled: Asked many times a second, in the thread of the caller.

    Raises:
        SpecError: Nothing can be predicted for such a model.
        ToolError: Predicting failed.
        Cancelled: `cancelled` said so.
    """
    ranks = ranks or world_size(spec)
    try:
        job = arranged(spec, strategy, ranks, on_gpus=on_gpus)
    except SpecError as error:
        return Refused(strategy, ranks, error.message, error.hint)
    complete, config = _complete(job), _config_of(job)
    if (refused := _why_refused(complete, config)) is not None:
        return Refused(strategy, ranks, *refused)
    key = cache.key_of(job.to_dict(), config)
    if not refresh and (cached := cache.recall(key)) is not None:
        return cached
    request = {"job": complete.to_dict(), "ranks": [ranks], "strategies": [strategy]}
    answer = server.ask(request, cancelled)
    try:
        for values in answer["predictions"]:
            predicted = Predicted.of(values)
            cache.remember(key, predicted)
            return predicted
        (first, *_) = answer["failed"]
        return Refused(strategy, ranks, str(first["error"]), first.get("hint"))
    except (ValueError, LookupError, TypeError) as error:
        raise ToolError(f"unexpected answer from python -m engine.memory: {error!r}") from None


def _complete(spec: JobSpec) -> JobSpec:
    """Fill in the paths that a prediction does not read."""
    values: dict[str, Any] = {}
    if not (spec.dataset or spec.datasets):
        values["dataset"] = "."
    if not spec.pretrained_model_name_or_path:
        family = FAMILIES[spec.model_family]
        flavour = spec.model_flavour or next(iter(family.flavours))
        values["pretrained_model_name_or_path"] = family.flavours[flavour].hub_id
    return spec.model_copy(update=values)


def _why_refused(spec: JobSpec, config: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Say why `submit` refuses a complete job, and what to do; None if it does not."""
    if conflicts := find_conflicts(spec):
        return "; ".join(conflict.message for conflict in conflicts), None
    try:
        check_config(spec, config)
    except SpecError as error:
        return error.message, error.hint
    return None
