"""Derive the state of a job from what Slurm and the job's warden report. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.backends.slurm.records import Allocation
from jobs.queue.states import State

if TYPE_CHECKING:
    from jobs.backends.slurm.commands import Listed
    from jobs.backends.slurm.records import WardenReport

# seconds for which Slurm may not know a job before the job counts as lost
UNKNOWN_FOR: Final = 60.0
PENDING_UNKNOWN_FOR: Final = 300.0  # the same for a waiting job, which has nothing to lose yet
AGE: Final = "; Slurm has not responded for "
_WAITING: Final = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_RUNNING: Final = frozenset({"RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT"})
_PAUSED: Final = frozenset({"SUSPENDED", "STOPPED"})
ALIVE: Final = _WAITING | _RUNNING | _PAUSED | {"COMPLETING"}
LOST: Final = {
    "TIMEOUT": "the time limit ended the job",
    "DEADLINE": "the deadline ended the job",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "the job was preempted",
    "REVOKED": "Slurm moved the job to another cluster",
}
LAUNCH_FAILED: Final = "JobLaunchFailure"  # a reason that comes with FAILED
# Slurm's reasons for waiting that need an explanation.
_WHY: Final = {
    "Priority": "other jobs go first",
    "Resources": "waiting for free nodes",
    "JobHeldUser": "held by you; `scontrol release` lets it start",
    "JobHeldAdmin": "held by an administrator",
    "BeginTime": "waiting for its earliest start",
    "PartitionDown": "the partition is down",
    "PartitionTimeLimit": "slurm_time is more than the partition allows",
    "PartitionNodeLimit": "num_machines is more than the partition allows",
    "QOSMaxJobsPerUserLimit": "your limit of running jobs is reached",
    "AssocMaxJobsLimit": "your account's limit of running jobs is reached",
    "AssocGrpGRES": "your account's limit of GPUs is reached",
    "QOSMaxGRESPerUser": "your limit of GPUs is reached",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
}


class Verdict(NamedTuple):
    """A job's state and the sentence displayed with it."""

    state: State
    reason: str


@dataclass(frozen=True)
class Facts:
    """The facts that determine a job's state.

    Attributes:
        id: Slurm's job id.
        listed: The job in Slurm's latest list; None if the list lacks it.
        silent: Seconds since Slurm last answered; None if it answers.
        missing: Seconds for which Slurm's lists have lacked the job.
        gone: Whether Slurm says that it does not know the job.
        warden: The warden's latest report.
        fresh: Whether that report changed within the last minute, by this process's clock.
        outcome: The outcome, if a warden reported one.
        stopping: Whether the user asked it to stop.
        saved: Step of its newest checkpoint; None if there is none.
        log: Last line of the batch script's log.
    """

    id: str
    listed: Listed | None
    silent: float | None = None
    missing: float = 0.0
    gone: bool = False
    warden: WardenReport | None = None
    fresh: bool = False
    outcome: WardenReport | None = None
    stopping: bool = False
    saved: int | None = None
    log: str = ""


def settle(now: Verdict, facts: Facts) -> Verdict:
    """Return the state of a submitted job.

    Args:
        now: The recorded state.
        facts: What is known.
    """
    if facts.silent is not None:
        return Verdict(now.state, f"{base(now.reason)}{AGE}{age(facts.silent)}")
    now = Verdict(now.state, base(now.reason))
    listed = facts.listed
    if listed is None:
        return _unknown(now, facts)
    if listed.state in _WAITING:
        if facts.stopping:
            return now  # it is being removed from Slurm's queue
        return Verdict(State.QUEUED, waits(listed))
    if listed.state in _RUNNING:
        return _running(now, facts, listed)
    if listed.state in _PAUSED:
        return Verdict(_alive(now), f"Slurm has suspended job {facts.id}")
    if listed.state == "COMPLETING":
        return now
    return _ended(facts, listed)


