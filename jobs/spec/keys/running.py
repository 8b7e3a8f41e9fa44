"""How the job runs and ends."""

from __future__ import annotations

from jobs.spec.keys.groups import RUNNING
from jobs.spec.values.field import Keys, field
from jobs.spec.values.value_types import Bool


class RunningKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    stop_grace_seconds: float = field(
        600.0,
        RUNNING,
        "Seconds to wait after a stop request for the step and the save before ranks get SIGTERM.",
        resume="same",
        memory=False,
        gt=0,
    )
    hang_timeout: float = field(
        1800.0,
        RUNNING,
        "Seconds without progress on any rank before the job is ended, with every rank's stack in "
        "its log; 0 turns this off.",
        resume="same",
        memory=False,
        ge=0,
    )
    max_restarts: int = field(
        0,
        RUNNING,
        "Maximum number of automatic restarts from the newest checkpoint after a failure.",
        resume="same",
        memory=False,
        ge=0,
        le=1000,
    )
    auto_resume: Bool = field(
        False,
        RUNNING,
        "Queue the job again automatically after a reboot.",
        resume="same",
        memory=False,
    )
    distributed_timeout_seconds: float = field(
        1800.0,
        RUNNING,
        "Seconds a collective may wait before the job fails.",
        resume="same",
        memory=False,
        gt=0,
    )
