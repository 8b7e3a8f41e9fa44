"""Submit jobs to Slurm, and keep the database consistent with it.

One process per state directory queries Slurm, once for all jobs; all others read the answer it
saved. Nothing is lost while it is not running: the next one starts from the run directories.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.backends.slurm import commands, records
from jobs.backends.slurm.hand_in import find, submit_once
from jobs.backends.slurm.settle import ALIVE, Facts, Verdict, age, settle
from jobs.errors import SpecError, UserError
from jobs.hub.wanted import forget, why_waiting
from jobs.machine import file_lock
from jobs.notify import Announcer
from jobs.queue.job import why_after
from jobs.queue.job_list import JobList, keep_summary
from jobs.queue.states import PAUSED, State
from jobs.run.rundir import read_tail, write_atomic
from jobs.spec.file.load import load_spec
from jobs.supervise.port import UnreachableError
from jobs.trackers import start_push
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs.backends.slurm.commands import Listed, Waiting
    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir


# -- places ---------------------------------------------------------------------------------
# Facts that Slurm's job list lacks: queue positions of waiting jobs, and jobs missing from the
# list.
#
# A list may lack a job for many reasons (another cluster's controller, a filter, a broken answer).
# A missing job is therefore queried by its id, and only "Invalid job id" means that it is gone.


EVERY: Final = 60.0  # seconds between queries, whose answers are as long as the cluster's queue
_SOON: Final = 15.0  # the same while the position of one of our jobs is unknown
# Jobs that wait for something other than a free node do not delay others.
_NOT_COMPETING: Final = ("JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime")


@dataclass
class QueuePositions:
    """Cache the queue positions of our jobs between queries; query nothing while none waits."""

    _asked_at: float = float("-inf")
    _by_id: dict[str, str] = field(default_factory=dict)

    def with_positions(self, listed: Mapping[str, Listed], now: float) -> dict[str, Listed]:
        """Add the queue positions to the listed jobs.

        Args:
            listed: Our jobs, by id.
            now: Seconds on a monotonic clock.
        """
        waiting = {job.id for job in listed.values() if job.state == "PENDING"}
        all_placed = waiting <= self._by_id.keys()
        if waiting and now - self._asked_at >= (EVERY if all_placed else _SOON):
            self._asked_at = now
            with suppress(UnreachableError, UserError):  # keep the previous answer
                answer = queue_positions(commands.waiting())
                self._by_id = {slurm_id: answer.get(slurm_id, "") for slurm_id in waiting}
        return {
            job.id: replace(job, place=self._by_id.get(job.id, "")) if job.id in waiting else job
            for job in listed.values()
        }


def queue_positions(waiting: Iterable[Waiting]) -> dict[str, str]:
    """Return job id → text such as `3 of 41 in gpu`, by priority, in the job's first partition."""
    queues: dict[str, list[Waiting]] = {}
    for job in waiting:
        if not job.reason.startswith(_NOT_COMPETING):
            for name in job.partitions:
                queues.setdefault(name, []).append(job)
    texts = {}
    for name, queue in queues.items():
        # At equal priority, Slurm takes the job that was submitted first.
        queue.sort(key=lambda job: (-job.priority, len(job.id), job.id))
        for place, job in enumerate(queue, start=1):
            if job.partitions[0] == name:
                texts[job.id] = f"{place} of {len(queue)} in {name}"
    return texts


ASK_AFTER: Final = 10.0  # seconds for which a job is missing before it is queried
_ASK_EVERY: Final = 15.0  # seconds between two queries for one job
_MAX_QUERIES: Final = 20  # queries per window, so that not all of 1,000 jobs are queried at once
_WINDOW: Final = 60.0  # seconds


@dataclass
class _Absence:
    since: float
    asked_at: float = float("-inf")
    gone: bool = False


