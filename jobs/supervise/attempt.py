"""One launch of a job: started here, or adopted by a later supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import yaml

from jobs.errors import UserError
from jobs.hub.wanted import forget, noted
from jobs.launch import local
from jobs.machine import devices, processes
from jobs.machine.gpu import still_held
from jobs.machine.processes import ProcessId
from jobs.machine.residence import elsewhere, residence
from jobs.memory.kept_prediction import keep
from jobs.preflight.check_job import check
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.file.load import load_spec

if TYPE_CHECKING:
    from jobs.queue.store import Job
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

_RELEASE_TAKES: Final = 15.0  # seconds for the driver to give back what dead processes held
_BEATS_WITHIN: Final = 5.0  # seconds; a live rank writes about once a second


@dataclass
class Attempt:
    """A launcher and its ranks.

    Attributes:
        spec: The job as it runs.
        command: The launcher's command line.
        launcher: `accelerate launch`; None when it could not be identified.
        child: The launcher if it is our child; None if an earlier supervisor started it: its exit
            status is then unknown.
        events_offset: Where in the event stream this attempt begins.
        restarts: How often the job was restarted after a failure before this attempt.
        oom_kills: The kernel's count of processes killed for memory, at the launch.
    """

    spec: JobSpec
    command: str
    launcher: ProcessId | None
    child: subprocess.Popen[bytes] | None
    events_offset: int
    restarts: int
    oom_kills: int
    exit_code: int | None = None

    def alive(self) -> bool:
        """Whether the launcher still runs."""
        if self.child is not None:
            self.exit_code = self.child.poll()
            return self.exit_code is None
        return self.launcher is not None and self.launcher.alive()


def launch(job: Job, restarts: int = 0) -> Attempt:
    """Start the job's launcher, detached, and record it in `launch.json`.

    Raises:
        UserError: The job file cannot be run, or ranks that live elsewhere still train in it.
        OSError: The launcher cannot be started.
    """
    run_dir = job.run_dir
    run_dir.create()
    _refuse_beside_others(run_dir)
    processes.end(processes.with_run_id(job.run_id), grace=0)  # of a launch cut short
    run_dir.forget_attempt()
    spec = load_spec(run_dir.job_file)
    if noted(run_dir):  # fetched since it was submitted, and not checked by then
        check(spec)
        forget(run_dir)
    started = local.build(spec, run_dir, gpus=job.gpus, run_id=job.run_id)
    write_atomic(run_dir.accelerate_file, yaml.safe_dump(started.config, sort_keys=False))
    offset = run_dir.events.stat().st_size if run_dir.events.exists() else 0
    run_dir.launcher_log.write_bytes(b"")  # an earlier launch's words say nothing of this one
    # Appended to, so that what is written after a large log was cut does not leave a hole.
    with open(run_dir.launcher_log, "ab") as log:
        child = subprocess.Popen(
            started.command,
            env=local.full_environment(started),
            cwd=run_dir.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    processes.wait_for_by_hand(child.pid)
    attempt = Attempt(
        spec=spec,
        command=" ".join(started.command),
        launcher=ProcessId.of(child.pid),
        child=child,
        events_offset=offset,
        restarts=restarts,
        oom_kills=processes.kernel_oom_kills(),
    )
    record = {
        "command": started.command,
        "environment": started.environment,
        "gpus": job.gpus,
        "run_id": job.run_id,
        "residence": str(residence()),
        "attempt": job.attempt,
        "restarts": restarts,
        "events_offset": offset,
        "oom_kills": attempt.oom_kills,
        "launcher": [attempt.launcher.pid, attempt.launcher.started] if attempt.launcher else None,
        "started": time.time(),
        "versions": local.versions(),
        "git": _git_revision(),
    }
    write_atomic(run_dir.launch_file, json.dumps(record, indent=2) + "\n", durable=True)
    keep(run_dir, spec, started.strategy, job.ranks, on_gpus=bool(job.gpus))
    return attempt


def _refuse_beside_others(run_dir: RunDir) -> None:
    """Start nothing where ranks of an earlier launch still train that cannot be ended from here."""
    record = read_json(run_dir.launch_file) or {}
    there = elsewhere(str(record.get("residence") or ""), run_dir.root.parent.parent)
    if there and beats(run_dir):
        raise UserError(
            f"its ranks still run in another container or machine ({there})",
            "stop them there first",
        )


def beats(run_dir: RunDir) -> bool:
    """Whether a rank writes its status within `_BEATS_WITHIN`, by no other machine's clock."""
    deadline, first = time.monotonic() + _BEATS_WITHIN, _written(run_dir)
    while time.monotonic() < deadline:
        if _written(run_dir) != first:
            return True
        time.sleep(0.1)
    return False


def _written(run_dir: RunDir) -> dict[int, float]:
    return {status.rank: status.heartbeat for status in run_dir.rank_statuses()}


def adopt(job: Job) -> Attempt | None:
    """Find the attempt that an earlier supervisor launched; None when there was none yet.

    Raises:
        UserError: The job file cannot be read any more.
        ValueError: The record of the launch cannot be read.
    """
    record = read_json(job.run_dir.launch_file) or {}
    if (record.get("run_id"), record.get("attempt")) != (job.run_id, job.attempt):
        return None  # missing, or left by an earlier attempt or another job
    spec = load_spec(job.run_dir.job_file)
    try:
        launcher = record["launcher"]
        return Attempt(
            spec=spec,
            command=" ".join(map(str, record["command"])),
            launcher=ProcessId(int(launcher[0]), float(launcher[1])) if launcher else None,
            child=None,
            events_offset=max(0, int(record["events_offset"])),
            restarts=int(record["restarts"]),
            oom_kills=int(record["oom_kills"]),
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def await_release(job: Job) -> list[tuple[int, int]]:
    """Wait until the driver has freed dead ranks' memory: the next job needs it.

    Returns:
        What it still shows as held, as (GPU's index, pid).
    """
    pids = {status.pid for status in job.run_dir.rank_statuses()}
    deadline = time.monotonic() + _RELEASE_TAKES
    while job.gpus:
        held = still_held(devices.gpus(), job.gpus, pids)
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.2)
    return []


def _git_revision() -> str | None:
    """The revision of the code, when it runs from a checkout."""
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        done = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
