"""The supervisor of a job, inside its allocation (`python -m jobs.slurm.warden RUNDIR`).

The batch step becomes this process: it starts the ranks, watches them, restarts them, saves before
the time limit, and writes what it sees into the run directory. It never opens the database, and
nothing on the login node has to run for it.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.launch.trackers import start_trackers
from jobs.queue.states import State
from jobs.run.diagnosis.flight_records import tell_hang
from jobs.run.diagnosis.hang import SAVE_STEP, Watch, find_hang, saves_on
from jobs.run.diagnosis.rank_exits import rank_exits
from jobs.run.failure import keep_failure
from jobs.run.fence import raise_fence, taken_over
from jobs.run.rundir import FLIGHT, REQUESTS, read_tail
from jobs.slurm import commands
from jobs.slurm.commands import AwayError
from jobs.slurm.records import (
    Allocation,
    WardenReport,
    asked_to_stop,
    outcome_file,
    warden_file,
    write_warden_report,
)
from jobs.slurm.step import add_errors, await_answer, start_step, was_refused, were_terminated
from jobs.spec.file.load import load_spec
from jobs.spec.rules.strategy import world_size
from jobs.supervise.outcome import Outcome, judge

if TYPE_CHECKING:
    from jobs.run.rundir import RankStatus, RunDir
    from jobs.spec.job_spec import JobSpec
    from jobs.supervise.attempt import Attempt

LOOK_EVERY: Final = 0.5  # seconds
BEAT_EVERY: Final = 5.0  # seconds between two signs of life
FAILURE_GRACE: Final = 10.0  # seconds that ranks get to end by themselves after one has failed
TERM_GRACE: Final = 60.0  # seconds after SIGTERM before the ranks are killed
STACKS_TAKE: Final = 3.0  # seconds for every rank to write its stack
KILL_TAKES: Final = 40.0  # seconds for srun to end its tasks
TRACKERS_TAKE: Final = 60.0  # seconds for trackers to report the end
VERDICT_TAKES: Final = 600.0  # seconds for Slurm to carry out what it began with a SIGTERM
_ASK_EVERY: Final = 5.0  # seconds
_REFUSALS: Final = 10  # starts of the ranks for which Slurm gave no step
_SAVING: Final = {"save": "writing a checkpoint", "export": "writing the export"}
_NO_MORE_STEPS: Final = "already completing or completed"
_NOT_UP: Final = ("start", "import")  # phases of a rank


@dataclass
class Warden:
    """Owns a job for as long as it has this allocation.

    Attributes:
        run_dir: Of the job.
        allocation: Slurm's job id and restart count.
        attempt: Ours, by which a person's requests are known; None for a job handed in by hand.
        time_up: Whether the time limit is near.
        sigterm_received: Whether Slurm sent SIGTERM: a cancellation, or a preemption.
    """

    run_dir: RunDir
    allocation: Allocation
    attempt: int | None = None
    time_up: bool = False
    sigterm_received: bool = False
    up: bool = False  # all ranks have been, in this launch
    stop_level: int = 0
    deadline: float | None = None
    failed_at: float | None = None
    hang: str | None = None
    watch: Watch = field(default_factory=Watch)
    ended_by_us: set[int] = field(default_factory=set)
    _reported: tuple[State, str] = (State.STARTING, "")
    _logged: set[type[Exception]] = field(default_factory=set)
    _beat: int = 0
    _beaten_at: float = 0.0

    def run(self) -> int:
        """Stay until the job has ended, or Slurm ends the allocation.

        Returns:
            The exit status of the batch script.
        """
        raise_fence(self.run_dir.root, str(self.allocation))
        begun = self._newest()
        try:
            spec = load_spec(self.run_dir.job_file)
            outcome = self._train(spec)
        except UserError as error:
            outcome = Outcome(State.FAILED, f"could not start: {error}")
        except Exception as error:
            self._log(traceback.format_exc())
            reason = f"its supervisor failed: {type(error).__name__}: {error}"
            outcome = Outcome(State.FAILED, reason)
        else:
            if not self._persons_wish():
                outcome = self._not_asked(outcome, spec, begun)
        self._finish(outcome)
        return int(outcome.state not in (State.COMPLETED, State.STOPPED))

    # -- training --------------------------------------------------------------------------

    def _train(self, spec: JobSpec) -> Outcome:
        if self._persons_wish():
            return Outcome(State.STOPPED, "stopped before the ranks started")
        restarts = refusals = 0
        run_id = f"slurm-{self.allocation}"
        while True:
            self._say(State.STARTING, "starting ranks")
            attempt = start_step(spec, self.run_dir, self.allocation, run_id, restarts)
            self._log(f"started {attempt.command}")
            self.failed_at, self.hang, self.ended_by_us, self.up = None, None, set(), False
            trackers = []
            try:
                trackers = start_trackers(spec, self.run_dir)
            except OSError as error:
                self._log(f"cannot start a tracker: {error}")
            outcome = self._watch(attempt)
            ending = self._is_to_end()
            if was_refused(self.run_dir) and not ending and refusals < _REFUSALS:
                refusals += 1
                self._log(f"no step: {outcome.reason}")
                ends = partial(self._look_without_ranks, attempt)
                if (state := await_answer(self.allocation.id, ends)) == "RUNNING":
                    continue
                if state is None:
                    return Outcome(State.STOPPED, "stopped before the ranks started")
                if not state:
                    return Outcome(State.LOST, f"Slurm no longer knows job {self.allocation.id}")
                ending = True
            if not outcome.worth_retrying or restarts >= spec.max_restarts or ending:
                for tracker in trackers:
                    with suppress(subprocess.TimeoutExpired):
                        tracker.wait(TRACKERS_TAKE)
                return outcome
            restarts += 1
            self._log(f"restart {restarts} of {spec.max_restarts} after: {outcome.reason}")

    def _watch(self, attempt: Attempt) -> Outcome:
        self.watch = Watch(attempt.spec.hang_timeout)
        while attempt.alive():
            try:
                self._look(attempt)
            except Exception as error:  # a mistake of ours must not end the training
                if type(error) not in self._logged:  # twice a second, on a disk that is full
                    self._logged.add(type(error))
                    self._log(f"monitoring failed: {traceback.format_exc()}")
            self._nap(attempt)
        add_errors(self.run_dir)
        return judge(
            self.run_dir,
            attempt,
            stop_level=self.stop_level,
            hang=self.hang,
            ended_by_us=self.ended_by_us,
        )

    def _nap(self, attempt: Attempt) -> None:
        with suppress(subprocess.TimeoutExpired):
            if attempt.child is not None:
                attempt.child.wait(LOOK_EVERY)

    def _make_way(self, attempt: Attempt) -> None:
        if other := taken_over(self.run_dir.root, str(self.allocation)):
            # This node was cut off; the new warden alone says what becomes of the job.
            self._log(f"allocation {other} of this job has taken over; ending the ranks")
            self._kill(attempt)
            raise SystemExit(1)

    def _is_to_end(self) -> bool:
        return self.time_up or self.sigterm_received or self._persons_wish() > 0

    def _look_without_ranks(self, attempt: Attempt) -> bool:
        """Show signs of life while Slurm starts no ranks; whether to wait no longer."""
        self._make_way(attempt)
        self._say(State.STARTING, "waiting for Slurm to start the ranks")
        return self._is_to_end()

    def _look(self, attempt: Attempt) -> None:
        self._make_way(attempt)
        statuses, _ = self.run_dir.read_ranks()
        ranks = self.watch.look(statuses, time.monotonic())
        if unwatched := self.watch.unwatched:
            self._log(f"the supervisor did not run for {unwatched:.0f} s")
            self.deadline = None if self.deadline is None else self.deadline + unwatched
            self.failed_at = None if self.failed_at is None else self.failed_at + unwatched
        if self.deadline is not None and saves_on(ranks):
            self.deadline = max(self.deadline, time.monotonic() + SAVE_STEP)
        everyone = len(statuses) == world_size(attempt.spec)
        if self.stop_level:
            self._say(State.STOPPING, self._reported[1])
        elif everyone and all(status.phase not in _NOT_UP for status in statuses):
            saving = [_SAVING[s.phase] for s in statuses if s.phase in _SAVING]
            state, self.up = State.SAVING if saving else State.RUNNING, True
            self._say(state, saving[0] if saving else "all ranks are up")
        elif not self.up:
            self._say(State.STARTING, "starting ranks")
        self._end_the_stranded(attempt, statuses)
        if everyone and not (self.hang or self.failed_at or self.stop_level):
            hang = find_hang(ranks, attempt.spec.hang_timeout)
            if hang is not None:
                self._end_a_hang(attempt, hang.reason)
        self._carry_out_stops(attempt)

    def _end_the_stranded(self, attempt: Attempt, statuses: list[RankStatus]) -> None:
        """When a rank has failed, the others may wait in a collective until its timeout.

        Ranks on other nodes cannot be judged by their pids: what srun and they say counts.
        """
        if self.failed_at is None:
            if self.run_dir.rank_errors() or rank_exits(self.run_dir):
                self.failed_at = time.monotonic()
            return
        if time.monotonic() - self.failed_at >= FAILURE_GRACE and not self.ended_by_us:
            failed = {error["rank"] for error in self.run_dir.rank_errors()}
            failed |= {rank_exit.rank for rank_exit in rank_exits(self.run_dir)}
            self.ended_by_us = {s.rank for s in statuses if s.rank not in failed}
            self._log("a rank has failed; ending the others")
            self._kill(attempt)

    def _end_a_hang(self, attempt: Attempt, reason: str) -> None:
        self.hang = reason
        self._log(f"hang: {reason}")
        self.run_dir.request(FLIGHT)
        with suppress(AwayError, UserError):
            commands.signal_steps(self.allocation.id, "USR1")
        time.sleep(STACKS_TAKE)
        self.hang = tell_hang(self.run_dir, reason, self._log)
        self._kill(attempt)

    # -- stopping --------------------------------------------------------------------------

    def _persons_wish(self) -> int:
        return asked_to_stop(self.run_dir, self.attempt) if self.attempt is not None else 0

    def _carry_out_stops(self, attempt: Attempt) -> None:
        """A person's wish, the time limit, or Slurm's SIGTERM, which ranks may have got or not."""
        wish = max(self._persons_wish(), int(self.time_up or self.sigterm_received))
        late = self.deadline is not None and time.monotonic() > self.deadline
        level = min(3, max(wish, self.stop_level + 1 if late and self._persons_wish() else 0))
        if level <= self.stop_level:
            return
        self.stop_level = level
        if level == 1:
            self.run_dir.request("stop")
            why = "the time limit is near: " if self.time_up and not self._persons_wish() else ""
            self._say(State.STOPPING, f"{why}stops after the current step, with a checkpoint")
            self.deadline = time.monotonic() + attempt.spec.stop_grace_seconds
        elif level == 2:
            self.run_dir.request("stop")
            self._say(State.STOPPING, "SIGTERM sent")
            self.deadline = time.monotonic() + TERM_GRACE
            with suppress(AwayError, UserError):
                commands.signal_steps(self.allocation.id, "TERM")
        else:
            self._say(State.STOPPING, "SIGKILL sent")
            self.deadline = None
            self._kill(attempt)

    def _kill(self, attempt: Attempt) -> None:
        """End all tasks: srun does it when it gets SIGTERM, and says so."""
        child = attempt.child
        if child is None:
            return
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(KILL_TAKES)
        except subprocess.TimeoutExpired:
            child.kill()

    # -- ending ----------------------------------------------------------------------------

    def _not_asked(self, outcome: Outcome, spec: JobSpec, begun: int | None) -> Outcome:
        """What an end means that no person asked for."""
        if outcome.state is State.COMPLETED:
            return outcome
        retries = outcome.worth_retrying and spec.max_restarts > 0 and spec.slurm_requeue
        if outcome.state is not State.STOPPED and not (self.time_up and retries):
            terminated = self.stop_level < 2 and were_terminated(self.run_dir, self.ended_by_us)
            if self.sigterm_received or terminated or self._is_ending():
                self._await_verdict()
            return outcome
        if self.sigterm_received or not self.time_up:
            # A cancellation, or a preemption, which signals only the ranks. To exit now would
            # look to Slurm like a normal end, and a preempted job would not be requeued.
            self._say(State.STOPPING, f"{outcome.reason}; waiting for Slurm")
            if not self._await_verdict():
                reason = f"someone sent SIGTERM to the ranks; {outcome.reason}"
                return Outcome(State.STOPPED, reason)
            return outcome
        newest = self._newest()
        if newest is None or newest == begun:
            reason = "the time limit came before the job got to a new checkpoint; raise slurm_time"
            return Outcome(State.FAILED, reason)
        stopped = Outcome(State.STOPPED, f"time limit; {outcome.reason}")
        return self._requeue(stopped) if spec.slurm_requeue else stopped

    def _requeue(self, stopped: Outcome) -> Outcome:
        """Go back into Slurm's queue, which ends this process; if that fails, it has stopped."""
        self._say(State.STOPPING, f"{stopped.reason}; requeueing")
        while not self._persons_wish():
            self._say(*self._reported)
            try:
                commands.requeue(self.allocation.id)
            except AwayError as error:  # it has until the time limit to come back
                self._log(f"cannot requeue yet: {error}")
                time.sleep(_ASK_EVERY)
            except UserError as error:
                reason = f"{stopped.reason}; Slurm refused to requeue: {error}"
                return Outcome(State.STOPPED, reason)
            else:
                self._await_verdict()
                break
        return stopped

    def _is_ending(self) -> bool:
        """Whether Slurm ends this allocation, so that ranks were killed for that reason.

        Past its limit, a job is still RUNNING for up to a minute, but gets no more steps.
        """
        if _NO_MORE_STEPS in read_tail(self.run_dir.launcher_log, 4096):
            return True
        with suppress(AwayError):
            return commands.state_of(self.allocation.id) not in ("RUNNING", "")
        return False

    def _await_verdict(self) -> bool:
        """Stay until Slurm ends this process; False if it does not in a long time."""
        until = time.monotonic() + VERDICT_TAKES
        while time.monotonic() < until:
            self._say(*self._reported)
            if self._persons_wish():
                return True
            with suppress(AwayError):
                if commands.state_of(self.allocation.id) == "CANCELLED":
                    return True
            time.sleep(_ASK_EVERY)
        return False

    def _finish(self, outcome: Outcome) -> None:
        for request in (*REQUESTS, FLIGHT):
            with suppress(OSError):
                self.run_dir.clear_request(request)
        keep_failure(self.run_dir, outcome.failure)
        self._log(f"{outcome.state}: {outcome.reason}")
        report = WardenReport(
            self.allocation,
            outcome.state,
            outcome.reason,
            socket.gethostname(),
            self._beat,
            outcome.worth_retrying,
        )
        while True:
            try:
                write_warden_report(outcome_file(self.run_dir), report, durable=True)
            except OSError as error:  # a full disk; else the state would lie
                self._log(f"could not record the end: {error}")
                time.sleep(_ASK_EVERY)
            else:
                return

    # -- inside ----------------------------------------------------------------------------

    def _newest(self) -> int | None:
        newest = self.run_dir.latest_checkpoint()
        return newest[0] if newest else None

    def _say(self, state: State, reason: str) -> None:
        """Write the state down, at once if it changed, else from time to time."""
        now = time.monotonic()
        if (state, reason) == self._reported and now - self._beaten_at < BEAT_EVERY:
            return
        if (state, reason) != self._reported:
            self._log(f"{state}: {reason}")
        self._reported, self._beaten_at = (state, reason), now
        self._beat += 1
        report = WardenReport(self.allocation, state, reason, socket.gethostname(), self._beat)
        with suppress(OSError):
            write_warden_report(warden_file(self.run_dir), report)

    def _log(self, text: str) -> None:
        """A line of the batch script's log."""
        with suppress(OSError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)
