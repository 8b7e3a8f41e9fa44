"""Everything a person can do with jobs. The dashboard and the command line call these, no other.

Each function reads the truth (the database, the run directory, the process table) and returns it;
nothing here prints.
"""

from __future__ import annotations

import math
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs import preflight
from jobs.cascade import settle
from jobs.dispatch import dispatch, has_work, needs_attention
from jobs.errors import StateError, UserError
from jobs.eventlog import EventLog
from jobs.job import Terms
from jobs.rundir import write_atomic
from jobs.runner import ensure_runner
from jobs.specfile import dump_spec, load_spec
from jobs.states import State
from jobs.strategy import world_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.devices import Gpu
    from jobs.rundir import RunDir
    from jobs.spec import JobSpec
    from jobs.store import Job, Store


_STOP_WORDS: Final = {
    1: "stops after this step and a checkpoint",
    2: "gets SIGTERM; it saves if it still can",
    3: "is killed; what it trained since its last checkpoint is lost",
}


def submit(store: Store, spec: JobSpec) -> Job:
    """Check a job, put it into the queue, and start it if it may start now.

    Raises:
        UserError: Something is wrong with the job; nothing was queued.
    """
    wanted = preflight.check(spec)
    text = dump_spec(settle(spec))

    job = store.add(
        name=spec.name,
        terms=_terms(spec, wanted),
        run_id=uuid.uuid4().hex,
        prepare=lambda run_dir: _write_job_file(run_dir, text),
    )
    dispatch(store)
    ensure_runner(store)
    return store.get(job.id)


def _write_job_file(run_dir: RunDir, text: str) -> None:
    try:
        run_dir.create()
        write_atomic(run_dir.job_file, text, durable=True)
    except OSError as error:
        raise UserError(f"cannot write {run_dir.root} ({error.strerror})") from error


def _terms(spec: JobSpec, wanted: int | list[str] | None) -> Terms:
    return Terms(
        ranks=world_size(spec),
        wanted=wanted,
        total_steps=spec.max_train_steps,
        priority=spec.priority,
        shares=spec.share_gpus,
        auto_resume=spec.auto_resume,
    )


def stop(store: Store, job_id: int, *, now: bool = False) -> str:
    """Stop a job; asked again, more firmly: checkpoint → SIGTERM → SIGKILL.

    Args:
        store: The jobs.
        job_id: Which one.
        now: Go to SIGKILL at once; what was trained since the last checkpoint is lost.

    Returns:
        What happens now, in one line.

    Raises:
        StateError: The job has already ended.
    """
    job = store.get(job_id)
    if job.state is State.QUEUED and store.change(
        job_id, State.STOPPED, "taken out of the queue", only_from={State.QUEUED}
    ):
        return f"job {job_id} was taken out of the queue"
    job = store.get(job_id)
    if job.state.ended:
        raise StateError(f"job {job_id} has already ended ({job.state})")
    level = store.raise_stop_level(job_id, 3 if now else job.stop_level + 1)
    dispatch(store)  # if its supervisor is gone, someone must carry this out
    return f"job {job_id} {_STOP_WORDS[min(level, 3)]}"


def resume(store: Store, job_id: int, overrides: Mapping[str, Any] | None = None) -> Job:
    """Queue an ended job again; it goes on after its newest complete checkpoint.

    Args:
        store: The jobs.
        job_id: Which one.
        overrides: Changed settings, e.g. a larger `max_train_steps`.

    Raises:
        StateError: The job has not ended, or has nothing left to train.
        UserError: It can no longer run as described.
    """
    job = store.get(job_id)
    if not job.state.ended:
        raise StateError(f"job {job_id} is {job.state}; there is nothing to resume")
    spec = load_spec(job.run_dir.job_file, overrides)
    wanted = preflight.check(spec)
    newest = job.run_dir.latest_checkpoint()
    done = newest[0] if newest else 0
    if done > spec.max_train_steps or (
        done == spec.max_train_steps and job.state is State.COMPLETED
    ):
        raise StateError(
            f"job {job_id} has already trained {done} of {spec.max_train_steps} steps",
            f"resume {job_id} --max_train_steps=N with a larger N trains on",
        )
    if overrides:
        _write_job_file(job.run_dir, dump_spec(settle(spec)))
    after = f"resumed after step {newest[0]}" if newest else "started again from the beginning"
    store.requeue(job_id, after, _terms(spec, wanted))
    dispatch(store)
    ensure_runner(store)
    return store.get(job_id)


def request(store: Store, job_id: int, name: str) -> None:
    """Ask a running job for `save_now` or `sample_now`.

    Raises:
        StateError: The job is not running.
    """
    job = store.get(job_id)
    if not job.state.active:
        raise StateError(f"job {job_id} is {job.state}; it cannot {name.replace('_', ' ')}")
    job.run_dir.request(name)


def prune(store: Store, keep_last: int) -> list[Job]:
    """Remove all ended jobs but the newest so many, with their files.

    Returns:
        The removed jobs.
    """
    ended = [job for job in store.all() if job.state.ended]
    for job in ended[keep_last:]:
        remove(store, job.id)
    return ended[keep_last:]


def remove(store: Store, job_id: int, *, files: bool = True) -> None:
    """Forget an ended job, and delete its run directory unless told otherwise.

    Raises:
        StateError: The job has not ended.
    """
    job = store.remove(job_id)
    if files:
        shutil.rmtree(job.run_dir.root, ignore_errors=True)


def refresh(store: Store) -> None:
    """Make the database agree with the process table; cheap when there is nothing to do."""
    if needs_attention(store):
        dispatch(store)
    if has_work(store):
        ensure_runner(store)


@dataclass(frozen=True)
class Progress:
    """How far a job is, from its run directory. `eta` in seconds."""

    step: int = 0
    loss: float | None = None
    seconds_per_step: float | None = None
    eta: float | None = None


def progress(job: Job, log: EventLog | None = None) -> Progress:
    """How far a job is.

    Args:
        job: The job.
        log: Its event log, if the caller follows it anyway; it is not polled here.
    """
    log = log if log is not None else EventLog(job.run_dir.events).read_all()
    last = log.last
    if last is None:
        return Progress()
    pace = log.seconds_per_step()
    left = max(0, job.total_steps - last.step)
    eta = pace * left if pace is not None and job.state.active else None
    return Progress(last.step, last.loss, pace, eta)


def gpu_indices(job: Job, present: list[Gpu]) -> list[int]:
    """The job's GPUs as people number them; those this machine no longer shows are left out."""
    index = {gpu.uuid: gpu.index for gpu in present}
    return [index[name] for name in job.gpus if name in index]


def as_dict(job: Job, present: list[Gpu]) -> dict[str, Any]:
    """The job as scripts see it (`list --json`, `show --json`)."""
    now = progress(job)
    return {
        "id": job.id,
        "name": job.name,
        "state": str(job.state),
        "reason": job.reason,
        "step": now.step,
        "total_steps": job.total_steps,
        # JSON has no infinity, and scripts choke on one
        "loss": now.loss if now.loss is not None and math.isfinite(now.loss) else None,
        "seconds_per_step": now.seconds_per_step,
        "eta": now.eta,
        "ranks": job.ranks,
        "gpus": gpu_indices(job, present),
        "run_dir": str(job.run_dir.root),
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
    }
