"""Everything a user can do with jobs; the dashboard and the command line call only these functions.

Each function works on the database, the run directory and the process table. Nothing here prints.
"""

from __future__ import annotations

import math
import shutil
import sqlite3
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from jobs.backends import backend
from jobs.backends.keeper import ensure_keepers
from jobs.backends.local.dispatch import dispatch, needs_attention
from jobs.errors import NotFoundError, StateError, UserError
from jobs.hub import wanted as hub
from jobs.hub.pushes import go_back, pushes_file
from jobs.paths import ensure_private_dir
from jobs.preflight.check_job import cache_of
from jobs.queue.job import NewJob, Terms
from jobs.queue.job_list import Progress, measured_of, progress, progress_of
from jobs.queue.states import State
from jobs.queue.sweeps import Groups, best_job
from jobs.run import checkpoint_files
from jobs.run.checkpoint_files import find_listed, list_all
from jobs.run.judging import LOSS, judge
from jobs.run.rundir import write_atomic
from jobs.service.outlook import Expected, Forecast
from jobs.service.plan import plan_resume, plan_submit
from jobs.service.start_point import check_unneeded
from jobs.spec.file.load import dump_spec
from jobs.supervise.median import mark_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jobs.machine.devices import Gpu
    from jobs.queue.job import Place
    from jobs.queue.store import Job, Store
    from jobs.queue.undo import Undo
    from jobs.run.checkpoint_files import Listed
    from jobs.run.judging import Judged, Measurements
    from jobs.run.rundir import RunDir
    from jobs.service.plan import Plan
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.values.hub_names import HubName


__all__ = ["Progress", "progress"]  # plus the functions defined here


# Wraps follow-up work after a change was committed. The next poll repeats that work, while an error
# would make users repeat the change.
_BEST_EFFORT: Final = suppress(OSError, sqlite3.Error)


class FilesLeftError(UserError):
    """A job was removed, but some of its files are left."""


def submit(store: Store, spec: JobSpec) -> Job:
    """Check a job, queue it, and start it if it may start now.

    Raises:
        UserError: The job is invalid; nothing was queued.
    """
    return carry_out(store, plan_submit(store, spec))


def carry_out(store: Store, plan: Plan) -> Job:
    """Queue the job of a plan, and start it if it may start now.

    Raises:
        StateError: It was resumed or removed since the plan was made; nothing has changed.
        UserError: Its files cannot be written; nothing has changed.
    """
    ensure_private_dir(cache_of(plan.spec))
    if plan.job is None:
        (job,) = store.add_all([new_job(plan)])
    else:
        prepare = partial(_prepare, store, plan.job.run_dir, plan)
        terms = Terms.of(plan.spec, plan.wanted)
        job = store.requeue(plan.job.id, _describe_resume(plan), terms, prepare)
    return start_if_free(store, job)


def new_job(plan: Plan) -> NewJob:
    """Make the job of a plan ready to be queued."""
    ensure_private_dir(cache_of(plan.spec))
    return NewJob(
        name=plan.spec.name,
        terms=Terms.of(plan.spec, plan.wanted),
        run_id=uuid.uuid4().hex,
        prepare=partial(_write_files, dump_spec(plan.spec), plan.absent),
        follows=plan.follows,
    )


def _write_files(text: str, absent: Sequence[HubName], run_dir: RunDir) -> None:
    write_job_file(run_dir, text)
    hub.note(run_dir, absent)


def start_if_free(store: Store, job: Job) -> Job:
    """Start a queued job if it may start now; otherwise make sure that a keeper will."""
    with _BEST_EFFORT:
        dispatch(store)
        ensure_keepers(store)
        return store.get(job.id)
    return job


def _dispatched(store: Store, job: Job) -> Job:
    """Dispatch the queue after a change of a job."""
    with _BEST_EFFORT:
        dispatch(store)
        return store.get(job.id)
    return job


