"""Slurm jobs in the database: which there are, and how their states change."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from jobs.machine import file_lock
from jobs.machine.start_detached import start_detached
from jobs.queue.job import SLURM
from jobs.queue.states import ACTIVE, State
from jobs.queue.tables import insert, update
from jobs.untrusted.text import harmless

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.queue.store import Job, Store
    from jobs.slurm.settle import Verdict

LOCK: Final = "slurm.lock"


def unended(jobs: Iterable[Job]) -> list[Job]:
    """The Slurm jobs among these that have not ended, in queue order."""
    unfinished = [job for job in jobs if not job.state.ended and job.on_slurm]
    return sorted(unfinished, key=lambda job: (-job.priority, job.queued, job.id))


def look_after_slurm_jobs(store: Store) -> None:
    """See that the process that asks Slurm runs while there are jobs for it.

    Asked every second, beside whatever local jobs there are: no row of theirs is read.
    """
    states = [State.QUEUED, *ACTIVE]
    marks = ",".join("?" * len(states))
    with store.connect() as db:
        row = db.execute(
            f"SELECT 1 FROM jobs WHERE state IN ({marks}) AND wanted=? LIMIT 1",
            [*states, json.dumps(SLURM)],
        ).fetchone()
    if row is not None:
        ensure_keeper(store)


def ensure_keeper(store: Store) -> None:
    """Start the process that asks Slurm, unless it runs."""
    with open(store.home / LOCK, "a") as lock:
        if not file_lock.take(lock):
            return
    start_detached("jobs.slurm", home=store.home, cwd=store.home, log=store.home / "slurm.log")


def move(store: Store, job: Job, to: Verdict) -> bool:
    """Bring a job into a state as Slurm has it; whether anything changed.

    A job that Slurm has put back into its queue is queued again, which no local job ever is; one
    that we look at rarely has been through states that nobody saw.
    """
    if (job.state, job.reason) == (to.state, to.reason):
        return False
    now = store.get(job.id)
    if now.state.ended or (now.state, now.reason) == (to.state, to.reason):
        return False
    stopping = now.state is State.STOPPING and now.stop_level > 0
    if now.state is to.state or (stopping and not to.state.ended):
        store.explain(job.id, to.reason, now.state)
        return True
    if to.state is State.QUEUED or (now.state is State.STOPPING and not to.state.ended):
        _put(store, job, State.QUEUED, to.reason)
    if to.state is State.QUEUED:
        return True
    if store.get(job.id).state is State.QUEUED and to.state is not State.STOPPED:
        _put(store, job, State.STARTING, "started by Slurm")
    if to.state is not State.STARTING:
        store.change(job.id, to.state, to.reason)
    else:
        store.explain(job.id, to.reason, State.STARTING)
    return True


def _put(store: Store, job: Job, state: State, reason: str) -> None:
    """Into a state that Slurm has it in, whatever the table of local jobs says."""
    reason, now = harmless(reason), time.time()
    with store.write() as db:
        row = db.execute("SELECT state FROM jobs WHERE id=?", (job.id,)).fetchone()
        if row is None or State(row["state"]).ended or row["state"] == state:
            return
        update(db, job.id, {"state": state, "reason": reason})
        if state is State.STARTING:
            update(db, job.id, {"started": now})
        change = {"t": now, "before": row["state"], "after": state, "reason": reason}
        insert(db, "history", {"job": job.id} | change)
