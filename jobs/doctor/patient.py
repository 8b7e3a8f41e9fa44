"""What is asked of the doctor, and what one check learned that others need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.doctor.checks.torch_build import TorchFacts
    from jobs.doctor.nvml import Nvml
    from jobs.spec.job_spec import JobSpec


@dataclass
class Patient:
    """The machine, and the job it is meant to run.

    What is None was not asked for, or could not be found out; then a check that needs it has
    nothing to say, because whoever should have found it out has said why not.

    Attributes:
        job: The job file, if there is one.
        gpus: Devices to look at and to measure, by index or UUID; all when empty.
        quick: Leave the all-reduce out.
        run_id: In the environment of every process that is started, so that none is left.
        spec: The job.
        nvml: What the driver says.
        torch: What torch says.
    """

    job: Path | None = None
    gpus: tuple[str, ...] = ()
    quick: bool = False
    run_id: str = ""
    spec: JobSpec | None = None
    nvml: Nvml | None = None
    torch: TorchFacts | None = None
