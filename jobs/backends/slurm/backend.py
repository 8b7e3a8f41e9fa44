"""Slurm as a backend of the queue."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from jobs.backends.keeper import ensure
from jobs.backends.slurm import commands, records
from jobs.backends.slurm.commands import ask_partitions, unknown_partition
from jobs.backends.slurm.script import script_by_hand
from jobs.errors import SpecError
from jobs.queue.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

_STOPS: Final = {
    1: "stops after the current step, with a checkpoint",
    2: "gets SIGTERM; it saves if it can",
    3: "is cancelled; steps since its last checkpoint are lost",
}


class Slurm:
    """Implement `jobs.backends.port.Backend` for the cluster whose commands this machine has."""

    name = records.NAME
    title = "Slurm"
    hold_hint = "`scontrol hold` keeps it there"
    lock = "slurm.lock"
    log = "slurm.log"

    def request(self, spec: JobSpec) -> list[str]:
        """Require only Slurm's commands; this machine's devices say nothing about the nodes."""
        if not commands.installed():
            raise SpecError(
                "launcher: slurm needs Slurm's commands; sbatch is not installed on this machine",
                "submit on a login node of the cluster, or set launcher: local",
            )
        return [self.name]

    def warnings(self, spec: JobSpec) -> list[str]:
        """Warn about a partition that Slurm does not list.

        Only a warning, because Slurm decides.
        """
        if spec.slurm_partition is None:
            return []
        unknown = unknown_partition(spec.slurm_partition, ask_partitions())
        return [unknown] if unknown else []

    def keeper(self, store: Store) -> Callable[[], bool]:
        from jobs.backends.slurm.keeper import ASK_EVERY, Keeper  # not needed for reading

        return Keeper(store, float(os.environ.get("FSDP_TUI_SLURM_INTERVAL", ASK_EVERY))).look

    def holds(self, job: Job) -> str:
        return "Slurm's queue" if records.read_submission(job.run_dir, job.attempt) else ""

    def stop(self, store: Store, job: Job, *, now: bool) -> str:
        """Request a stop, which the supervisor in the allocation or the keeper carries out."""
        level = min(3, store.raise_stop_level(job.id, 3 if now else job.stop_level + 1))
        records.request_stop(job.run_dir, job.attempt, level)
        ensure(store, self)
        if job.state is State.QUEUED:
            return f"job {job.id} is being taken out of Slurm's queue"
        return f"job {job.id} {_STOPS[level]}"

    def facts(self, store: Store, job: Job) -> dict[str, Any]:
        """Return the Slurm job id, the job's queue position, and the age of that information."""
        return records.slurm_facts(store, job)

    def restore(self, run_dir: RunDir) -> Mapping[str, object]:
        """Return the columns of a restored job.

        Slurm may be running it without any process here.
        """
        handed = records.read_submission(run_dir)
        if handed is None:
            return {}
        outcome = records.read_warden_report(records.outcome_file(run_dir))
        if outcome is not None and outcome.allocation.id == handed.id:
            ended = {"state": str(outcome.state), "reason": outcome.reason, "held": False}
            return ended | {"attempt": handed.attempt}
        waits = {"state": str(State.QUEUED), "reason": "restored; Slurm is asked", "ended": None}
        return waits | {"attempt": handed.attempt, "held": False}

    def by_hand(self, spec: JobSpec) -> str:
        """Write a script for `sbatch`."""
        return script_by_hand(spec)


BACKEND: Final = Slurm()