def waits(listed: Listed) -> str:
    """Return why a job waits, as a sentence."""
    code = listed.reason.strip("()").partition(",")[0]
    parts = [f"Slurm job {listed.id}"]
    if code:
        parts.append(_WHY.get(code, listed.reason.replace("_", " ")))
    if listed.place:
        parts.append(f"place {listed.place}")
    if listed.starts:
        parts.append(f"expected to start {listed.starts.replace('T', ' ')[:16]}")
    if listed.restarts:
        parts.append(f"requeued {listed.restarts} time{'s' * (listed.restarts > 1)}")
    return ": ".join([parts[0], "; ".join(parts[1:])]) if len(parts) > 1 else f"{parts[0]} waits"


def age(seconds: float) -> str:
    """Format a rounded duration that changes rarely: `20 s`, `3 min`, `2 h`."""
    if seconds < 60:
        return f"{max(10, round(seconds / 10) * 10)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def base(reason: str) -> str:
    """Return a reason without the age of the information."""
    return reason.partition(AGE)[0]


def of_allocation(report: WardenReport | None, allocation: Allocation) -> WardenReport | None:
    """Return a warden's report if it belongs to this allocation, else None."""
    return report if report is not None and report.allocation == allocation else None


def _allocation(facts: Facts) -> Allocation:
    return Allocation(facts.id, facts.listed.restarts if facts.listed is not None else 0)


def _running(now: Verdict, facts: Facts, listed: Listed) -> Verdict:
    mine = _allocation(facts)
    report = of_allocation(facts.outcome, mine) or of_allocation(facts.warden, mine)
    if report is None:
        on = f" on {listed.nodes}" if listed.nodes else ""
        return Verdict(State.STARTING, f"Slurm job {facts.id} starts{on}")
    if report.state.ended:
        return now  # the allocation is about to end, and Slurm will report how
    return Verdict(report.state, report.reason)


def _ended(facts: Facts, listed: Listed) -> Verdict:
    report = of_allocation(facts.outcome, _allocation(facts))
    if report is not None:
        return Verdict(report.state, report.reason)
    state = listed.state
    if state == "CANCELLED" or (facts.stopping and state in LOST):
        return Verdict(State.STOPPED, f"stopped; {_resume(facts)}")
    if state in LOST:
        return Verdict(State.LOST, f"{LOST[state]}; {_resume(facts)}")
    if listed.reason == LAUNCH_FAILED:
        return Verdict(State.LOST, f"a node could not start the job; {_resume(facts)}")
    if state == "OUT_OF_MEMORY":
        what = "a node ran out of memory; ask for more with slurm_extra_args: --mem=…"
        return Verdict(State.FAILED, what)
    if state == "COMPLETED":
        return Verdict(State.FAILED, f"the batch script ended without a result{_last(facts)}")
    why = f" ({listed.reason})" if listed.reason not in ("", "NonZeroExitCode") else ""
    return Verdict(State.FAILED, f"the batch script failed{why}{_last(facts)}")


def _unknown(now: Verdict, facts: Facts) -> Verdict:
    """Return the state of a job that Slurm does not list; it forgets jobs some minutes after their
    end.
    """
    if facts.outcome is not None and facts.outcome.allocation.id == facts.id:
        newer = facts.warden is not None and (
            facts.warden.allocation.id == facts.id
            and facts.warden.allocation.restart > facts.outcome.allocation.restart
        )
        if not newer:
            return Verdict(facts.outcome.state, facts.outcome.reason)
    patience = PENDING_UNKNOWN_FOR if now.state is State.QUEUED else UNKNOWN_FOR
    if facts.fresh or facts.missing < patience:
        return now
    if not facts.gone:
        return Verdict(now.state, f"Slurm's list does not have job {facts.id}; asking again")
    if facts.stopping:
        return Verdict(State.STOPPED, f"stopped; {_resume(facts)}")
    return Verdict(State.LOST, f"Slurm no longer knows job {facts.id}; {_resume(facts)}")


def _alive(now: Verdict) -> State:
    return now.state if now.state.active else State.STARTING


def _resume(facts: Facts) -> str:
    return f"resume continues after step {facts.saved}" if facts.saved else "no checkpoint"


def _last(facts: Facts) -> str:
    return f": {facts.log}" if facts.log else "; see logs/supervisor.log"
