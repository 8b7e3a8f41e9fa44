"""One process per job: launch it, watch it, stop it, and say truthfully how it ended.

It outlives the dashboard and the SSH session. When it is killed itself, the next look at the job
starts another one, which adopts the launcher and the ranks that are still running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import yaml

from jobs import processes
from jobs.conflicts import world_size
from jobs.diagnosis import why_failed
from jobs.errors import UserError
from jobs.eventlog import EventLog
from jobs.launchers import local
from jobs.processes import ProcessId
from jobs.rundir import read_json, write_atomic
from jobs.specfile import load_spec
from jobs.states import State

if TYPE_CHECKING:
    from jobs.rundir import RankStatus
    from jobs.store import Job, Store

LOOK_EVERY: Final = 0.2  # seconds
TERM_GRACE: Final = 60.0  # seconds between SIGTERM and SIGKILL
FAILURE_GRACE: Final = 10.0  # seconds that ranks get to end by themselves after one has failed
_SAVING: Final = frozenset({"save", "export"})


@dataclass
class Supervisor:
    """Owns one attempt of one job, from `starting` to its end."""

    store: Store
    job: Job
    launcher: ProcessId | None = None
    child: subprocess.Popen[bytes] | None = None
    ranks: int = 1
    grace: float = 600.0
    events_offset: int = 0
    stop_level: int = 0
    deadline: float | None = None
    exit_code: int | None = None
    failed_at: float | None = None
    ended_by_us: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Launch, or adopt what an earlier supervisor launched, and stay until the end."""
        processes.become_subreaper()
        try:
            self._adopt() if self.job.run_dir.launch_file.exists() else self._launch()
        except (UserError, OSError) as error:
            self._finish(State.FAILED, f"could not start: {error}")
            return
        while self._launcher_alive():
            self._look()
            processes.reap()
            time.sleep(LOOK_EVERY)
        self._clean_up()
        self._conclude()

    # -- beginning -------------------------------------------------------------------------

    def _launch(self) -> None:
        run_dir = self.job.run_dir
        run_dir.create()
        processes.end(processes.with_run_id(self.job.run_id), grace=0)  # of a launch cut short
        run_dir.forget_attempt()
        spec = load_spec(run_dir.job_file)
        self.ranks, self.grace = world_size(spec), spec.stop_grace_seconds
        self.events_offset = _size(run_dir.events)
        launch = local.build(spec, run_dir, gpus=self.job.gpus, run_id=self.job.run_id)
        config = local.accelerate_config(spec, on_gpus=bool(self.job.gpus))
        write_atomic(run_dir.accelerate_file, yaml.safe_dump(config, sort_keys=False))
        with open(run_dir.launcher_log, "wb") as log:
            self.child = subprocess.Popen(
                launch.command,
                env=local.full_environment(launch),
                cwd=run_dir.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.wait_for_by_hand(self.child.pid)
        self.launcher = ProcessId.of(self.child.pid)
        record = {
            "command": launch.command,
            "environment": launch.environment,
            "gpus": self.job.gpus,
            "ranks": self.ranks,
            "grace": self.grace,
            "attempt": self.job.attempt,
            "events_offset": self.events_offset,
            "launcher": [self.launcher.pid, self.launcher.started] if self.launcher else None,
            "started": time.time(),
            "versions": local.versions(),
        }
        write_atomic(run_dir.launch_file, json.dumps(record, indent=2) + "\n", durable=True)
        self._say(f"launched {' '.join(launch.command)}")

    def _adopt(self) -> None:
        record = read_json(self.job.run_dir.launch_file) or {}
        if record.get("attempt") != self.job.attempt:  # left by an earlier attempt
            self._launch()
            return
        self.ranks = int(record["ranks"])
        self.grace = float(record["grace"])
        self.events_offset = int(record["events_offset"])
        if record.get("launcher"):
            self.launcher = ProcessId(*record["launcher"])
        self._say("adopted the job of a supervisor that is gone")

    # -- watching --------------------------------------------------------------------------

    def _launcher_alive(self) -> bool:
        if self.child is not None:
            self.exit_code = self.child.poll()
            return self.exit_code is None
        return self.launcher is not None and self.launcher.alive()

    def _look(self) -> None:
        """One look: follow the ranks' phases, and carry out what was asked."""
        job = self.store.get(self.job.id)
        statuses = self.job.run_dir.rank_statuses()
        if len(statuses) == self.ranks and all(s.phase != "start" for s in statuses):
            saving = any(status.phase in _SAVING for status in statuses)
            if job.state is State.STARTING:
                self._change(State.RUNNING, "all ranks are up", {State.STARTING})
            elif saving and job.state is State.RUNNING:
                self._change(State.SAVING, "writing a checkpoint", {State.RUNNING})
            elif not saving and job.state is State.SAVING:
                self._change(State.RUNNING, "the checkpoint is written", {State.SAVING})
        self._end_the_stranded(statuses)
        overdue = self.deadline is not None and time.monotonic() > self.deadline
        wanted = max(job.stop_level, self.stop_level + 1 if overdue else 0)
        if wanted > self.stop_level:
            self._stop(min(wanted, 3))

    def _end_the_stranded(self, statuses: list[RankStatus]) -> None:
        """When a rank has failed, the others may wait in a collective until its timeout.

        Elastic would wait for them as long as for a save, since it cannot tell the two apart.
        """
        ended = [s for s in statuses if not ProcessId(s.pid, s.started).alive()]
        failed = self.job.run_dir.rank_errors()
        if self.failed_at is None:
            if failed or 0 < len(ended) < len(statuses):
                self.failed_at = time.monotonic()
            return
        if time.monotonic() - self.failed_at < FAILURE_GRACE:
            return
        told = {int(error["rank"]) for error in failed if "rank" in error}
        stranded = [s for s in statuses if s not in ended and s.rank not in told]
        if not stranded or not (failed or ended):
            return
        for status in stranded:
            self.ended_by_us.add(status.rank)
            ProcessId(status.pid, status.started).signal(signal.SIGKILL)
        self._say(f"ended ranks that waited for a failed one: {[s.rank for s in stranded]}")

    def _stop(self, level: int) -> None:
        """Level 1: ask at the step boundary. 2: SIGTERM to the ranks. 3: SIGKILL to all."""
        self.stop_level = level
        active = {State.STARTING, State.RUNNING, State.SAVING}
        if level == 1:
            self.job.run_dir.request("stop")
            self._change(State.STOPPING, "stops after this step and a checkpoint", active)
            self.deadline = time.monotonic() + self.grace
            return
        targets = [p for p in processes.with_run_id(self.job.run_id) if p != self.launcher]
        if level == 2:
            self._change(State.STOPPING, "SIGTERM sent", active)
            self.deadline = time.monotonic() + TERM_GRACE
            number = signal.SIGTERM
        else:
            self._change(State.STOPPING, "SIGKILL sent", active)
            self.deadline = None
            number = signal.SIGKILL
            if self.launcher is not None:
                targets.append(self.launcher)
        for process in targets:
            process.signal(number)
        self._say(f"stop level {level}: {number.name} to {[p.pid for p in targets]}")

    # -- ending ----------------------------------------------------------------------------

    def _clean_up(self) -> None:
        """Nothing of the run may outlive it, whatever killed the launcher."""
        left = processes.with_run_id(self.job.run_id)
        if not left:
            return
        self._say(f"the launcher is gone, ending what is left: {[p.pid for p in left]}")
        # Ranks that are all alive can still save; those that miss one only wait for it.
        healthy = len(left) >= self.ranks and self.failed_at is None
        grace = 0.0 if self.stop_level >= 3 else min(self.grace, TERM_GRACE) if healthy else 2.0
        if stubborn := processes.end(left, grace=grace):
            self._say(f"still alive after SIGKILL: {[p.pid for p in stubborn]}")

    def _conclude(self) -> None:
        run_dir = self.job.run_dir
        log = EventLog(run_dir.events, _offset=self.events_offset).read_all()
        newest = run_dir.latest_checkpoint()
        resume = f"resume continues after step {newest[0]}" if newest else "no checkpoint"
        if log.end_reason == "completed":
            self._finish(State.COMPLETED, f"trained {newest[0] if newest else 0} steps")
        elif log.end_reason == "stopped" and (self.stop_level or not self.exit_code):
            at = f"stopped at step {newest[0]}, saved" if newest else "stopped"
            self._finish(State.STOPPED, at)
        elif log.end_reason == "stopped":  # by our SIGTERM, after the launcher had died
            self._finish(
                State.FAILED, f"{why_failed(run_dir, self.exit_code)}; the ranks saved, {resume}"
            )
        elif self.stop_level >= 2:
            word = "SIGTERM" if self.stop_level == 2 else "SIGKILL"
            self._finish(State.STOPPED, f"ended by {word}; {resume}")
        elif self.stop_level == 1 and not log.steps and not run_dir.rank_errors():
            self._finish(State.STOPPED, "stopped before the first step")
        elif self.child is None and not run_dir.rank_errors():
            self._finish(State.LOST, f"everything was killed; {resume}")
        else:
            reason = why_failed(run_dir, self.exit_code, ended_by_us=self.ended_by_us)
            self._finish(State.FAILED, reason)

    def _finish(self, state: State, reason: str) -> None:
        for request in ("stop", "save_now", "sample_now"):
            self.job.run_dir.clear_request(request)
        self._say(f"{state}: {reason}")
        self.store.change(self.job.id, state, reason)

    def _change(self, state: State, reason: str, only_from: set[State]) -> None:
        if self.store.change(self.job.id, state, reason, only_from=only_from):
            self._say(f"{state}: {reason}")

    def _say(self, text: str) -> None:
        """A line in logs/supervisor.log, which standard error is."""
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def supervise(store: Store, job_id: int) -> None:
    """Take over a job that has no live supervisor, then let the next one start.

    Returns at once if another supervisor was quicker.
    """
    from jobs.dispatch import dispatch

    me = ProcessId.of(os.getpid())
    assert me is not None
    job = store.get(job_id)
    if not job.state.active or not store.take_over(job_id, job.supervisor, me):
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Supervisor(store, store.get(job_id)).run()
    dispatch(store)


def _size(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
