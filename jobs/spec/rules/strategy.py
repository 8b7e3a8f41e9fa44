"""Choose the strategy by which ranks share the work of a job, and its number of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.devices import DeviceKeys, FsdpKeys

SHARDING: Final = ("fsdp2", "hsdp")

# Variables that tell the ranks the launcher's choice, and the reason.
STRATEGY_VARIABLE: Final = "FSDP_TUI_STRATEGY"
REASON_VARIABLE: Final = "FSDP_TUI_STRATEGY_REASON"
AS_ASKED: Final = "set in job"
_ENABLED: Final = "fsdp_enable is on"

# Lists the user's wrap policies that may be imported before a job runs; see `may_import`.
POLICIES_VARIABLE: Final = "FSDP_TUI_WRAP_POLICIES"
_TORCHS_POLICIES: Final = "torch.distributed.fsdp.wrap"

# Assumptions of `auto` without a prediction. They are rough on purpose, because they only choose
# between a full copy of the model on every rank (faster) and a shard (fits).
# a parameter's fp32 master, gradient and two Adam moments, and its bf16 copy
_FULL_BYTES: Final = 18
_ROOM_FOR_WEIGHTS: Final = 0.6  # the rest of a GPU is for activations, kernels and the allocator


@dataclass(frozen=True)
class Whole:
    """The prediction for a rank that holds the full model (ddp), in bytes.

    Attributes:
        needed: Upper end of the prediction.
        free: Free bytes on the tightest GPU.
        fits: Whether it surely fits.
    """

    needed: int
    free: int
    fits: bool


@dataclass(frozen=True)
class Room:
    """The facts by which `auto` decides.

    Attributes:
        parameters: Number of parameters of the transformer.
        gpu_bytes: Memory of the job's smallest GPU.
        whole: The prediction, if there is one; it replaces the rough rule.
    """

    parameters: int
    gpu_bytes: int
    whole: Whole | None = None


def world_size(spec: DeviceKeys) -> int:
    """Return the number of ranks the job asks for."""
    if spec.num_processes is not None:
        return spec.num_processes
    if isinstance(spec.gpus, int):
        return spec.gpus
    return len(spec.gpus) if spec.gpus else 1


def replicas_of(spec: RecipeKeys, strategy: str | None = None) -> int:
    """Return the number of sharded model replicas: with HSDP one per machine by default, else 1.

    Args:
        spec: The job.
        strategy: The strategy it runs with; by default the one it asks for.
    """
    if (strategy or chosen_strategy(spec)[0]) != "hsdp":
        return 1
    return spec.dp_replicate_size or spec.num_machines


def data_parallel_size(spec: DeviceKeys, ranks: int | None = None) -> int:
    """Return how many ranks, or groups of context-parallel ranks, train on different samples.

    Args:
        spec: The job.
        ranks: World size; default: the job's.
    """
    return max(1, (ranks or world_size(spec)) // spec.context_parallel_size)


def chosen_strategy(spec: RecipeKeys, room: Room | None = None) -> tuple[str, str]:
    """Return the strategy that will run, and why.

    Args:
        spec: The job.
        room: The machine's memory, as far as known; without it `auto` shards.

    Returns:
        `(strategy, reason)`, where the strategy is one of single, ddp, fsdp2, hsdp.
    """
    settled = _settled(spec)
    if settled is not None:
        return settled
    ranks = world_size(spec)
    if room is None and _has_replicas(spec):
        return "hsdp", _per_machine(spec)
    if room is None:
        return "fsdp2", f"{ranks} ranks, each holds 1/{ranks} of the weights"
    if room.whole is not None:
        share = f"{room.whole.needed / 2**30:.1f} of {room.whole.free / 2**30:.1f} GiB"
        if room.whole.fits:
            return "ddp", f"a full copy fits (predicted: at most {share}), which is faster"
        return "fsdp2", f"a full copy may not fit (predicted: up to {share})"
    needed = room.parameters * _bytes_per_parameter(spec)
    what = "frozen weights" if spec.model_type == "lora" else "weights, gradients and Adam's state"
    share = (
        f"{what}: about {needed / 2**30:.1f} of {room.gpu_bytes / 2**30:.1f} GiB, rough estimate"
    )
    if needed <= _ROOM_FOR_WEIGHTS * room.gpu_bytes:
        return "ddp", f"a full copy fits on every GPU ({share}), which is faster"
    if _has_replicas(spec) and needed * spec.num_machines <= (
        ranks * _ROOM_FOR_WEIGHTS * room.gpu_bytes
    ):
        return "hsdp", f"{_per_machine(spec)} ({share})"
    return "fsdp2", f"a full copy would fill a GPU ({share})"


def _has_replicas(spec: DeviceKeys) -> bool:
    """Return whether `auto` may give each machine its own replica, sharded over its ranks.

    Across machines FSDP2 moves all weights in every step, HSDP only the gradients.
    """
    return spec.num_machines > 1 and world_size(spec) >= 2 * spec.num_machines


def _per_machine(spec: DeviceKeys) -> str:
    return f"{spec.num_machines} machines, each holds a replica; only gradients cross the network"


def launched_strategy(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the strategy that a launch was given, and why; both empty if there was none.

    Args:
        environment: The launch's environment; older launches have both in one variable.
    """
    strategy, _, reason = str(environment.get(STRATEGY_VARIABLE, "")).partition(": ")
    return strategy, str(environment.get(REASON_VARIABLE, reason))


