"""How the job runs and ends."""

from __future__ import annotations

from pydantic import BaseModel

from jobs.spec.values.value_types import Bool, field


class RunningKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

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