@dataclass
class MissingJobs:
    """Jobs missing from Slurm's list, by job name. Times are monotonic seconds.

    Not keyed by id: a controller that has lost its newest jobs assigns their ids again.
    """

    _pending_downloads: dict[str, _Absence] = field(default_factory=dict)
    _asked: list[float] = field(default_factory=list)

    def look(
        self, record: records.Submission, listed: Listed | None, now: float, *, other: bool
    ) -> tuple[float, bool]:
        """Note whether Slurm's list has a job, and query a missing job by its id when due.

        Args:
            record: The Slurm job.
            listed: Its entry in the list, if any.
            now: Monotonic seconds.
            other: Whether its id now belongs to another job.

        Returns:
            For how long it has been missing, and whether Slurm says that the id is invalid.
        """
        if listed is not None:
            self._pending_downloads.pop(record.name, None)
            return 0.0, False
        absence = self._pending_downloads.setdefault(record.name, _Absence(now))
        missing = now - absence.since
        if other:
            return missing, True
        self._asked = [t for t in self._asked if now - t < _WINDOW]
        due = missing >= ASK_AFTER and now - absence.asked_at >= _ASK_EVERY
        if due and len(self._asked) < _MAX_QUERIES:
            absence.asked_at = now
            self._asked.append(now)
            with suppress(UnreachableError):
                absence.gone = commands.state_of(record.id) == ""
        return missing, absence.gone


# -- keeper ---------------------------------------------------------------------------------


ASK_EVERY: Final = 15.0  # seconds between two queries to Slurm
ASK_SOON: Final = 2.0  # the same after an action and while a change is expected
BACK_WITHIN: Final = 10.0  # seconds for Slurm to requeue a preempted job
FRESH: Final = 60.0  # seconds within which a live warden writes a report


@dataclass
class _Seen:
    """What this process last saw of a job, by its own clock."""

    announcer: Announcer
    warden: records.WardenReport | None = None
    beaten_at: float = 0.0
    preempted_at: float | None = None
    waits: tuple[Job, Listed, str] | None = None  # settled until one of these changes


