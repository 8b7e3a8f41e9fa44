"""How a job is handed to Slurm."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator

from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    Bool,
    Launcher,
    OptionalText,
    OptionalTextList,
    OptionalWords,
    SlurmTime,
    choice,
    field,
)

_WORD = r"^[^\s\x00]+$"


class SlurmKeys(BaseModel):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    launcher: Annotated[Launcher, choice(Launcher)] = field(
        "local",
        "slurm",
        "local: ranks run on this machine; slurm: the job goes to Slurm, which the state directory "
        "must be shared with.",
    )
    slurm_partition: OptionalText = field(
        None, "slurm", "Partition (default: the cluster's).", max_length=200, pattern=_WORD
    )
    slurm_account: OptionalText = field(
        None, "slurm", "Account to charge (default: yours).", max_length=200, pattern=_WORD
    )
    slurm_qos: OptionalText = field(
        None, "slurm", "Quality of service.", max_length=200, pattern=_WORD
    )
    slurm_time: SlurmTime = field(
        None,
        "slurm",
        "Time limit of one allocation: minutes, hours:minutes:seconds, or days-hours.",
    )
    slurm_signal_seconds: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        "slurm",
        "Seconds before the time limit at which the job saves (default: derived from the last "
        "save, 300 at first).",
        ge=10,
        le=65535,
    )
    slurm_requeue: Bool = field(
        True,
        "slurm",
        "At the time limit, save and requeue; also lets Slurm requeue after preemption or a node "
        "failure.",
    )
    slurm_extra_args: OptionalWords = field(
        None, "slurm", "Extra options for sbatch, such as --exclude=node7."
    )
    slurm_setup: OptionalTextList = field(
        None,
        "slurm",
        "Shell lines that the batch script runs first: load modules, activate an environment, "
        "stage data.",
    )
    slurm_srun_args: OptionalWords = field(
        None, "slurm", "Extra options for srun, such as --container-image=FILE."
    )
