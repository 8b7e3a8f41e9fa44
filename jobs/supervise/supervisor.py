"""One process per job: launch it, watch it, stop it, and record how it ended.

It outlives the dashboard and the SSH session. If it is killed itself, the next command that reads
the queue starts another one, which adopts the launcher and the ranks that still run.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.errors import StateError, UserError
from jobs.launch.trackers import start_push, start_trackers
from jobs.machine import processes
from jobs.machine.processes import ProcessId
from jobs.machine.residence import Standing, stand
from jobs.memory.calibration import record
from jobs.notify.announce import Announcer
from jobs.queue.states import State
from jobs.queue.summaries import keep_summary
from jobs.run.diagnosis.flight_records import tell_hang
from jobs.run.diagnosis.hang import SAVE_STEP, Watch, find_hang, saves_on
from jobs.run.disk_space import cap_logs, space_warning
from jobs.run.failure import keep_failure
from jobs.run.rundir import FLIGHT, REQUESTS
from jobs.supervise.attempt import Attempt, adopt, await_release, launch
from jobs.supervise.outcome import Outcome, judge

if TYPE_CHECKING:
    import subprocess

    from jobs.notify.config import Event
    from jobs.queue.store import Job, Store
    from jobs.run.diagnosis.hang import Stillness
    from jobs.run.rundir import RankStatus

LOOK_EVERY: Final = 0.2  # seconds
TERM_GRACE: Final = 60.0  # seconds between SIGTERM and SIGKILL
FAILURE_GRACE: Final = 10.0  # seconds that ranks get to end by themselves after one has failed
STACKS_TAKE: Final = 2.0  # seconds for every rank to write its stack and its flight record
HOUSEKEEPING_EVERY: Final = 15.0  # seconds
_SAVING: Final = {"save": "writing a checkpoint", "export": "writing the export"}
_NOT_UP: Final = ("start", "import")  # phases of a rank
_ANNOUNCED: Final[dict[State, Event]] = {
    State.COMPLETED: "completed",
    State.STOPPED: "stopped",
}
_UP: Final = frozenset({State.STARTING, State.RUNNING, State.SAVING})


@dataclass
class Supervisor:
    """Owns a job from `starting` to its end, over as many attempts as it takes."""

    store: Store
    job: Job
    stop_level: int = 0
    deadline: float | None = None
    failed_at: float | None = None
    watch: Watch = field(default_factory=Watch)
    hang: str | None = None
    interrupted: bool = False
    ended_by_us: set[int] = field(default_factory=set)
    reported: set[str] = field(default_factory=set)
    tidied_at: float = 0.0
    trackers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    announcer: Announcer = field(init=False)

    def __post_init__(self) -> None:
        self.announcer = Announcer(self.job, self._say)

    def run(self) -> None:
        """Launch, or adopt what an earlier supervisor launched, and stay until the end."""
        processes.become_subreaper()
        try:
            attempt = self._adopt() or self._launch(restarts=0)
            outcome = self._watch(attempt)
            while (
                outcome.worth_retrying
                and attempt.restarts < attempt.spec.max_restarts
                and self.store.get(self.job.id).stop_level == 0
            ):
                number = attempt.restarts + 1
                self.store.change(
                    self.job.id,
                    State.STARTING,
                    f"restart {number} of {attempt.spec.max_restarts} after: {outcome.reason}",
                )
                self._say(f"restart {number} after: {outcome.reason}")
                self.failed_at, self.hang, self.interrupted = None, None, False
                self.ended_by_us = set()
                attempt = self._launch(restarts=number)
                outcome = self._watch(attempt)
        except UserError as error:
            self._end_all()  # of a job whose file was damaged before a new supervisor read it
            outcome = Outcome(State.FAILED, f"could not start: {error}")
        except Exception as error:  # a supervisor that dies is replaced, and would die again
            self._say(traceback.format_exc())
            self._end_all()
            reason = f"its supervisor failed: {type(error).__name__}: {error}"
            outcome = Outcome(State.FAILED, reason)
        self._finish(outcome)

    def _adopt(self) -> Attempt | None:
        """Adopt what an earlier supervisor launched; None if there is nothing to watch."""
        try:
            attempt = adopt(self.job)
        except ValueError as error:
            self._say(f"cannot read launch.json: {error}; launching again")
            return None
        if attempt is not None:
            self._say("took over from a supervisor that exited")
            self._follow(attempt)
            # Whatever was said of that one.
            self.store.explain(self.job.id, "all ranks are up", State.RUNNING)
        return attempt

    def _launch(self, restarts: int) -> Attempt:
        attempt = launch(self.job, restarts)
        self._say(f"launched {attempt.command}")
        self._follow(attempt)
        return attempt

    def _follow(self, attempt: Attempt) -> None:
        """Report the run to its trackers, each in a process that nobody waits for."""
        try:
            self.trackers += start_trackers(attempt.spec, self.job.run_dir)
            self.trackers += start_push(attempt.spec, self.job)
        except OSError as error:
            self._say(f"cannot start a tracker: {error}")

    def _watch(self, attempt: Attempt) -> Outcome:
        """Watch an attempt until no process of it is left."""
        self.watch = Watch(attempt.spec.hang_timeout)
        while attempt.alive():
            try:
                self._look(attempt)
            except (OSError, sqlite3.Error) as error:  # a full disk must not end the training
                self._say(f"cannot read the processes: {error}")
            except Exception as error:  # and neither must a mistake of ours
                self._say_once(type(error).__name__, f"monitoring failed: {traceback.format_exc()}")
            processes.reap()
            time.sleep(LOOK_EVERY)
        self._clean_up(attempt)
        if held := await_release(self.job):
            self._say(f"the driver still shows memory held (GPU, pid): {held}")
        return judge(
            self.job.run_dir,
            attempt,
            stop_level=self.stop_level,
            hang=self.hang,
            interrupted=self.interrupted,
            ended_by_us=self.ended_by_us,
        )

    def _look(self, attempt: Attempt) -> None:
        """Follow the ranks' phases, and carry out requests."""
        job = self.store.get(self.job.id)
        statuses, unreadable = self.job.run_dir.read_ranks()
        for name, why in unreadable.items():
            self._say_once(name, f"cannot read {name}: {why}")
        ranks = self._watch_ranks(statuses)
        everyone = len(statuses) == job.ranks
        if everyone and all(status.phase not in _NOT_UP for status in statuses):
            saving = [_SAVING[s.phase] for s in statuses if s.phase in _SAVING]
            if job.state is State.STARTING:
                self._change(State.RUNNING, "all ranks are up", {State.STARTING})
            elif saving and job.state is State.RUNNING:
                self._change(State.SAVING, saving[0], {State.RUNNING})
            elif not saving and job.state is State.SAVING:
                self._change(State.RUNNING, f"finished {job.reason}", {State.SAVING})
        self._end_the_stranded(statuses)
        if everyone:
            self.announcer.look(ranks)
            self._end_a_hang(attempt, ranks)
        self._tidy()
        if self.deadline is not None and saves_on(ranks):
            # What it saves is what the stop is for; it gets the time that it needs.
            self.deadline = max(self.deadline, time.monotonic() + SAVE_STEP)
        overdue = self.deadline is not None and time.monotonic() > self.deadline
        level = max(job.stop_level, self.stop_level + 1 if overdue else 0)
        if level > self.stop_level:
            self._stop(attempt, min(level, 3))

    def _watch_ranks(self, statuses: list[RankStatus]) -> list[Stillness]:
        """Measure how long ranks have made no progress, less the time this process did not run."""
        ranks = self.watch.look(statuses, time.monotonic())
        if unwatched := self.watch.unwatched:
            self._say(f"the supervisor did not run for {unwatched:.0f} s")
            if self.deadline is not None:
                self.deadline += unwatched
            if self.failed_at is not None:
                self.failed_at += unwatched
        return ranks

    # -- stopping --------------------------------------------------------------------------

    def _stop(self, attempt: Attempt, level: int) -> None:
        """Level 1: ask at the step boundary. 2: SIGTERM to the ranks. 3: SIGKILL to all.

        Raises:
            OSError: The kernel does not say which processes are the run's.
        """
        targets = [p for p in processes.with_run_id(self.job.run_id) if p != attempt.launcher]
        self.stop_level = level
        if level == 1:
            self.job.run_dir.request("stop")
            self._change(State.STOPPING, "stops after the current step, with a checkpoint", _UP)
            self.deadline = time.monotonic() + attempt.spec.stop_grace_seconds
            return
        if level == 2:
            self._change(State.STOPPING, "SIGTERM sent", _UP)
            self.deadline = time.monotonic() + TERM_GRACE
            number = signal.SIGTERM
        else:
            self._change(State.STOPPING, "SIGKILL sent", _UP)
            self.deadline = None
            number = signal.SIGKILL
            if attempt.launcher is not None:
                targets.append(attempt.launcher)
        for process in targets:
            process.signal(number)
        self._say(f"stop level {level}: {number.name} to {[p.pid for p in targets]}")

    def _end_the_stranded(self, statuses: list[RankStatus]) -> None:
        """When a rank has failed, the others may wait in a collective until its timeout.

        Elastic would wait for them as long as for a save, since it cannot tell the two apart.
        """
        ended = [s for s in statuses if not ProcessId(s.pid, s.started).alive()]
        failed = self.job.run_dir.rank_errors()
        if self.failed_at is None:
            if failed or self._one_left_early(ended, statuses):
                self.failed_at = time.monotonic()
            return
        if time.monotonic() - self.failed_at < FAILURE_GRACE:
            return
        failed_ranks = {error["rank"] for error in failed}
        stranded = [s for s in statuses if s not in ended and s.rank not in failed_ranks]
        if not stranded or not (failed or ended):
            return
        for status in stranded:
            self.ended_by_us.add(status.rank)
            ProcessId(status.pid, status.started).signal(signal.SIGKILL)
        self._say(f"ended ranks that waited for a failed one: {[s.rank for s in stranded]}")

    def _one_left_early(self, ended: list[RankStatus], statuses: list[RankStatus]) -> bool:
        """Whether a rank is gone that was not at its end, and another still runs.

        A rank at its end may leave long before rank 0, which has more to write. It may have reached
        it after `statuses` were read, so the statuses of the dead are read again: they are final.
        """
        early = {s.rank for s in ended if s.phase != "end"}
        if not early or len(ended) == len(statuses):
            return False
        at_their_end = {s.rank for s in self.job.run_dir.rank_statuses() if s.phase == "end"}
        return not early <= at_their_end

    def _end_a_hang(self, attempt: Attempt, ranks: list[Stillness]) -> None:
        """End a job that hangs, after every rank's stack has been written to its log."""
        if self.hang is not None or self.failed_at is not None or self.stop_level:
            return
        hang = find_hang(ranks, attempt.spec.hang_timeout)
        if hang is None:
            return
        self.hang = hang.reason
        self._say(f"hang: {hang.reason}")
        self.job.run_dir.request(FLIGHT)
        identities = [ProcessId(rank.status.pid, rank.status.started) for rank in ranks]
        for identity in identities:
            identity.signal(signal.SIGUSR1)  # the engine's faulthandler writes all stacks
        time.sleep(STACKS_TAKE)
        self.hang = tell_hang(self.job.run_dir, hang.reason, self._say)
        for identity in [*identities, *([attempt.launcher] if attempt.launcher else [])]:
            identity.signal(signal.SIGKILL)

    # -- ending ----------------------------------------------------------------------------

    def _clean_up(self, attempt: Attempt) -> None:
        """End every remaining process of the run, whatever killed the launcher."""
        left = self._left()
        if not left:
            return
        self._say(f"the launcher is gone; ending remaining processes: {[p.pid for p in left]}")
        # Ranks that are all alive can still save; those that miss one only wait for it.
        healthy = len(left) >= self.job.ranks and self.failed_at is None and self.hang is None
        self.interrupted = healthy and self.stop_level < 2
        grace = min(attempt.spec.stop_grace_seconds, TERM_GRACE) if healthy else 2.0
        for process in left:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while left and time.monotonic() < deadline:
            self.stop_level = max(self.stop_level, self.store.get(self.job.id).stop_level)
            if self.stop_level >= 3:
                break
            left = processes.wait_gone(left, LOOK_EVERY)
        if stubborn := processes.end(left, grace=0):
            self._say(f"still alive after SIGKILL: {[p.pid for p in stubborn]}")

    def _end_all(self) -> None:
        processes.end(self._left(), grace=2.0)

    def _left(self) -> list[ProcessId]:
        """List the processes of the run, as soon as the kernel says which they are."""
        while True:
            try:
                return processes.with_run_id(self.job.run_id)
            except OSError as error:  # such as too many open files
                self._say_once("processes", f"cannot list processes: {error}")
                time.sleep(LOOK_EVERY)

    def _finish(self, outcome: Outcome) -> None:
        for request in (*REQUESTS, FLIGHT):
            with suppress(OSError):
                self.job.run_dir.clear_request(request)
        self.job.run_dir.forget_unfinished()
        with suppress(Exception):  # whatever is wrong with a note of ours, the job has its end
            record(self.job.run_dir)
        keep_failure(self.job.run_dir, outcome.failure)
        self._say(f"{outcome.state}: {outcome.reason}")
        self.announcer.announce(_ANNOUNCED.get(outcome.state, "failed"), outcome.reason)
        while self.store.path.exists():
            try:
                self.store.change(self.job.id, outcome.state, outcome.reason)
            except StateError as error:  # someone else has recorded an end, which stands
                self._say(f"not recorded: {error}")
                break
            except sqlite3.OperationalError as error:  # a full disk; else the state would lie
                self._say(f"could not record the end: {error}")
                time.sleep(1.0)
            else:
                break
        with suppress(Exception):  # who looks reads it instead
            keep_summary(self.store, self.store.get(self.job.id))

    def _tidy(self) -> None:
        if time.monotonic() - self.tidied_at < HOUSEKEEPING_EVERY:
            return
        self.tidied_at = time.monotonic()
        try:
            self._keep_house()
        except (OSError, sqlite3.Error) as error:
            self._say(f"cleanup failed: {error}")

    def _keep_house(self) -> None:
        for path in cap_logs(self.job.run_dir):
            self._say(f"{path.name} grew too large; its middle was removed")
        if warning := space_warning(self.job.run_dir):
            self.store.explain(self.job.id, f"warning: {warning}", State.RUNNING)
            self._say(warning)

    def _change(self, state: State, reason: str, only_from: frozenset[State] | set[State]) -> None:
        if self.store.change(self.job.id, state, reason, only_from=only_from):
            self._say(f"{state}: {reason}")

    def _say_once(self, what: str, text: str) -> None:
        if what not in self.reported:
            self.reported.add(what)
            self._say(text)

    def _say(self, text: str) -> None:
        """Print a line to standard error, which is logs/supervisor.log."""
        with suppress(OSError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)


def supervise(store: Store, job_id: int) -> None:
    """Take over a job that has no live supervisor, then let the next one start.

    Returns at once if another supervisor was quicker.
    """
    from jobs.queue.dispatch import dispatch

    me = ProcessId.of(os.getpid())
    assert me is not None
    job = store.get(job_id)
    if not job.state.active or stand(job.boot_id, store.home) is Standing.ELSEWHERE:
        return
    if job.supervisor is not None and not job.supervisor.is_dead():
        return
    if not store.take_over(job_id, job.supervisor, me):
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with store.held_open():
        Supervisor(store, store.get(job_id)).run()
    dispatch(store)
