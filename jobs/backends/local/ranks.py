"""Control a job's ranks on this machine: `accelerate launch`, its processes and their GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import yaml

from jobs.errors import UserError
from jobs.hub.wanted import forget, names_in, noted
from jobs.launch import build_launch, full_environment, versions
from jobs.machine import devices, processes
from jobs.machine.gpu import still_held
from jobs.machine.processes import ProcessId
from jobs.machine.residence import elsewhere, residence
from jobs.memory.calibration import keep
from jobs.preflight.check_job import check, check_here
from jobs.queue.neighbors import record_home
from jobs.run.rundir import read_json, write_atomic
from jobs.spec.file.load import load_spec
from jobs.spec.values.hub_names import pin_snapshots
from jobs.supervise import supervisor
from jobs.supervise.port import Attempt
from jobs.trackers import start_push, start_trackers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from jobs.queue.store import Job
    from jobs.run.rundir import RankStatus, RunDir
    from jobs.supervise.port import Outcome, Report

POLL_INTERVAL: Final = 0.2  # seconds
_RELEASE_TIMEOUT: Final = 15.0  # seconds for the driver to free the memory of dead processes
_BEAT_WINDOW: Final = 5.0  # seconds; a live rank writes its status about once a second
_STRANDED: Final = 2.0  # seconds that ranks get if they can no longer save


@dataclass
class LocalRanks:
    """Implement `jobs.supervise.port.Ranks` for a job on this machine.

    Ranks are identified by their status files, all other processes of the run by the run id in
    their environment.
    """

    job: Job
    report: Report
    # Keep references: Python warns if a child is garbage-collected before it was waited for.
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _listing_failed: bool = False

    def adopt(self) -> Attempt | None:
        try:
            attempt = adopt(self.job)
        except ValueError as error:
            self.report.log(f"cannot read launch.json: {error}; launching again")
            return None
        if attempt is not None:
            self.report.log("took over from a supervisor that exited")
            self._follow(attempt)
        return attempt

    def launch(self, restarts: int) -> Attempt:
        attempt = launch(self.job, restarts)
        self._follow(attempt)
        return attempt

    def _follow(self, attempt: Attempt) -> None:
        """Start the run's trackers and its push, each in a process that is not waited for."""
        try:
            self._children += start_trackers(attempt.spec, self.job.run_dir)
            self._children += start_push(attempt.spec, self.job)
        except OSError as error:
            self.report.log(f"cannot start a tracker: {error}")

    def rest(self, attempt: Attempt) -> None:
        processes.reap()
        time.sleep(POLL_INTERVAL)

    def leave_if_replaced(self) -> None:
        """Do nothing: a supervisor is replaced only after it has died."""

    def gone(self, statuses: Sequence[RankStatus]) -> set[int]:
        return {s.rank for s in statuses if not ProcessId(s.pid, s.started).alive()}

    def dump_stacks(self, statuses: Sequence[RankStatus]) -> None:
        for status in statuses:  # the engine's faulthandler dumps all stacks
            ProcessId(status.pid, status.started).signal(signal.SIGUSR1)

    def terminate(self, attempt: Attempt) -> None:
        # Spare the launcher, which would end ranks that are saving.
        listed = processes.with_run_id(self.job.run_id)
        self._signal([p for p in listed if p != attempt.launcher], signal.SIGTERM)

    def kill(self, attempt: Attempt, ranks: Collection[int] | None = None) -> None:
        if ranks is not None:
            statuses = self.job.run_dir.rank_statuses()
            targets = [ProcessId(s.pid, s.started) for s in statuses if s.rank in ranks]
        else:
            try:
                targets = processes.with_run_id(self.job.run_id)
            # for example too many open files; the other processes are ended later
            except OSError as error:
                self.report.log(f"cannot list processes: {error}")
                statuses = self.job.run_dir.rank_statuses()
                targets = [ProcessId(s.pid, s.started) for s in statuses]
            if attempt.launcher is not None and attempt.launcher not in targets:
                targets.append(attempt.launcher)
        self._signal(targets, signal.SIGKILL)

    def _signal(self, targets: list[ProcessId], number: signal.Signals) -> None:
        for process in targets:
            process.signal(number)
        self.report.log(f"{number.name} to {[process.pid for process in targets]}")

    def clean_up(self, attempt: Attempt, *, healthy: bool, stop_request: Callable[[], int]) -> bool:
        left = self._left()
        # If all ranks are alive they can still save; otherwise they only wait for the missing one.
        healthy = healthy and len(left) >= self.job.ranks
        if left:
            self.report.log(f"the launcher is gone; ending {[process.pid for process in left]}")
            for process in left:
                process.signal(signal.SIGTERM)
            grace = min(attempt.spec.stop_grace_seconds, supervisor.TERM_GRACE)
            deadline = time.monotonic() + (grace if healthy else _STRANDED)
            while left and time.monotonic() < deadline and stop_request() < 3:
                left = processes.wait_gone(left, POLL_INTERVAL)
            if stubborn := processes.end(left, grace=0):
                self.report.log(f"still alive after SIGKILL: {[p.pid for p in stubborn]}")
        if held := await_release(self.job):
            self.report.log(f"the driver still shows memory held (GPU, pid): {held}")
        return healthy

    def end_all(self) -> None:
        processes.end(self._left(), grace=_STRANDED)

    def _left(self) -> list[ProcessId]:
        """List the processes of the run, retrying until the kernel lists them."""
        while True:
            try:
                return processes.with_run_id(self.job.run_id)
            except OSError as error:  # for example too many open files
                if not self._listing_failed:
                    self.report.log(f"cannot list processes: {error}")
                self._listing_failed = True
                time.sleep(POLL_INTERVAL)

    def must_end(self) -> str:
        """Return "": only the user ends a job on this machine."""
        return ""

    def reconsider(self, outcome: Outcome, give_up: Callable[[], bool]) -> Outcome:
        """Return the outcome unchanged: the job holds its GPUs from start to end."""
        return outcome

    def conclude(self, outcome: Outcome) -> Outcome:
        """Return the outcome unchanged: there is no scheduler that could have ended the ranks."""
        return outcome


