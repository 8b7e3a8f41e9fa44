"""Plan a submit, resume or edit: run every check before anything changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jobs.backends import backend
from jobs.errors import SpecError, StateError, UserError
from jobs.hub.wanted import copies_of_stores, find_missing, noted
from jobs.preflight import check_job
from jobs.preflight.data import missing_partners
from jobs.queue.job import check_stages
from jobs.queue.states import ACTIVE, State
from jobs.resume import compare_plans, find_resume_conflicts, with_known_length
from jobs.run.checkpoint_files import find_checkpoint, list_checkpoints, newest_whole, read_state
from jobs.service.start_point import (
    KEY,
    check_unneeded,
    find_origin,
    origin_of,
    with_other_expert,
)
from jobs.spec.file.load import load_spec
from jobs.spec.rules.cascade import settle
from jobs.spec.rules.conflicts import find_conflicts
from jobs.spec.rules.steps import length_in_words, total_steps
from jobs.spec.values.datasets import with_folder_repeats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.queue.store import Job, Store
    from jobs.run.checkpoint_files import Checkpoint
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.keys.output import OutputKeys
    from jobs.spec.keys.training import TrainingKeys
    from jobs.spec.values.hub_names import HubName


@dataclass(frozen=True)
class Plan:
    """How a job would run.

    Attributes:
        spec: The job, settled.
        wanted: The devices it needs; see `jobs.queue.job`.
        begin: The checkpoint it continues from; None: step 0.
        rewound: Its own newer checkpoints, which are set aside.
        changes: What makes its result differ from an uninterrupted run, a line each.
        warnings: What may go wrong, a line each.
        job: The job to resume or change; None for a new one.
        back_to: The step to go back to, if the user named one.
        rewritten: Whether its job file changes.
        absent: What is fetched before it starts.
        judged_again: Whether a job that its sweep's rule stopped may be stopped by it again.
        follows: Jobs that must complete before it starts.
    """

    spec: JobSpec
    wanted: int | list[str] | None
    begin: Checkpoint | None = None
    rewound: list[Checkpoint] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    job: Job | None = None
    back_to: int | None = None
    rewritten: bool = False
    absent: Sequence[HubName] = ()
    judged_again: bool = False
    follows: tuple[int, ...] = ()


def plan_submit(
    store: Store, spec: JobSpec, absent: Sequence[HubName] = (), follows: Sequence[int] = ()
) -> Plan:
    """Check a new job.

    Args:
        store: The jobs.
        spec: The job.
        absent: What of the hub it waits for, which is checked once it is there.
        follows: Jobs that must complete before it starts.

    Raises:
        NotFoundError: There is no such job to follow.
        UserError: The job is invalid, or cannot start from its checkpoint.
    """
    earlier = [store.get(job_id) for job_id in follows]
    spec, notes = with_folder_repeats(spec)
    spec, missing = with_other_expert(store, spec)
    notes += [*missing, *stage_notes(earlier)]
    wanted = _check(spec, absent)
    check_job.check_beginning(spec)
    notes += missing_partners(spec) + copies_of_stores(spec)
    notes += backend(spec.launcher).warnings(spec)
    spec = settle(spec)
    if conflicts := find_conflicts(spec):  # its ranks read it from its file, which refuses these
        raise SpecError.of("the job", conflicts)
    if not spec.resume_from_checkpoint:
        return Plan(spec, wanted, warnings=notes, absent=absent, follows=tuple(follows))
    origin = find_origin(store, spec.resume_from_checkpoint)
    spec = spec.model_copy(update={KEY: str(origin.path.resolve())})
    changes, steps = _compare(origin, spec)
    if steps is not None and origin.step >= steps:
        raise UserError(
            f"{_length(spec, steps)} must be greater than the {origin.step} steps that "
            f"{origin.path} has already trained",
            "use a larger number",
        )
    notes += [
        f"it starts from {origin.path.name} of job {job.id}, not from what that job will have "
        "saved at its end"
        for job in earlier
        if not job.state.ended and origin.path.resolve().is_relative_to(job.run_dir.root.resolve())
    ]
    warnings = [*notes, *_find_haste(store, origin)]
    return Plan(
        spec,
        wanted,
        origin,
        changes=changes,
        warnings=warnings,
        absent=absent,
        follows=tuple(follows),
    )


def plan_resume(
    store: Store,
    job_id: int,
    overrides: Mapping[str, Any] | None = None,
    *,
    back_to: int | None = None,
) -> Plan:
    """Check whether an ended job can resume.

    Args:
        store: The jobs.
        job_id: Which one.
        overrides: Changed settings.
        back_to: Resume from this step instead of the newest; 0: restart at step 0.

    Raises:
        StateError: The job has not ended, has nothing left to train, or would set aside a
            checkpoint that another job needs.
        UserError: It can no longer run as described, or not from that checkpoint.
    """
    job = store.get(job_id)
    if not job.state.ended:
        raise StateError(f"job {job_id} is {job.state}; there is nothing to resume")
    notes: list[str] = []
    spec = load_spec(job.run_dir.job_file, overrides, on_note=notes.append)
    spec, missing = with_other_expert(store, spec)
    notes += missing
    wanted = _check(spec)
    notes += backend(spec.launcher).warnings(spec)
    spec = settle(spec)
    begin = _own(job, back_to)
    if begin is not None and KEY in (overrides or {}):
        raise UserError(
            f"{KEY}: job {job_id} has its own checkpoints, which take precedence",
            "submit a new job to start from another checkpoint",
        )
    if begin is None and spec.resume_from_checkpoint:
        begin = find_origin(store, spec.resume_from_checkpoint)
        spec = spec.model_copy(update={KEY: str(begin.path.resolve())})
    changes, steps = _compare(begin, spec, job) if begin is not None else ([], None)
    done = begin.step if begin is not None else 0
    if steps is not None and (done > steps or (done == steps and job.state is State.COMPLETED)):
        key = "max_train_steps" if spec.num_train_epochs is None else "num_train_epochs"
        raise StateError(
            f"job {job_id} has already trained {done} of {steps} steps",
            f"resume {job_id} --{key}=N with a larger N continues",
        )
    rewound = []
    if back_to is not None:
        rewound = [saved for saved in list_checkpoints(job.run_dir) if saved.step > back_to]
        check_unneeded(store, [saved.path for saved in rewound])
    return Plan(
        spec,
        wanted,
        begin,
        rewound,
        changes,
        [*notes, *_find_needs(store, job, spec)],
        job=job,
        back_to=back_to,
        rewritten=bool(overrides),
        judged_again="stop_worse_than_median_after" in (overrides or {}),
    )


def stage_notes(earlier: Sequence[Job]) -> list[str]:
    """Say which jobs that must complete first will not, unless someone resumes them."""
    return [
        f"job {job.id}, which must complete first, is {job.state}; this job waits until it is "
        "resumed and completes, or until this job is released"
        for job in earlier
        if job.state.ended and job.state is not State.COMPLETED
    ]


def plan_change(
    store: Store,
    job_id: int,
    spec: JobSpec,
    absent: Sequence[HubName] = (),
    follows: Sequence[int] | None = None,
) -> Plan:
    """Check a change to a queued job, which may wait for what is absent.

    Args:
        store: The jobs.
        job_id: The job.
        spec: Its new description.
        absent: What of the hub it waits for.
        follows: Jobs that must complete before it starts; None for those so far.

    Raises:
        NotFoundError: There is no such job to follow.
        StateError: It is no longer queued, Slurm has it, or it would wait for itself.
        UserError: The job is invalid, or cannot start from its checkpoint.
    """
    job = store.get(job_id)
    if job.state is not State.QUEUED:
        raise StateError(f"job {job_id} is {job.state}, not queued")
    check_not_submitted(job)
    check_stages(job_id, follows or (), store.get)
    begin = newest_whole(job.run_dir)
    if begin is None:
        if not absent and noted(job.run_dir):
            absent = find_missing(spec)
        return replace(plan_submit(store, spec, absent, follows or ()), job=job, rewritten=True)
    spec, missing = with_other_expert(store, spec)
    wanted = _check(spec)
    spec = settle(spec)
    changes, steps = _compare(begin, spec, job)
    if steps is not None and begin.step > steps:
        raise UserError(
            f"{_length(spec, steps)} is less than the {begin.step} steps that job {job_id} has "
            "trained",
            "use a larger number",
        )
    notes = [*missing, *stage_notes(list(map(store.get, follows or ())))]
    notes += _find_needs(store, job, spec)
    return Plan(spec, wanted, begin, [], changes, notes, job=job, rewritten=True)


def _check(spec: JobSpec, absent: Sequence[HubName] = ()) -> int | list[str] | None:
    """Check a job and the place where it is to run; what it wants of this machine."""
    check_job.check(spec, absent)
    return backend(spec.launcher).request(spec)


def check_not_submitted(job: Job) -> None:
    """Raise `StateError` if someone else's queue has this attempt of the job, as it is."""
    if holder := backend(job.backend).holds(job):
        raise StateError(
            f"job {job.id} is in {holder}", "stop it first, then resume it with the changes"
        )