@dataclass
class Keeper:
    """Manage all Slurm jobs of a state directory.

    Attributes:
        store: The jobs.
        ask_every: Seconds between two queries to Slurm.
    """

    store: Store
    ask_every: float = ASK_EVERY
    _listed: dict[str, Listed] = field(default_factory=dict)
    _places: QueuePositions = field(default_factory=QueuePositions)
    _answered_at: float | None = None
    _unreachable_since: float | None = None
    _asked_at: float = float("-inf")
    _poll_soon: bool = True
    _missing: MissingJobs = field(default_factory=MissingJobs)
    _seen: dict[int, _Seen] = field(default_factory=dict)
    # new reasons of waiting jobs, written in one batch
    _reasons: dict[int, str] = field(default_factory=dict)
    _rows: JobList = field(init=False)

    def __post_init__(self) -> None:
        self._rows = JobList(self.store)

    def look(self) -> bool:
        """Submit waiting jobs, carry out stops, query Slurm when due, and update every job.

        Returns:
            Whether there are any jobs to manage.
        """
        jobs = [
            job for job in self._rows.look() if not job.state.ended and job.backend == records.NAME
        ]
        jobs.sort(key=lambda job: (-job.priority, job.queued, job.id))  # the queue's order
        if not jobs:
            return False
        now = time.monotonic()
        pause = ASK_SOON if self._poll_soon or self._expects_change(jobs) else self.ask_every
        if now - self._asked_at >= min(pause, self.ask_every):
            self._ask(now)
            self._cancel_strays(jobs)
        for job in jobs:
            try:
                if not self._still_waits(job):
                    self._update(job, paused=self._rows.paused)
            except UnreachableError as error:
                self._note_unreachable(str(error))
            except (OSError, ValueError, UserError) as error:
                _say(f"job {job.id}: {error}")
        if self._reasons:
            self.store.explain_all(self._reasons)
        self._reasons = {}
        self._seen = {job.id: self._seen[job.id] for job in jobs if job.id in self._seen}
        return True

    def _ask(self, now: float) -> None:
        self._asked_at, self._poll_soon = now, False
        try:
            self._listed = self._places.with_positions(commands.queue(), now)
        except (UnreachableError, UserError) as error:
            self._note_unreachable(str(error))
        else:
            if self._unreachable_since is not None:
                _say("Slurm responds again")
            self._answered_at, self._unreachable_since = time.monotonic(), None
        self._save_answer()

    def _note_unreachable(self, why: str) -> None:
        if self._unreachable_since is None:
            _say(f"Slurm does not respond: {why}")
            self._unreachable_since = time.monotonic()

    def _save_answer(self) -> None:
        """Save Slurm's answer for processes that only read it."""
        answer = {
            "t": time.time(),
            "age": None if self._answered_at is None else time.monotonic() - self._answered_at,
            "jobs": {job.id: vars(job) for job in self._listed.values()},
        }
        with suppress(OSError):
            write_atomic(self.store.home / records.KEPT, json.dumps(answer) + "\n")

    def _expects_change(self, jobs: list[Job]) -> bool:
        """Return whether a warden has reported a job's end that Slurm has not reported yet."""
        return any(
            (outcome := records.read_warden_report(records.outcome_file(job.run_dir))) is not None
            and outcome.state.ended
            for job in jobs
            if job.state.active
        )

    def _cancel_strays(self, jobs: list[Job]) -> None:
        """Cancel jobs that Slurm accepted although `sbatch` failed, if they were resubmitted."""
        names = Counter(listed.name for listed in self._listed.values() if not _has_ended(listed))
        twice = {name for name, count in names.items() if count > 1}
        for job in jobs if twice else ():
            record = records.read_submission(job.run_dir, job.attempt)
            if record is None or not record.id or record.name not in twice:
                continue
            for listed in self._listed.values():
                if listed.name == record.name and listed.id != record.id and not _has_ended(listed):
                    _say(f"job {job.id} is Slurm job {record.id}; cancelling {listed.id}")
                    with suppress(UnreachableError):
                        commands.cancel(listed.id)

    # -- one job ---------------------------------------------------------------------------

    def _still_waits(self, job: Job) -> bool:
        """Return whether a job waits unchanged since the last poll; nearly all of 1,000 jobs do."""
        seen = self._seen.get(job.id)
        if seen is None or seen.waits is None:
            return False
        row, listed, silence = seen.waits
        same = row == job and self._listed.get(listed.id) == listed
        return same and silence == self._silence()

    def _silence(self) -> str:
        """Return for how long Slurm has not responded, as displayed; "" if it responds."""
        if self._unreachable_since is None:
            return ""
        return age(time.monotonic() - (self._answered_at or self._unreachable_since))

    def _update(self, job: Job, *, paused: bool) -> None:
        record = records.read_submission(job.run_dir, job.attempt)
        if record is None or not record.id:
            if job.state is not State.QUEUED:
                return
            if job.stop_level:
                self._stop_unknown(job, record)
            elif job.passed_over or paused:
                why = "held until released" if job.held else why_after(job) or PAUSED
                self._explain(job, why)
            elif absent := self._pending_downloads(job):
                self._explain(job, absent)
            elif self._unreachable_since is None and self._answered_at is not None:
                try:
                    self._submit(job, record)
                except SpecError as error:
                    reason = f"cannot be handed in to Slurm: {error}"
                    self.store.change(job.id, State.FAILED, reason, only_from={State.QUEUED})
            else:
                self._explain(job, "Slurm does not respond; the job is handed in later")
            return
        listed, other = self._listed.get(record.id), False
        if listed is not None and listed.name != record.name:
            # A controller that was killed lost its newest jobs and assigned their ids again. Our
            # job is gone, and this one is not ours to judge or cancel.
            listed, other = None, True
        facts = self._facts(job, record, listed, other=other)
        if job.stop_level and self._must_cancel(job, listed):
            commands.cancel(record.id)
            self._poll_soon = True
        verdict = settle(Verdict(job.state, job.reason), facts)
        if not self._is_final(job, verdict, listed):
            return
        preempted = listed is not None and listed.state == "PREEMPTED"
        if verdict.state is State.LOST and preempted:
            commands.cancel(record.id)  # otherwise Slurm may still requeue it
        if job.state is verdict.state is State.QUEUED:
            self._explain(job, verdict.reason)
            if job.reason == verdict.reason and not job.stop_level and listed is not None:
                self._seen[job.id].waits = job, listed, self._silence()
            return
        if move(self.store, job, verdict):
            _say(f"job {job.id}: {verdict.state}: {verdict.reason}")
            if verdict.state in (State.RUNNING, State.COMPLETED):
                self._push(job)
            if verdict.state.ended:
                self._end(job, record, verdict, facts)

    def _explain(self, job: Job, reason: str) -> None:
        if job.reason != reason:
            self._reasons[job.id] = reason

    def _facts(
        self, job: Job, record: records.Submission, listed: Listed | None, *, other: bool
    ) -> Facts:
        now, seen = time.monotonic(), self._seen_of(job)
        warden = records.read_warden_report(records.warden_file(job.run_dir))
        if warden != seen.warden:
            seen.warden, seen.beaten_at = warden, now
            if warden is not None and warden.allocation.id == record.id:
                seen.announcer.check_stall(warden.still)
        silent, missing, gone = None, 0.0, False
        if self._unreachable_since is not None:
            silent = now - (self._answered_at or self._unreachable_since)
        else:
            missing, gone = self._missing.look(record, listed, now, other=other)
        newest = job.run_dir.latest_checkpoint() if listed is None or _has_ended(listed) else None
        mine = warden is not None and warden.allocation.id == record.id
        return Facts(
            id=record.id,
            listed=listed,
            silent=silent,
            missing=missing,
            gone=gone,
            warden=warden,
            fresh=mine and now - seen.beaten_at < FRESH,
            outcome=records.read_warden_report(records.outcome_file(job.run_dir)),
            stopping=job.stop_level > 0,
            saved=newest[0] if newest else None,
            log=_last_line(job.run_dir) if listed is not None and _has_ended(listed) else "",
        )

    def _seen_of(self, job: Job) -> _Seen:
        if job.id not in self._seen:
            self._seen[job.id] = _Seen(Announcer(job, _say))
        return self._seen[job.id]

    def _must_cancel(self, job: Job, listed: Listed | None) -> bool:
        """Return whether Slurm must end it: it waits there, or the user wants it killed."""
        if listed is None or _has_ended(listed):
            return False
        return job.stop_level >= 3 or listed.state not in ("RUNNING", "COMPLETING")

    def _is_final(self, job: Job, verdict: Verdict, listed: Listed | None) -> bool:
        """Return whether an end is final; a preempted job may be requeued a moment later."""
        seen = self._seen_of(job)
        if verdict.state is not State.LOST or listed is None or listed.state != "PREEMPTED":
            if self._unreachable_since is None:
                seen.preempted_at = None
            return True
        self._poll_soon = True
        if seen.preempted_at is None:
            seen.preempted_at = time.monotonic()
        return time.monotonic() - seen.preempted_at >= BACK_WITHIN

    # # -- submission ------------------------------------------------------------------------

    def _submit(self, job: Job, record: records.Submission | None) -> None:
        handed = submit_once(self.store, job, record)
        if handed is None:
            return
        self._seen.pop(job.id, None)
        _say(f"job {job.id} is Slurm job {handed.id}")
        if handed.id not in self._listed:
            self.store.explain(job.id, f"Slurm job {handed.id}: handed in")
            self._poll_soon = True
        if self.store.get(job.id).state.ended:  # removed from the queue in the meantime
            commands.cancel(handed.id)

    def _pending_downloads(self, job: Job) -> str:
        """Return which hub files this machine still downloads for the job; "" if none."""
        reason, failed = why_waiting(job.run_dir)
        if failed and self.store.change(job.id, State.FAILED, reason, only_from={State.QUEUED}):
            forget(job.run_dir)
        return reason

    def _stop_unknown(self, job: Job, record: records.Submission | None) -> None:
        """Stop a job for which `sbatch` did not say whether Slurm accepted it."""
        with open(job.run_dir.root / ".handing-in", "a") as lock:
            if not file_lock.acquire(lock):
                return
            if self._unreachable_since is None:  # an answer from before sbatch ended proves nothing
                self._ask(time.monotonic())
            if self._unreachable_since is not None:
                self._explain(job, "Slurm does not respond; the job is stopped later")
            elif record is not None and (slurm_id := find(record, self._listed)):
                records.write_submission(job.run_dir, replace(record, id=slurm_id))
                self._seen.pop(job.id, None)
                self._poll_soon = True  # it is then stopped like any other
            else:
                reason = "removed from the queue"
                self.store.change(job.id, State.STOPPED, reason, only_from={State.QUEUED})

    # -- the end ---------------------------------------------------------------------------

    def _end(self, job: Job, record: records.Submission, verdict: Verdict, facts: Facts) -> None:
        ended = self.store.get(job.id)
        Announcer(ended, _say).announce_end(verdict.state, verdict.reason)
        with suppress(Exception):  # readers build a missing summary themselves
            keep_summary(self.store, ended)
        lost = verdict.state is State.LOST
        if lost and job.auto_resume and not job.stop_level and self._should_resume(record, facts):
            self.store.requeue(job.id, f"resumed after: {verdict.reason}")

    def _push(self, job: Job) -> None:
        """Push exports from here, where there is a network. A running push is not started twice."""
        try:
            start_push(load_spec(job.run_dir.job_file), job)
        except (OSError, UserError) as error:
            _say(f"job {job.id}: cannot push its exports: {error}")

    def _should_resume(self, record: records.Submission, facts: Facts) -> bool:
        """Return whether to resume; not if allocations are too short to reach a new checkpoint."""
        outside = facts.listed is not None and facts.listed.state not in ("TIMEOUT", "DEADLINE")
        return outside or (facts.saved or 0) > record.step


