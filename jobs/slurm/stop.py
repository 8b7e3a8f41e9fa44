"""Stop a Slurm job, more firmly each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.queue.states import State
from jobs.slurm.records import ask_to_stop
from jobs.slurm.rows import ensure_keeper

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store

_WORDS: Final = {
    1: "stops after the current step, with a checkpoint",
    2: "gets SIGTERM; it saves if it can",
    3: "is cancelled; steps since its last checkpoint are lost",
}


def stop_slurm_job(store: Store, job: Job, *, now: bool = False) -> str:
    """Ask a job that was handed in to stop; its warden, or the keeper, carries that out.

    Args:
        store: The jobs.
        job: It has not ended.
        now: Cancel it at once.

    Returns:
        What happens now, in one line.
    """
    level = min(3, store.raise_stop_level(job.id, 3 if now else job.stop_level + 1))
    ask_to_stop(job.run_dir, job.attempt, level)
    ensure_keeper(store)
    if job.state is State.QUEUED:
        return f"job {job.id} is being taken out of Slurm's queue"
    return f"job {job.id} {_WORDS[level]}"
