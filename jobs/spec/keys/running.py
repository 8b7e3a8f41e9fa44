"""Keys for how the job runs and ends."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from jobs.spec.keys.groups import RUNNING, SLURM
from jobs.spec.rules.no_effect import not_of_a_sweep, not_slurm
from jobs.spec.values.field import Keys, field
from jobs.spec.values.spellings import as_none
from jobs.spec.values.value_types import (
    Bool,
    Launcher,
    OptionalText,
    OptionalTextList,
    OptionalWords,
    SlurmTime,
    choice,
)


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
    stop_worse_than_median_after: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        RUNNING,
        "Stop this job of a sweep, with a checkpoint, if after this many steps what its "
        "checkpoints are judged by (its training loss, where nothing is held out) is worse than "
        "the median of the other jobs at the same step.",
        resume="same",
        no_effect=not_of_a_sweep,
        memory=False,
        label="stop worse than median after",
        blank="never",
        ge=1,
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


# -- slurm ----------------------------------------------------------------------------------
# How a job is submitted to Slurm.


_WORD = r"^[^\s\x00]+$"


class SlurmKeys(Keys):
    """A part of `jobs.spec.job_spec.JobSpec`."""

    launcher: Annotated[Launcher, choice(Launcher)] = field(
        "local",
        SLURM,
        "local: ranks run on this machine; slurm: the job goes to Slurm, which the state directory "
        "must be shared with.",
        resume="same",
        memory=False,
        public=False,
    )
    slurm_partition: OptionalText = field(
        None,
        SLURM,
        "Partition (default: the cluster's).",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="partition",
        max_length=200,
        pattern=_WORD,
    )
    slurm_account: OptionalText = field(
        None,
        SLURM,
        "Account to charge (default: yours).",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="account",
        max_length=200,
        pattern=_WORD,
    )
    slurm_qos: OptionalText = field(
        None,
        SLURM,
        "Quality of service.",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="QOS",
        max_length=200,
        pattern=_WORD,
    )
    slurm_time: SlurmTime = field(
        None,
        SLURM,
        "Time limit of one allocation: minutes, hours:minutes:seconds, or days-hours.",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="time limit",
    )
    slurm_signal_seconds: Annotated[int | None, BeforeValidator(as_none)] = field(
        None,
        SLURM,
        "Seconds before the time limit at which the job saves (default: derived from the last "
        "save, 300 at first).",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="save before limit",
        ge=10,
        le=65535,
        public=False,
    )
    slurm_requeue: Bool = field(
        True,
        SLURM,
        "At the time limit, save and requeue; also lets Slurm requeue after preemption or a node "
        "failure.",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="requeue",
        public=False,
    )
    slurm_extra_args: OptionalWords = field(
        None,
        SLURM,
        "Extra options for sbatch, such as --exclude=node7.",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="sbatch options",
    )
    slurm_setup: OptionalTextList = field(
        None,
        SLURM,
        "Shell lines that the batch script runs first: load modules, activate an environment, "
        "stage data.",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="setup lines",
    )
    slurm_srun_args: OptionalWords = field(
        None,
        SLURM,
        "Extra options for srun, such as --container-image=FILE.",
        resume="same",
        no_effect=not_slurm,
        memory=False,
        label="srun options",
    )
