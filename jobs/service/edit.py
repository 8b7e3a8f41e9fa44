"""Edit a queued job in place, or copy any job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jobs import service
from jobs.errors import StateError, UserError
from jobs.hub import wanted as hub
from jobs.queue.job import Terms
from jobs.service.plan import check_not_submitted, plan_change
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.strategy import world_size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs.queue.store import Job, Store
    from jobs.queue.undo import Undo
    from jobs.service.plan import Plan
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.values.hub_names import HubName

_LONGEST_NAME = 64  # characters; the limit in jobs.spec.keys.job

# Keys that a new job may copy from the newest one. Not the device: someone who tried a toy model on
# the CPU will not train FLUX there.
_LAST_CHOICES = (
    "model_type",
    "model_family",
    "model_flavour",
    "pretrained_model_name_or_path",
    "dataset",
    "datasets",
    "strategy",
    "fsdp_enable",
    "unload_text_encoder",
    "cache_text_embeddings",
)


def change(
    store: Store,
    job_id: int,
    spec: JobSpec,
    before: JobSpec,
    absent: Sequence[HubName] = (),
    follows: Sequence[int] | None = None,
) -> tuple[Job, Plan]:
    """Change a queued job; it keeps its place in the queue.

    Args:
        store: The jobs.
        job_id: The job.
        spec: Its new description.
        before: The job as the user saw it, so that no concurrent changes are overwritten.
        absent: Hub names that it waits for.
        follows: Jobs that must complete before it starts; None for those so far.

    Returns:
        The job, and the plan for how it will run.

    Raises:
        NotFoundError: There is no such job to follow.
        StateError: It is no longer queued, was handed to Slurm, was changed concurrently, or would
            wait for itself.
        UserError: The new description is invalid; nothing has changed.
    """
    plan = plan_change(store, job_id, spec, absent, follows)
    run_dir = store.get(job_id).run_dir
    old, new = dump_spec(before), dump_spec(plan.spec)

    def prepare(undo: Undo) -> None:
        check_not_submitted(store.get(job_id))
        if dump_spec(load_spec(run_dir.job_file)) != old:
            raise StateError(f"job {job_id} was changed elsewhere in the meantime", "reload it")
        undo.keep([run_dir.job_file, hub.waits_file(run_dir)])
        service.write_job_file(run_dir, new)
        hub.note(run_dir, plan.absent)

    job = store.redescribe(
        job_id,
        name=plan.spec.name,
        terms=Terms.of(plan.spec, plan.wanted),
        reason=_what_changed(before, plan.spec, [] if follows is None else ["after"]),
        prepare=prepare,
        follows=follows,
    )
    return service.start_if_free(store, job), plan


def _what_changed(before: JobSpec, after: JobSpec, more: Sequence[str]) -> str:
    old, new = before.to_dict(), after.to_dict()
    keys = [*(key for key in new if new[key] != old[key]), *more]
    return f"changed: {', '.join(keys)}" if keys else "resubmitted unchanged"


def copy_of(job: Job, taken: Collection[str]) -> dict[str, Any]:
    """Return the values of a job, with a new unique name.

    Raises:
        UserError: Its job file cannot be read.
    """
    return load_spec(job.run_dir.job_file).to_dict() | {"name": free_name(job.name, taken)}


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with the lowest numeric suffix that makes it unique."""
    if name not in taken:
        return name
    stem = re.sub(r"-\d{1,4}$", "", name)
    number = 2
    while (candidate := f"{stem[: _LONGEST_NAME - len(str(number)) - 1]}-{number}") in taken:
        number += 1
    return candidate


def fresh_values(jobs: Collection[Job]) -> dict[str, Any]:
    """Return the values that a new job copies from the newest: model, data, number of ranks."""
    newest = max(jobs, key=lambda job: job.id, default=None)
    if newest is None:
        return {}
    try:
        spec = load_spec(newest.run_dir.job_file)
    except UserError:  # written by an older version, or deleted
        return {}
    values = {key: value for key, value in spec.to_dict().items() if key in _LAST_CHOICES}
    # copy how many, but not which ones, since those may be busy
    if (ranks := world_size(spec)) > 1:
        values["num_processes"] = ranks
    else:
        values.pop("strategy", None)
    if values.get("strategy") == "hsdp":  # the number of replicas is not copied
        values["strategy"] = "fsdp2"
    return {key: value for key, value in values.items() if value is not None}
