"""Submit a job to Slurm exactly once, even if the submitting process is killed at any point."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from jobs.backends.slurm import commands, records
from jobs.backends.slurm.script import SIGNAL_SECONDS, script_of
from jobs.errors import SpecError, UserError
from jobs.hub.wanted import forget, noted
from jobs.machine import file_lock
from jobs.preflight.check_job import check
from jobs.queue.states import State
from jobs.run.rundir import read_tail, write_atomic
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jobs.backends.slurm.commands import Listed
    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

_EVENTS: Final = 1 << 20  # bytes read from the end of the event stream
_SAVE_MARGIN: Final = 2  # multiple of the longest measured save


def submit_once(
    store: Store, job: Job, record: records.Submission | None
) -> records.Submission | None:
    """Submit a job to Slurm unless Slurm already has it.

    Args:
        store: The jobs.
        job: A waiting job.
        record: What an earlier keeper recorded before it called `sbatch`, without the answer.

    Returns:
        The Slurm job; None if there is none now.

    Raises:
        UnreachableError: Slurm did not answer; it may or may not have accepted the job.
        SpecError: The job file is invalid, or does not match the downloaded model.
    """
    run_dir = job.run_dir
    with open(run_dir.root / ".handing-in", "a") as lock:
        if not file_lock.acquire(lock):
            return None  # an earlier keeper died, but its sbatch is still running
        # Query again: an answer from before that sbatch ended would lack its job.
        if record is not None and (existing := find(record, commands.queue())):
            return _record(run_dir, record, existing)
        spec = load_spec(run_dir.job_file)
        if noted(run_dir):
            _check_fetched(spec, run_dir)
        newest = run_dir.latest_checkpoint()
        name = f"fsdp-tui-{job.id}-{job.run_id[:8]}-{job.attempt}"
        record = records.Submission(name, job.attempt, step=newest[0] if newest else 0)
        script = _write_script(spec, job, name, store.home)
        with store.write():  # the transaction allows no edit between this check and the record
            if not _is_unchanged(store, job, spec):
                return None
            records.write_submission(run_dir, record)
        try:
            slurm_id = commands.submit(script, inherit=[lock.fileno()])
        except UserError as error:
            records.submission_file(run_dir).unlink(missing_ok=True)
            reason = f"Slurm refused the job: {error}"
            store.change(job.id, State.FAILED, reason, only_from={State.QUEUED})
            return None
        return _record(run_dir, record, slurm_id)


def find(record: records.Submission, listed: Mapping[str, Listed]) -> str:
    """Return the job that an earlier keeper submitted before it was killed; "" if none."""
    return next((job.id for job in listed.values() if job.name == record.name), "")


def signal_seconds(run_dir: RunDir) -> int:
    """Return the seconds before the time limit at which to save: twice the longest save + 60."""
    longest = 0.0
    for line in read_tail(run_dir.events, _EVENTS).splitlines():
        if '"checkpoint"' in line:
            with suppress(ValueError, TypeError, LookupError):
                longest = max(longest, float(json.loads(line)["seconds"]))
    return max(SIGNAL_SECONDS, int(_SAVE_MARGIN * longest + 60))


def _check_fetched(spec: JobSpec, run_dir: RunDir) -> None:
    """Check a model that was downloaded after the job was submitted."""
    try:
        check(spec)
    except UserError as error:
        raise SpecError(str(error)) from error
    forget(run_dir)


def _record(run_dir: RunDir, record: records.Submission, slurm_id: str) -> records.Submission:
    updated = replace(record, id=slurm_id)
    records.write_submission(run_dir, updated)
    return updated


def _write_script(spec: JobSpec, job: Job, name: str, home: Path) -> Path:
    """Write the batch script, and remove the reports of earlier attempts from the run directory."""
    run_dir = job.run_dir
    for path in (records.warden_file(run_dir), records.outcome_file(run_dir)):
        path.unlink(missing_ok=True)
    records.clear_stop_requests(run_dir)
    script = run_dir.root / "job.sbatch"
    seconds, python = signal_seconds(run_dir), sys.executable
    text = script_of(spec, run_dir, name=name, python=python, home=home, signal_seconds=seconds)
    run_dir.create()
    write_atomic(script, text, durable=True)
    return script


def _is_unchanged(store: Store, job: Job, spec: JobSpec) -> bool:
    """Return whether a job still waits to be submitted, unchanged since it was read."""
    now = store.get(job.id)
    waits = now.state is State.QUEUED and not now.here and now.attempt == job.attempt
    free = not (now.passed_over or now.stop_level)
    return waits and free and load_spec(job.run_dir.job_file) == spec