def depends_on_memory(spec: RecipeKeys) -> bool:
    """Return whether `auto` may choose another strategy once it knows the GPUs' memory."""
    return _settled(spec) is None and spec.device != "cpu"


def _settled(spec: RecipeKeys) -> tuple[str, str] | None:
    """Return the strategy and the reason, if the job's own settings decide; else None."""
    if spec.strategy != "auto":
        return spec.strategy, AS_ASKED
    ranks = world_size(spec)
    if spec.fsdp_enable:
        return ("hsdp", _per_machine(spec)) if _has_replicas(spec) else ("fsdp2", _ENABLED)
    if ranks <= 1:
        return "single", "1 rank"
    if spec.fsdp_enable is False:
        return "ddp", f"fsdp_enable is off, {ranks} ranks"
    if spec.context_parallel_size > 1:
        return "fsdp2", "context parallelism requires it"
    if spec.fsdp_cpu_offload:
        return "fsdp2", "fsdp_cpu_offload needs it"
    if spec.model_type == "lora" and spec.lora_placement == "sharded":
        return "fsdp2", "lora_placement: sharded needs it"
    if spec.model_type == "lora" and spec.swap_blocks:
        return "ddp", "swap_blocks needs it"
    if isinstance(spec.batch_shares, dict):
        return "ddp", "batch_shares needs it"
    return None


def shards(spec: RecipeKeys) -> bool:
    """Return whether the job uses FSDP; `auto` with several ranks counts."""
    return chosen_strategy(spec)[0] in SHARDING


def own_policy(spec: FsdpKeys) -> str | None:
    """Return the dotted path of the user's own wrap policy; None for the built-in ones."""
    return spec.fsdp_auto_wrap_policy if "." in spec.fsdp_auto_wrap_policy else None


def may_import(policy: str) -> bool:
    """Return whether a wrap policy may be imported outside of a running job.

    Importing runs code, and a job file may come from anywhere. Allowed are torch's own policies and
    the modules or packages that the user lists in `FSDP_TUI_WRAP_POLICIES`, separated by commas.
    """
    named = os.environ.get(POLICIES_VARIABLE, "").replace(",", " ").split()
    return any(policy.startswith(f"{prefix}.") for prefix in (_TORCHS_POLICIES, *named))


def checkpoints_activations(spec: RecipeKeys) -> bool:
    """Return whether activations are recomputed; accelerate's FSDP key means the same."""
    return spec.gradient_checkpointing or spec.fsdp_activation_checkpointing


def _bytes_per_parameter(spec: RecipeKeys) -> int:
    if spec.model_type == "full":
        return _FULL_BYTES
    return 4 if spec.mixed_precision == "no" else 2
