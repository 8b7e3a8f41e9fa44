"""Check that host memory can hold what a job keeps there, before it is queued or resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psutil

from jobs.errors import SpecError, UserError
from jobs.machine.cgroups import memory_rooms
from jobs.models.find_model import count_parameters, find_denoiser
from jobs.spec.rules.strategy import shards, world_size
from jobs.units import size

if TYPE_CHECKING:
    from jobs.spec.job_spec import RecipeKeys

# Lower bound of optimizer state, in bytes per trained parameter. The exact formulas need shapes and
# are in `engine.memory.predict`.
STATE_BYTES: Final[dict[str, int]] = {
    "adamw": 8,
    "adamw_8bit": 2,
    "adamw_schedule_free": 8,
    "sgd": 0,
    "lion": 4,
    "came": 4,
    "adafactor": 0,
    "prodigy": 16,
    "muon": 4,
}
_MASTER_AND_GRADIENT: Final = 8  # both in fp32


def check_host_memory(spec: RecipeKeys, *, on_gpus: bool) -> None:
    """Reject a job whose minimum host memory exceeds what the machine has in total.

    Args:
        spec: The job.
        on_gpus: Whether its ranks run on GPUs; then only offloaded data is in host memory.

    Raises:
        SpecError: The job does not fit.
    """
    offloads = spec.fsdp_cpu_offload and shards(spec)
    if on_gpus and not offloads:
        return
    try:
        transformer = find_denoiser(spec)
    except UserError:
        return
    needed = (count_parameters(transformer) or 0) * _least_bytes(spec) * _copies(spec)
    present = host_bytes()
    if needed <= present:
        return
    what = "weights" if spec.model_type == "lora" else "weights, gradients and optimizer state"
    raise SpecError(
        f"{'fsdp_cpu_offload: ' if on_gpus else ''}the job needs at least {size(needed)} of host "
        f"memory for {what}; this machine has {size(present)}",
        "remove fsdp_cpu_offload, or use a machine with more memory"
        if on_gpus
        else "run it on GPUs, or on a machine with more memory",
    )


def host_bytes() -> int:
    """Return memory plus swap in bytes, or the container's limit if that is lower."""
    limits = [limit for _, limit in memory_rooms()]
    return min([psutil.virtual_memory().total + psutil.swap_memory().total, *limits])


def _least_bytes(spec: RecipeKeys) -> int:
    if spec.model_type == "full":
        return _MASTER_AND_GRADIENT + STATE_BYTES[spec.optimizer]
    return 4 if spec.mixed_precision == "no" else 2


def _copies(spec: RecipeKeys) -> int:
    return (spec.dp_replicate_size or 1) if shards(spec) else world_size(spec)