def _own(job: Job, back_to: int | None) -> Checkpoint | None:
    if back_to is None:
        return newest_whole(job.run_dir)
    if back_to == 0 and not job.run_dir.checkpoint(0).exists():
        return None
    return find_checkpoint(job.run_dir, back_to, f"job {job.id}")


def _find_haste(store: Store, origin: Checkpoint) -> list[str]:
    """Warn if a running job may delete the checkpoint that this job starts from."""
    for job in store.in_states(ACTIVE):
        if job.run_dir.checkpoints.resolve() == origin.path.resolve().parent:
            try:
                kept = load_spec(job.run_dir.job_file).checkpoints_total_limit
            except UserError:  # no business of the new job
                return []
            if kept is not None:
                return [
                    f"job {job.id} is still running and keeps only its newest {kept} checkpoints; "
                    f"{origin.path.name} may be gone when this job starts"
                ]
    return []


def _find_needs(store: Store, job: Job, spec: OutputKeys) -> list[str]:
    """Warn if this resumed job may delete a checkpoint that another job starts from."""
    kept = spec.checkpoints_total_limit
    if kept is None:
        return []
    own = job.run_dir.checkpoints.resolve()
    waiting = {other.id: origin_of(other) for other in store.in_states([State.QUEUED, *ACTIVE])}
    return [
        f"job {number} will start from {origin.name} of this job, which keeps only its newest "
        f"{kept} checkpoints; it may be gone by then"
        for number, origin in waiting.items()
        if origin is not None and origin.resolve().parent == own
    ]