def _prepare(store: Store, run_dir: RunDir, plan: Plan, undo: Undo) -> None:
    """Prepare a run directory for a resume. The caller holds the queue."""
    moves: list[tuple[Path, Path]] = []
    # check again, because a job may have been submitted since the plan was made
    if plan.back_to is not None:
        check_unneeded(store, [path for _, path in checkpoint_files.newer(run_dir, plan.back_to)])
        moves = checkpoint_files.plan_rewind(run_dir, plan.back_to)
    if not moves and not plan.rewritten and plan.back_to is None:
        return
    undo.keep([run_dir.job_file, pushes_file(run_dir), mark_of(run_dir)], moves)
    if plan.judged_again:
        mark_of(run_dir).unlink(missing_ok=True)
    checkpoint_files.rewind(moves)
    if plan.back_to is not None:
        go_back(run_dir, plan.back_to)
    if plan.rewritten:
        write_job_file(run_dir, dump_spec(plan.spec))


def write_job_file(run_dir: RunDir, text: str) -> None:
    """Write a job file atomically.

    Raises:
        UserError: It cannot be written.
    """
    try:
        run_dir.create()
        write_atomic(run_dir.job_file, text, durable=True)
    except OSError as error:
        raise UserError(f"cannot write {run_dir.root} ({error.strerror})") from error


def stop(store: Store, job_id: int, *, now: bool = False) -> str:
    """Stop a job; each further call escalates: checkpoint → SIGTERM → SIGKILL.

    Args:
        store: The jobs.
        job_id: The job.
        now: Send SIGKILL immediately; steps since the last checkpoint are lost.

    Returns:
        What happens now, in one line.

    Raises:
        StateError: The job has already ended.
    """
    job = store.get(job_id)
    place = backend(job.backend)
    if (
        job.state is State.QUEUED
        and not place.holds(job)
        and store.change(job_id, State.STOPPED, "removed from the queue", only_from={State.QUEUED})
    ):
        with _BEST_EFFORT:
            hub.end_unwanted(job, store.in_states([State.QUEUED]))
        return f"job {job_id} was removed from the queue"
    job = store.get(job_id)
    if job.state.ended:
        raise StateError(f"job {job_id} has already ended ({job.state})")
    return place.stop(store, job, now=now)


def resume(
    store: Store,
    job_id: int,
    overrides: Mapping[str, Any] | None = None,
    *,
    back_to: int | None = None,
) -> Job:
    """Queue an ended job again; it continues after its newest complete checkpoint.

    `jobs.service.plan.plan_resume` lists what that changes.

    Args:
        store: The jobs.
        job_id: The job.
        overrides: Changed settings, for example a larger `max_train_steps`.
        back_to: Resume from this step and set newer checkpoints aside; 0: restart at step 0.

    Raises:
        StateError: The job has not ended, or has nothing left to train.
        UserError: It can no longer run as configured, or not from that checkpoint.
    """
    return carry_out(store, plan_resume(store, job_id, overrides, back_to=back_to))


def _describe_resume(plan: Plan) -> str:
    how = "restarted from step 0"
    if plan.begin is not None:
        how = f"resumed after step {plan.begin.step}"
    if plan.rewound:
        steps = ", ".join(str(checkpoint.step) for checkpoint in plan.rewound)
        how += f"; newer checkpoints are set aside ({steps})"
    return how


def hold(store: Store, job_id: int, held: bool = True, *, now: bool = False) -> Job:
    """Keep a queued job waiting, or release it; see `Store.hold`.

    Raises:
        StateError: It is not queued.
    """
    job = store.get(job_id)
    place = backend(job.backend)
    if holder := place.holds(job):
        raise StateError(f"job {job_id} is in {holder}", place.hold_hint)
    return _dispatched(store, store.hold(job_id, held, now=now))


def move(store: Store, job_id: int, *, to: Place | None = None, priority: int | None = None) -> Job:
    """Change a queued job's place.

    Args:
        store: The jobs.
        job_id: The job.
        to: Where to move it among jobs of its priority: to the front or back, or up or down by one.
        priority: Its new priority; jobs of higher priority start first.

    Raises:
        StateError: It is not queued, or cannot go further up or down.
    """
    return _dispatched(store, store.move(job_id, to, priority=priority))


def pause(store: Store, paused: bool = True) -> None:
    """Pause or unpause the queue; running jobs are not affected."""
    store.pause(paused)
    with _BEST_EFFORT:
        dispatch(store)


