"""`python -m jobs.hub.push JOB`: push what a job exports, beside its supervisor.

A separate process: nothing waits for it, and a network that fails delays no step. Its progress is
in `hub/push.json` of the run directory, so that another process can resume where it stopped.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jobs.errors import NotFoundError, UserError
from jobs.export import export_checkpoint
from jobs.hub.pushes import Push
from jobs.hub.upload import upload
from jobs.machine import file_lock
from jobs.machine.engine_tools import ToolError
from jobs.queue.states import State
from jobs.queue.store import SERVICE, Store
from jobs.run.checkpoint_files import list_checkpoints
from jobs.run.export_places import export_facts
from jobs.spec.file.load import load_spec
from jobs.untrusted.secrets import without_secrets

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.job import Job

LOOK_EVERY: Final = 5.0  # seconds
_NICE: Final = 10
_FIRST_PAUSE: Final = 5.0  # seconds after a failure that may pass; each further pause is longer
_LONGEST_PAUSE: Final = 600.0
_GIVES_UP: Final = 40  # failures in a row, about five hours


def follow(store: Store, job_id: int, pause: Callable[[float], None] = time.sleep) -> int:
    """Push what the job asks for as it appears, until it has ended; the exit status.

    A checkpoint on the way that cannot be pushed is skipped: the final export comes after it.
    """
    failures, skipped = 0, set[int]()
    while True:
        try:
            job = store.get(job_id)
        except NotFoundError:  # removed
            return 0
        spec = load_spec(job.run_dir.job_file)
        if not spec.push_to_hub:
            return 0
        final, steps = _pending(job, checkpoints=spec.push_checkpoints_to_hub)
        steps = [step for step in steps if step == final or step not in skipped]
        if not steps and (job.state.ended or job.state is State.QUEUED):
            return 1 if skipped else 0
        if not steps:
            pause(LOOK_EVERY)
            continue
        step = steps[0]
        try:
            push_step(job, step)
        except (UserError, ToolError, OSError) as error:
            if step != final and step not in _saved(job):
                continue  # deleted while it was read, as by checkpoints_total_limit
            failures += 1
            problem = without_secrets(str(error))
            replace(Push.read(job.run_dir), problem=problem).keep(job.run_dir)
            print(time.strftime("%Y-%m-%d %H:%M:%S"), f"step {step}: {problem}", flush=True)
            if getattr(error, "passing", False) and failures <= _GIVES_UP:
                pause(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1)))
            elif step == final:
                return 1
            else:
                skipped.add(step)
                failures = 0
        else:
            failures = 0


def push_step(
    job: Job,
    step: int | None = None,
    *,
    repo: str | None = None,
    private: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Push:
    """Push an export, made first if there is none.

    Args:
        job: Whose.
        step: Of which checkpoint; by default the job's export, or its newest checkpoint.
        repo: Where to; by default what the job says.
        private: Whether a new repository is private; by default what the job says.
        progress: Called with how far the export is, and 100.

    Raises:
        HubError: The hub refuses it, or cannot be reached.
        UserError: There is nothing to export.
        ToolError: The export failed.
    """
    spec = load_spec(job.run_dir.job_file)
    export, made = job.run_dir.export, None
    ready = (export_facts(export) or {}).get("step")
    if step is None:
        newest = _saved(job)[-1:]
        step = ready if ready is not None else next(iter(newest), None)
    if ready is None or ready != step:
        made = job.run_dir.root / "hub" / f"step-{step}"
        shutil.rmtree(made, ignore_errors=True)  # of a try that was killed
        made.parent.mkdir(mode=0o700, exist_ok=True)
        export = export_checkpoint(job, step, output=made, progress=progress).path
    try:
        name, url = upload(job, spec, export, repo=repo, private=private)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
    if repo is not None:  # by hand, elsewhere
        return Push(name, [step] if step is not None else [], url)
    before = Push.read(job.run_dir)
    done = [*before.pushed, *([step] if step is not None and step not in before.pushed else [])]
    pushed = Push(name, done, url)
    try:
        return pushed.keep(job.run_dir)
    except OSError as error:
        raise UserError(
            f"step {step} is pushed to {url}, which cannot be noted in {job.run_dir.root} "
            f"({error.strerror})"
        ) from error


def _pending(job: Job, *, checkpoints: bool) -> tuple[int | None, list[int]]:
    """Return the final step, if training has completed, and the steps to push, ascending."""
    before = Push.read(job.run_dir).pushed
    steps = _saved(job) if checkpoints else []
    final = (export_facts(job.run_dir.export) or {}).get("step")
    if not isinstance(final, int) or job.state is not State.COMPLETED:
        final = None
    else:
        steps = [*(step for step in steps if step < final), final]
    newest = max(before, default=0)
    return final, [step for step in steps if step > newest]


def _saved(job: Job) -> list[int]:
    return [saved.step for saved in list_checkpoints(job.run_dir)]


def main() -> int:
    """Run the command; another process that does the same is left alone."""
    job = Store(patience=SERVICE).get(int(sys.argv[1]))
    place = job.run_dir.root / "hub"
    place.mkdir(mode=0o700, exist_ok=True)
    with open(place / "push.lock", "a") as lock:
        if not file_lock.take(lock):
            return 0
        os.nice(_NICE)
        return follow(Store(patience=SERVICE), job.id)


if __name__ == "__main__":
    raise SystemExit(main())
