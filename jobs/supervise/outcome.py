"""How an attempt ended, from what it left behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.queue.states import State
from jobs.run.diagnosis.rank_exits import launcher_signal, rank_exits
from jobs.run.diagnosis.why_failed import diagnose, is_persons_fault
from jobs.run.eventlog import EventLog
from jobs.run.failure import Cause, Failure

if TYPE_CHECKING:
    from collections.abc import Collection

    from jobs.run.rundir import RunDir
    from jobs.supervise.attempt import Attempt


@dataclass(frozen=True)
class Outcome:
    """The state after an attempt, the reason, and whether a restart could help."""

    state: State
    reason: str
    worth_retrying: bool = False
    failure: Failure | None = None


def judge(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    stop_level: int,
    hang: str | None = None,
    interrupted: bool = False,
    ended_by_us: Collection[int] = (),
) -> Outcome:
    """Decide how an attempt ended; no process of it is left.

    Args:
        run_dir: Where its ranks wrote.
        attempt: The attempt.
        stop_level: The highest stop level requested; 0: none.
        hang: The reason, if the supervisor ended it because of a hang.
        interrupted: Its ranks were healthy but lost their launcher, and were asked to save and end.
        ended_by_us: Ranks that were ended only because another one had failed.
    """
    log = EventLog(run_dir.events, _offset=attempt.events_offset).read_all()
    newest = run_dir.latest_checkpoint()
    resume = f"resume continues after step {newest[0]}" if newest else "no checkpoint"
    if log.end_reason == "completed":
        return Outcome(State.COMPLETED, f"trained {newest[0] if newest else 0} steps")
    if log.end_reason == "stopped" and (stop_level or not interrupted):
        # Ranks that trained have saved; those that still prepared had nothing to save.
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
    return Outcome(State.FAILED, reason, not is_persons_fault(run_dir), failure)