def find_deletable(store: Store, job_id: int, names: Sequence[str]) -> list[Listed]:
    """Find the checkpoints to delete, and check that no job needs them.

    Args:
        store: The jobs.
        job_id: The job that wrote them.
        names: Steps, or directory names such as `step-30.rewound`.

    Raises:
        NotFoundError: No checkpoint has this name.
        StateError: A job needs one.
    """
    job = store.get(job_id)
    listed = list_all(job.run_dir)
    checkpoints = list(dict.fromkeys(find_listed(listed, name, f"job {job_id}") for name in names))
    for checkpoint in checkpoints:
        if checkpoint.next and not job.state.ended:
            raise StateError(
                f"job {job_id} is {job.state}, and {checkpoint.name} is its newest complete "
                "checkpoint",
                "a restart needs it; stop the job first",
            )
    check_unneeded(store, [checkpoint.path for checkpoint in checkpoints])
    return checkpoints


def delete_checkpoints(store: Store, job_id: int, names: Sequence[str]) -> list[Listed]:
    """Delete checkpoints of a job: all of them, or none.

    Raises:
        NotFoundError: No checkpoint has this name.
        StateError: A job needs one.
        UserError: One cannot be deleted and none was, or all were but some of their files are left.
    """
    store.check_writable()
    checkpoints = find_deletable(store, job_id, names)
    checkpoint_files.delete_files([checkpoint.path for checkpoint in checkpoints])
    return checkpoints


def request(store: Store, job_id: int, name: str) -> None:
    """Request `save_now` or `sample_now` from a running job.

    Raises:
        StateError: The job is not running.
    """
    store.check_writable()
    job = store.get(job_id)
    if not job.state.active:
        raise StateError(f"job {job_id} is {job.state}; it cannot {name.replace('_', ' ')}")
    job.run_dir.request(name)


def prune(store: Store, keep_last: int) -> list[Job]:
    """Remove all ended jobs but the newest `keep_last`, with their files.

    Returns:
        The removed jobs.

    Raises:
        StateError: A queued or running job starts from a checkpoint of one; none was removed.
        UserError: All were removed, but some of their files could not be deleted.
    """
    leaving = [job for job in store.all() if job.state.ended][keep_last:]
    check_unneeded(store, [job.run_dir.root for job in leaving])
    removed = store.remove_all([job.id for job in leaving])
    if left := [job for job in removed if not _delete_run(job)]:
        raise FilesLeftError(
            f"removed {len(removed)} job{'s' * (len(removed) != 1)}, but not all of "
            f"{', '.join(str(job.run_dir.root) for job in left)} could be deleted",
            "`fsdp-tui doctor` lists what is left",
        )
    return removed


def remove(store: Store, job_id: int, *, files: bool = True) -> None:
    """Remove an ended job and, by default, its run directory.

    Raises:
        StateError: The job has not ended, or another job starts from one of its checkpoints.
        FilesLeftError: It was removed, but some of its files could not be deleted.
        OSError: Its files cannot be marked as kept; nothing has changed.
    """
    store.check_writable()
    job = store.get(job_id)
    if files:
        check_unneeded(store, [job.run_dir.root], leaving=[job_id])
    elif job.state.ended and job.run_dir.root.is_dir():
        job.run_dir.keep()
    job = store.remove(job_id)
    if files and not _delete_run(job):
        raise FilesLeftError(
            f"job {job_id} is removed, but not all of {job.run_dir.root} could be deleted",
            "delete it by hand",
        )


def _delete_run(job: Job) -> bool:
    """Delete a run directory as far as possible; return whether nothing is left."""
    shutil.rmtree(job.run_dir.root, ignore_errors=True)
    return not job.run_dir.root.exists()


def refresh(store: Store) -> None:
    """Synchronize the database with the process table. Cheap if there is nothing to do."""
    if needs_attention(store):
        dispatch(store)
    ensure_keepers(store)


def gpu_indices(job: Job, present: list[Gpu]) -> list[int]:
    """Return the user-visible indices of the job's GPUs, without GPUs that are gone."""
    index = {gpu.uuid: gpu.index for gpu in present}
    return [index[name] for name in job.gpus if name in index]


