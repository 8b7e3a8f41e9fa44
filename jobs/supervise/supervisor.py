"""The supervisor of a job: launch its ranks, watch and stop them, and record how they ended.

One process per job, which outlives the dashboard and the SSH session. The backend decides where the
ranks run and where reports go: see `Ranks` and `Report` in `jobs.supervise.port`.
"""

from __future__ import annotations

import sqlite3
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.queue.states import State
from jobs.run.disk_space import cap_logs, space_warning
from jobs.run.eventlog import EventLog
from jobs.run.failure import Cause, Failure, keep_failure
from jobs.run.hang import SAVE_STEP, Watch, find_hang, is_saving
from jobs.run.rundir import FLIGHT, REQUESTS
from jobs.run.why_failed import diagnose, explain_hang, is_user_error, launcher_signal, rank_exits
from jobs.spec.rules.strategy import world_size
from jobs.supervise.median import MedianRule
from jobs.supervise.port import Outcome, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs.run.hang import Stillness
    from jobs.run.rundir import RankStatus, RunDir
    from jobs.supervise.port import Attempt, Ranks, Report

TERM_GRACE: Final = 60.0  # seconds between SIGTERM and SIGKILL
FAILURE_GRACE: Final = 10.0  # seconds that ranks have to exit by themselves after one has failed
STACK_DUMP_TIME: Final = 3.0  # seconds in which every rank writes its stack and its flight record
HOUSEKEEPING_EVERY: Final = 15.0  # seconds
_SAVING: Final = {"save": "writing a checkpoint", "export": "writing the export"}
_STARTING_PHASES: Final = ("start", "import")  # phases in which a rank is not yet up
_STOPS: Final = {
    1: "stops after the current step, with a checkpoint",
    2: "SIGTERM sent",
    3: "SIGKILL sent",
}