def _compare(
    begin: Checkpoint, spec: JobSpec, job: Job | None = None
) -> tuple[list[str], int | None]:
    """List what a resume from a checkpoint changes, and find how many steps the job has.

    Args:
        begin: The checkpoint.
        spec: The job as it will run.
        job: The job that resumes; None for a new one.

    Returns:
        The changes, a line each; and the steps, None if they depend on data nobody has counted.

    Raises:
        UserError: It cannot be done.
    """
    state = read_state(begin.path)
    own = job is not None and begin.path.parent.resolve() == job.run_dir.checkpoints.resolve()
    plan = compare_plans(state, begin.path.name, own=own)
    if not isinstance(state.get("spec"), dict):
        return plan, total_steps(spec)  # nothing else to compare with
    spec = with_known_length(spec, state)
    conflicts = find_resume_conflicts(state["spec"], spec, done=begin.step)
    if conflicts.impossible:
        raise UserError(f"cannot resume from {begin.path.name}: {'; '.join(conflicts.impossible)}")
    return [*conflicts.changes, *plan], total_steps(spec)


def _length(spec: TrainingKeys, steps: int) -> str:
    """`max_train_steps: 200`, or `num_train_epochs: 3 (200 steps)`."""
    given = length_in_words(spec)
    return given if spec.num_train_epochs is None else f"{given} ({steps} steps)"