def as_dicts(
    store: Store, jobs: Sequence[Job], present: list[Gpu], forecast: Forecast | None = None
) -> list[dict[str, Any]]:
    """Return jobs in the format of `list --json`.

    Args:
        store: The jobs.
        jobs: Which ones.
        present: The machine's GPUs.
        forecast: Of a caller that asks again and again.
    """
    everyone = store.all() if any(not job.state.ended for job in jobs) else []
    active = [job for job in everyone if job.state.active]
    far = progress_of(store, {job.id: job for job in (*active, *jobs)}.values())
    expected = (forecast or Forecast()).look(store, everyone, far, present).jobs
    measured = measured_of(store, jobs)
    rows = [
        _as_dict(job, far[job.id], measured[job.id], expected.get(job.id, Expected()), present)
        for job in jobs
    ]
    sweeps = store.sweeps()
    if any(job.id in sweeps for job in jobs):
        differing = Groups().differing(store.all() if len(jobs) == 1 else jobs, sweeps)
        for row in rows:
            row["sweep"] = sweeps.get(row["id"])
            row["differs"] = differing.get(row["id"], {})
    return rows


def sweep_dicts(store: Store, sweep: str, present: list[Gpu]) -> list[dict[str, Any]]:
    """Jobs of a sweep as scripts see them (`list --sweep`), in the order of their numbers.

    Beside what `as_dicts` says, each has its `lowest` validation loss, or the `highest` score that
    its checkpoints are judged `by`, and whether that is the best of the sweep.

    Raises:
        NotFoundError: There is no such sweep.
    """
    sweeps = store.sweeps()
    jobs = sorted(
        (job for job in store.all() if sweeps.get(job.id) == sweep), key=lambda job: job.id
    )
    if not jobs:
        there = ", ".join(sorted(set(sweeps.values())))
        raise NotFoundError(
            f'there is no sweep "{sweep}"',
            f"there are {there}" if there else "`fsdp-tui submit --sweep KEY=A,B` queues one",
        )
    measured = measured_of(store, jobs)
    rows = as_dicts(store, jobs, present)
    best = best_job(measured, {row["id"]: row["differs"] for row in rows})
    for row in rows:
        own = measured[row["id"]]
        low = own.best()
        what = "loss" if own.by == LOSS else "score"
        row["lowest"] = row["highest"] = None
        row[own.extreme] = {"step": low[0], what: low[1]} if low is not None else None
        row["by"] = own.by
        row["best_of_sweep"] = row["id"] == best
    return rows


def as_dict(store: Store, job: Job, present: list[Gpu]) -> dict[str, Any]:
    """Return a job in the format of `show --json`."""
    return as_dicts(store, [job], present)[0]


def best_of(job: Job, measured: Measurements) -> Judged | None:
    """Return the job's best checkpoint, if what it is judged by was measured."""
    saved = job.run_dir.complete_checkpoints() if measured else []
    return next(iter(judge((step for step, _ in saved), measured)), None)


def _as_dict(
    job: Job, now: Progress, measured: Measurements, expected: Expected, present: list[Gpu]
) -> dict[str, Any]:
    best, newest = best_of(job, measured), measured.values[-1][1] if measured else math.nan
    by_loss = measured.by == LOSS
    return {
        "id": job.id,
        "name": job.name,
        "state": str(job.state),
        "reason": job.reason,
        "step": now.step,
        "total_steps": job.total_steps or now.total_steps,
        # JSON has no infinity, and many parsers reject it
        "loss": now.loss if now.loss is not None and math.isfinite(now.loss) else None,
        "validation_loss": newest if by_loss and math.isfinite(newest) else None,
        "best": best and best.to_dict(),
        "seconds_per_step": now.seconds_per_step,
        "eta": now.eta,
        "eta_parts": dict(now.eta_parts),
        "eta_at_least": bool(now.eta_unknown) or expected.at_least,
        "starts_in": expected.starts_in,
        "ends_in": expected.ends_in,
        "after": expected.after,
        "waits_for": [earlier for earlier, _ in job.blockers],
        "ranks": job.ranks,
        "gpus": gpu_indices(job, present),
        "sweep": None,
        "differs": {},
        "run_dir": str(job.run_dir.root),
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
    }