def _has_ended(listed: Listed) -> bool:
    """Return whether Slurm has finished with the job."""
    return listed.state not in ALIVE


def _last_line(run_dir: RunDir) -> str:
    """Return the last line of the batch script's log; "" if the warden wrote it.

    The warden's lines begin with a time.
    """
    lines = read_tail(run_dir.supervisor_log, 4096).splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "")
    return "" if last[:2].isdecimal() or "slurmstepd" in last else one_line(last)[:300]


def move(store: Store, job: Job, to: Verdict) -> bool:
    """Move a job to its state in Slurm; return whether anything changed.

    It may have passed through states between two polls that were not observed.
    """
    if (job.state, job.reason) == (to.state, to.reason):
        return False
    now = store.get(job.id)
    if now.state.ended or (now.state, now.reason) == (to.state, to.reason):
        return False
    stopping = now.state is State.STOPPING and now.stop_level > 0
    if now.state is to.state or (stopping and not to.state.ended):
        store.explain(job.id, to.reason, now.state)
        return True
    queued = now.state is State.QUEUED
    if now.state is State.STOPPING and not (to.state.ended or to.state is State.QUEUED):
        store.change(job.id, State.QUEUED, "put back by Slurm")
        queued = True
    if queued and to.state not in (State.STARTING, State.STOPPED):
        store.change(job.id, State.STARTING, "started by Slurm")
    store.change(job.id, to.state, to.reason)
    return True


def _say(text: str) -> None:
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), f"[{os.getpid()}]", text, flush=True)