def launch(job: Job, restarts: int = 0) -> Attempt:
    """Start the job's launcher, detached, and record it in `launch.json`.

    Raises:
        UserError: The job file is invalid, or its ranks still run in another container or machine.
        OSError: The launcher cannot be started.
    """
    run_dir = job.run_dir
    run_dir.create()
    _refuse_if_running_elsewhere(run_dir)
    processes.end(processes.with_run_id(job.run_id), grace=0)  # left by an interrupted launch
    run_dir.forget_attempt()
    spec = load_spec(run_dir.job_file)
    if noted(run_dir):  # the model was downloaded after submission and is not checked yet
        check(spec)
        check_here(spec)
        forget(run_dir)
    pin_snapshots(names_in(spec), run_dir.root)
    record_home(run_dir)
    started = build_launch(spec, run_dir, gpus=job.gpus, run_id=job.run_id)
    write_atomic(run_dir.accelerate_file, yaml.safe_dump(started.config, sort_keys=False))
    offset = run_dir.events.stat().st_size if run_dir.events.exists() else 0
    run_dir.launcher_log.write_bytes(b"")  # drop the output of an earlier launch
    # Open for appending, so that writes after a large log was truncated leave no hole.
    with open(run_dir.launcher_log, "ab") as log:
        child = subprocess.Popen(
            started.command,
            env=full_environment(started),
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
        "versions": versions(),
        "git": _git_revision(),
    }
    write_atomic(run_dir.launch_file, json.dumps(record, indent=2) + "\n", durable=True)
    keep(run_dir, spec, started.strategy, job.ranks, on_gpus=bool(job.gpus))
    return attempt


def _refuse_if_running_elsewhere(run_dir: RunDir) -> None:
    """Raise if ranks of an earlier launch still run where they cannot be ended from here."""
    record = read_json(run_dir.launch_file) or {}
    there = elsewhere(str(record.get("residence") or ""), run_dir.root.parent.parent)
    if there and beats(run_dir):
        raise UserError(
            f"its ranks still run in another container or machine ({there})",
            "stop them there first",
        )


def beats(run_dir: RunDir) -> bool:
    """Return whether a rank updates its status within `_BEAT_WINDOW`.

    Needs no other machine's clock.
    """
    deadline, first = time.monotonic() + _BEAT_WINDOW, _written(run_dir)
    while time.monotonic() < deadline:
        if _written(run_dir) != first:
            return True
        time.sleep(0.1)
    return False


def _written(run_dir: RunDir) -> dict[int, float]:
    return {status.rank: status.heartbeat for status in run_dir.rank_statuses()}


def adopt(job: Job) -> Attempt | None:
    """Find the attempt that an earlier supervisor launched; None if there is none.

    Raises:
        UserError: The job file cannot be read any more.
        ValueError: The launch record cannot be parsed.
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
    """Wait until the driver has freed the memory of dead ranks, which the next job needs.

    Returns:
        The memory still held, as (GPU index, pid).
    """
    pids = {status.pid for status in job.run_dir.rank_statuses()}
    deadline = time.monotonic() + _RELEASE_TIMEOUT
    while job.gpus:
        held = still_held(devices.gpus(), job.gpus, pids)
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.2)
    return []


def _git_revision() -> str | None:
    """Return the code's git revision; None if it does not run from a checkout."""
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
