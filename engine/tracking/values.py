"""What a tracker gets of an event, and under which names. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from jobs.spec.job_spec import is_public

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.run.rundir import RankStatus
    from jobs.spec.job_spec import JobSpec

_GIB: Final = 1 << 30
# Of a step's event: its name in trackers.
_OF_STEP: Final = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "seconds": "speed/seconds_per_step",
    "data_seconds": "speed/seconds_for_data",
    "images_per_second": "speed/images_per_second",
}


def step_values(event: dict[str, Any]) -> dict[str, float]:
    """Return the scalars of a step."""
    values = {name: event[key] for key, name in _OF_STEP.items() if _is_number(event.get(key))}
    peak = event.get("peak_bytes")
    if _is_number(peak):
        values["memory/peak_gib"] = peak / _GIB
    return values


def validation_values(event: dict[str, Any]) -> dict[str, float]:
    """Return the validation loss, and that of each noise level, from 0 (clean) to 1."""
    losses = {"validation/loss": event.get("loss")}
    for level, loss in event.get("levels") or ():
        losses[f"validation/loss_at_{level:.3f}"] = loss
    return {name: loss for name, loss in losses.items() if _is_number(loss)}


def memory_values(ranks: Iterable[RankStatus]) -> dict[str, float]:
    """Return the memory of each rank, in GiB: allocated on its GPU, or resident on CPU ranks."""
    sizes = {status.rank: status.allocated or status.rss for status in ranks}
    return {f"memory/rank{rank}_gib": size / _GIB for rank, size in sizes.items() if size}


def config_values(spec: JobSpec) -> dict[str, bool | int | float | str]:
    """Return the job's public keys in types that trackers take.

    Lists become text; keys that are not set are skipped.
    """
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in spec.to_dict().items()
        if value is not None and is_public(key)
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
