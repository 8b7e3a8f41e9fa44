"""Whether a job has averaged weights, which its samples and exports use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec

SCHEDULE_FREE: Final = "adamw_schedule_free"


def has_average(spec: JobSpec) -> bool:
    """Whether it keeps a moving average, or has an optimizer that averages by itself."""
    return spec.use_ema or spec.optimizer == SCHEDULE_FREE
