"""Determine whether a job averages its weights for samples and exports, and what that excludes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.spec.rules.data_conflicts import Conflict
from jobs.spec.rules.strategy import shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.job_spec import JobSpec, RecipeKeys

SCHEDULE_FREE: Final = "adamw_schedule_free"


def has_average(spec: RecipeKeys) -> bool:
    """Return whether the job keeps a moving average or its optimizer averages the weights."""
    return spec.use_ema or spec.optimizer == SCHEDULE_FREE


def _schedule_free(spec: RecipeKeys) -> Conflict | None:
    if spec.optimizer != SCHEDULE_FREE:
        return None
    if spec.use_ema:
        return Conflict(
            "use_ema",
            f"optimizer: {SCHEDULE_FREE} averages the weights itself; remove use_ema",
        )
    if spec.adam_beta1 == 0:
        return Conflict(
            "adam_beta1",
            f"optimizer: {SCHEDULE_FREE} needs adam_beta1 above 0; its authors use 0.9",
        )
    return None


def _ema(spec: RecipeKeys) -> Conflict | None:
    if spec.use_ema and spec.ema_device == "cpu" and shards(spec):
        return Conflict(
            "ema_device",
            "cpu cannot be used with FSDP, which shards the moving average; remove it, or set "
            "strategy: ddp",
            named=True,
        )
    return None


AVERAGE_RULES: Final[tuple[Callable[[JobSpec], Conflict | None], ...]] = (_schedule_free, _ema)