@dataclass
class Supervisor:
    """Run a job from `starting` to its end, over as many attempts as it takes.

    Attributes:
        run_dir: The run directory.
        ranks: The ranks, wherever they run.
        report: Receives reports and provides stop requests.
        state: The state last reported.
        stop_level: How firmly the job is being stopped; 0 if it is not.
        unsent: Whether that level's signal must still be sent.
        deadline: When the stop is escalated, on the monotonic clock.
        failed_at: When the first rank failed, on the monotonic clock.
        hang: The reason, if the job was ended because of a hang.
        ended_by_us: Ranks that were ended only because another rank failed.
        rule: Decides whether the job does worse than others of its sweep; None without one.
    """

    run_dir: RunDir
    ranks: Ranks
    report: Report
    state: State = State.STARTING
    saving: str = ""
    stop_level: int = 0
    unsent: bool = False
    deadline: float | None = None
    failed_at: float | None = None
    watch: Watch = field(default_factory=Watch)
    hang: str | None = None
    ended_by_us: set[int] = field(default_factory=set)
    rule: MedianRule | None = None
    _unreported: str | None = None
    _logged: set[str] = field(default_factory=set)
    _housekept_at: float = float("-inf")

    def run(self) -> Outcome:
        """Launch the ranks or adopt an earlier supervisor's, and watch them until the end."""
        try:
            outcome = self.ranks.conclude(self._train())
        except UserError as error:  # for example a job file damaged since submission
            outcome = Outcome(State.FAILED, f"could not start: {error}")
            self.ranks.end_all()
        # a supervisor that dies is replaced, and the replacement would die too
        except Exception as error:
            self.report.log(traceback.format_exc())
            reason = f"its supervisor failed: {type(error).__name__}: {error}"
            outcome = Outcome(State.FAILED, reason)
            self.ranks.end_all()
        self.ranks.leave_if_replaced()
        self._finish(outcome)
        return outcome

    def _train(self) -> Outcome:
        restarts, attempt = 0, self.ranks.adopt()
        while True:
            if attempt is None:
                if self._should_end():
                    self.ranks.end_all()  # left by an interrupted launch
                    return Outcome(State.STOPPED, "stopped before the ranks started")
                self.report.heartbeat(())
                attempt = self.ranks.launch(restarts)
                self.report.log(f"launched {attempt.command}")
            restarts, most = attempt.restarts, attempt.spec.max_restarts
            outcome = self.ranks.reconsider(self._watch(attempt), self._poll_without_ranks)
            attempt = None
            if outcome is None:
                continue
            if not outcome.worth_retrying or restarts >= most or self._should_end():
                return outcome
            restarts += 1
            self._say(State.STARTING, f"restart {restarts} of {most} after: {outcome.reason}")

    def _should_end(self) -> bool:
        return bool(self.ranks.must_end() or self._unfit) or self.report.stop_request() > 0

    @property
    def _unfit(self) -> str:
        """Why the job is stopped for the sake of its sweep; "" if it is not."""
        return self.rule.decided if self.rule is not None else ""

    def _poll_without_ranks(self) -> bool:
        """Report while the ranks have no resources; return whether to stop waiting."""
        self.report.heartbeat(())
        return self._should_end()

    def _watch(self, attempt: Attempt) -> Outcome:
        """Watch an attempt until none of its processes is left."""
        self.watch = Watch(attempt.spec.hang_timeout)
        self.failed_at, self.hang, self.ended_by_us = None, None, set()
        self._logged.clear()
        self.rule = MedianRule.of(self.run_dir, attempt)
        while attempt.alive():
            self.ranks.leave_if_replaced()
            try:
                self._poll(attempt)
            except (OSError, sqlite3.Error, UnreachableError) as error:  # for example a full disk
                self._log_once(f"cannot look after the ranks: {error}", type(error).__name__)
            except Exception as error:  # a bug in monitoring must not end the training either
                self._log_once(f"monitoring failed: {traceback.format_exc()}", type(error).__name__)
            self.ranks.rest(attempt)
        healthy = self.failed_at is None and self.hang is None
        orphaned = self.ranks.clean_up(attempt, healthy=healthy, stop_request=self._note_stop)
        outcome = judge(
            self.run_dir,
            attempt,
            stop_level=self.stop_level,
            hang=self.hang,
            interrupted=orphaned and self.stop_level < 2,
            ended_by_us=self.ended_by_us,
        )
        if self._unfit and outcome.state is State.STOPPED:
            return replace(outcome, reason=f"{outcome.reason}: {self._unfit}", by_rule=True)
        return outcome

    def _note_stop(self) -> int:
        self.stop_level = max(self.stop_level, self.report.stop_request())
        return self.stop_level

    def _poll(self, attempt: Attempt) -> None:
        """Poll the ranks once: track their phases and carry out requests."""
        statuses, unreadable = self.run_dir.read_ranks()
        for name, why in unreadable.items():
            self._log_once(f"cannot read {name}: {why}", name)
        ranks = self._measure(statuses)
        everyone = len(statuses) == world_size(attempt.spec)
        if everyone and all(status.phase not in _STARTING_PHASES for status in statuses):
            self._follow([_SAVING[s.phase] for s in statuses if s.phase in _SAVING])
        self._retry_report()
        self.report.heartbeat(ranks if everyone else ())
        self._carry_out_stops(attempt, ranks)
        self._end_the_stranded(attempt, statuses)
        if everyone:
            self._end_a_hang(attempt, ranks)
        self._housekeep()
        if self.rule is not None and not self.stop_level:
            self.rule.look()

    def _measure(self, statuses: list[RankStatus]) -> list[Stillness]:
        """Measure how long ranks made no progress, minus the time this process was suspended."""
        ranks = self.watch.observe(statuses, time.monotonic())
        if unwatched := self.watch.unwatched:
            self.report.log(f"the supervisor did not run for {unwatched:.0f} s")
            if self.deadline is not None:
                self.deadline += unwatched
            if self.failed_at is not None:
                self.failed_at += unwatched
        return ranks

    def _follow(self, saving: Sequence[str]) -> None:
        """Report the ranks' phase if all are up and the job is not stopping."""
        if self.stop_level:
            return
        if saving and self.state is not State.SAVING:
            self.saving = saving[0]
            self._say(State.SAVING, self.saving)
        elif not saving and self.state is State.SAVING:
            self._say(State.RUNNING, f"finished {self.saving}")
        elif not saving and self.state is State.STARTING:
            self._say(State.RUNNING, "all ranks are up")

    # -- stopping --------------------------------------------------------------------------

    def _carry_out_stops(self, attempt: Attempt, ranks: Sequence[Stillness]) -> None:
        """Carry out stop requests of the user or the backend, and escalate them on timeout.

        Level 1 asks the ranks to stop at the next step boundary, 2 sends them SIGTERM, 3 kills
        everything.
        """
        stop_request, place = self.report.stop_request(), self.ranks.must_end()
        if self._unfit and not place:
            place = f"{self._unfit}: "
        now = time.monotonic()
        if self.deadline is not None and is_saving(ranks):
            # Never cut off a save: saving is the purpose of the stop.
            self.deadline = max(self.deadline, now + SAVE_STEP)
        overdue = stop_request > 0 and self.deadline is not None and now > self.deadline
        level = max(stop_request, int(place != ""), self.stop_level + 1 if overdue else 0)
        if level > self.stop_level:
            self.stop_level, self.unsent = min(level, 3), True
            self._set_deadline(attempt)
            self._say(State.STOPPING, ("" if stop_request else place) + _STOPS[self.stop_level])
        if self.unsent:  # retry, because the target processes may be unknown at first
            try:
                self._send(attempt)
            finally:  # a backend that does not respond may have taken long
                self.watch.restart_interval(time.monotonic())

    def _set_deadline(self, attempt: Attempt) -> None:
        graces = {1: attempt.spec.stop_grace_seconds, 2: TERM_GRACE}
        grace = graces.get(self.stop_level)
        self.deadline = time.monotonic() + grace if grace is not None else None

    def _send(self, attempt: Attempt) -> None:
        try:
            self.run_dir.request("stop")
        except OSError:  # full disk; signals still work
            if self.stop_level == 1:
                raise
        if self.stop_level == 2:
            self.ranks.terminate(attempt)
        elif self.stop_level == 3:
            self.ranks.kill(attempt)
        self.unsent = False
        self._set_deadline(attempt)  # the grace period starts on delivery

    def _end_the_stranded(self, attempt: Attempt, statuses: list[RankStatus]) -> None:
        """End ranks that may wait in a collective until its timeout, after another rank has failed.

        The launcher would give them as long as a save needs, since it cannot tell the two apart.
        """
        failed = {error["rank"] for error in self.run_dir.rank_errors()}
        gone = self.ranks.gone(statuses)
        if self.failed_at is None:
            if failed or self._exited_early(gone, statuses, world_size(attempt.spec)):
                self.failed_at = time.monotonic()
            return
        if time.monotonic() - self.failed_at < FAILURE_GRACE or not (failed or gone):
            return
        stranded = set(range(world_size(attempt.spec))) - gone - failed
        if not stranded:
            return
        if not stranded <= self.ended_by_us:
            self.report.log(f"ending ranks that wait for a failed one: {sorted(stranded)}")
        self.ended_by_us |= stranded
        self.ranks.kill(attempt, stranded)

    def _exited_early(self, gone: set[int], statuses: list[RankStatus], ranks: int) -> bool:
        """Return whether a rank exited before its end phase while another still runs.

        A rank in its end phase may exit long before rank 0, which has more to write. It may have
        reached that phase after `statuses` were read, so the statuses of exited ranks are read
        again; they are final.
        """
        early = gone - {status.rank for status in statuses if status.phase == "end"}
        if not early or len(gone) >= ranks:
            return False
        return not early <= {s.rank for s in self.run_dir.rank_statuses() if s.phase == "end"}

    def _end_a_hang(self, attempt: Attempt, ranks: Sequence[Stillness]) -> None:
        """End a hanging job after every rank has written its stack to its log."""
        if self.hang is not None or self.failed_at is not None or self.stop_level:
            return
        hang = find_hang(ranks, attempt.spec.hang_timeout)
        if hang is None:
            return
        self._log_once(f"hang: {hang.reason}", "hang")
        reason = hang.reason
        with suppress(Exception):  # stacks are optional; end the hang without them if necessary
            self.run_dir.request(FLIGHT)
            self.ranks.dump_stacks([rank.status for rank in ranks])
        with suppress(Exception):
            time.sleep(STACK_DUMP_TIME)
            reason = explain_hang(self.run_dir, hang.reason, self.report.log)
        self.ranks.kill(attempt)
        self.hang = reason

    # -- ending ----------------------------------------------------------------------------

    def _finish(self, outcome: Outcome) -> None:
        for request in (*REQUESTS, FLIGHT):
            with suppress(OSError):
                self.run_dir.clear_request(request)
        self.run_dir.forget_unfinished()
        keep_failure(self.run_dir, outcome.failure)
        self.report.log(f"{outcome.state}: {outcome.reason}")
        self.report.end(outcome)

    def _housekeep(self) -> None:
        """Truncate logs that would fill the disk, and warn before a save fails."""
        if time.monotonic() - self._housekept_at < HOUSEKEEPING_EVERY:
            return
        self._housekept_at = time.monotonic()
        for path in cap_logs(self.run_dir):
            self.report.log(f"{path.name} grew too large; its middle was removed")
        if warning := space_warning(self.run_dir):
            self._log_once(warning, "space")
            if self.state is State.RUNNING:
                self.report.warn(f"warning: {warning}")

    # # -- reporting -------------------------------------------------------------------------

    def _say(self, state: State, reason: str) -> None:
        self.state, self._unreported = state, reason
        self._retry_report()

    def _retry_report(self) -> None:
        """Retry a report that failed, for example because of a full disk."""
        if self._unreported is None:
            return
        try:
            self.report.set_state(self.state, self._unreported)
        except (OSError, sqlite3.Error) as error:
            self._log_once(f"cannot record the state: {error}", "state")
        else:
            self._unreported = None

    def _log_once(self, text: str, what: str = "") -> None:
        """Log a message only once per attempt; polls would repeat it."""
        if (key := what or text) not in self._logged:
            self._logged.add(key)
            self.report.log(text)


