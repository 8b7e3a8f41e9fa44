"""How the job runs and ends."""

from __future__ import annotations

from pydantic import BaseModel

from jobs.spec.values.value_types import Bool, field


class RunningKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    stop_grace_seconds: float = field(
        600.0,
        "running",
        "Seconds to wait after a stop request for the step and the save before ranks get SIGTERM.",
        gt=0,
    )
    hang_timeout: float = field(
        1800.0,
        "running",
        "Seconds without progress on any rank before the job is ended, with every rank's stack in "
        "its log; 0 turns this off.",
        ge=0,
    )
    max_restarts: int = field(
        0,
        "running",
        "Maximum number of automatic restarts from the newest checkpoint after a failure.",
        ge=0,
        le=1000,
    )
    auto_resume: Bool = field(False, "running", "Queue the job again automatically after a reboot.")
    distributed_timeout_seconds: float = field(
        1800.0, "running", "Seconds a collective may wait before the job fails.", gt=0
    )