# -- how an attempt ended ----------------------------------------------------------------


def judge(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    stop_level: int,
    hang: str | None = None,
    interrupted: bool = False,
    ended_by_us: Collection[int] = (),
) -> Outcome:
    """Determine how an attempt ended, once none of its processes is left.

    Args:
        run_dir: The run directory.
        attempt: The attempt.
        stop_level: The highest requested stop level; 0 if none.
        hang: The reason, if the supervisor ended it because of a hang.
        interrupted: Whether its ranks were healthy but lost their launcher, and were asked to save
            and exit.
        ended_by_us: Ranks that were ended only because another rank failed.
    """
    log = EventLog(run_dir.events, _offset=attempt.events_offset).read_all()
    newest = run_dir.latest_checkpoint()
    resume = f"resume continues after step {newest[0]}" if newest else "no checkpoint"
    if log.end_reason == "completed":
        return Outcome(State.COMPLETED, f"trained {newest[0] if newest else 0} steps")
    if log.end_reason == "stopped" and (stop_level or not interrupted):
        # Ranks that were training have saved; ranks that were still preparing had nothing to save.
        where = f"at step {newest[0]}, saved" if newest else "before the first step"
        if not stop_level and (sent := launcher_signal(run_dir)):
            return Outcome(State.STOPPED, f"someone sent {sent} to the launcher; stopped {where}")
        return Outcome(State.STOPPED, f"stopped {where}")
    if stop_level >= 2:
        word = "SIGTERM" if stop_level == 2 else "SIGKILL"
        return Outcome(State.STOPPED, f"ended by {word}; {resume}")
    errors = run_dir.rank_errors()
    if stop_level == 1 and not log.steps and not errors:
        return Outcome(State.STOPPED, "stopped before the first step")
    if hang is not None:
        failure = Failure(f"hang: {hang}; stacks are in logs/rank*.log", Cause.HANG)
        return Outcome(State.FAILED, failure.text, True, failure)
    if attempt.child is None and not errors and not rank_exits(run_dir):
        what = "the launcher was killed" if interrupted else "all processes were killed"
        if sent := launcher_signal(run_dir):
            what = f"someone sent {sent} to the launcher, which ended the ranks"
        return Outcome(State.LOST, f"{what}; {resume}", True)
    failure = diagnose(
        run_dir,
        attempt.exit_code,
        ended_by_us=ended_by_us,
        oom_kills_before=attempt.oom_kills,
    )
    reason = f"{failure.text}; {resume}" if interrupted else failure.text
    return Outcome(State.FAILED, reason, not is_user_error(run_dir), failure)
