"""Move the queue: start what may start, and give every running job a supervisor.

Whoever submits, resumes, looks, or ends a job calls `dispatch`, and the runner does when nobody
else would; a file lock makes one caller at a time decide.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from jobs.backends.local.placement import Request, Start, place
from jobs.errors import UserError
from jobs.hub.wanted import forget, why_waiting
from jobs.machine import devices, file_lock, processes
from jobs.machine.procfs import is_waiting_for_kernel, switches
from jobs.machine.residence import Standing, standing_of
from jobs.machine.start_detached import start_detached
from jobs.queue.job import LOCAL, why_after
from jobs.queue.states import ACTIVE, PAUSED, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from jobs.machine.processes import ProcessId
    from jobs.queue.store import Job, Store

_SUPERVISOR_STARTS_WITHIN: Final = 20.0  # seconds
_SUSPENDED: Final = "is suspended and does not respond"
_BLOCKED: Final = "is blocked in the kernel, for example by a disk that does not respond"
_BLOCKED_FOR: Final = 10.0  # seconds without a step after which a wait is unusual
_KILLED_WITHIN: Final = 1.0  # seconds
_QUEUE_IS_FREE_WITHIN: Final = 1.5  # seconds; whoever holds it needs milliseconds
_LONGEST_PID: Final = 20  # characters


def dispatch(store: Store) -> None:
    """Start every queued job that may start now, and replace supervisors that are gone.

    Waits for another process that holds the queue; if that one does not finish, queued jobs name
    it as the reason they wait.
    """
    # Before the queue is locked: a driver that does not answer blocks only its caller.
    asked = not store.paused and any(
        job.wanted is not None and not job.passed_over for job in _ours(store, [State.QUEUED])
    )
    present = devices.gpus() if asked else []
    with _one_at_a_time(store) as free:
        if not free:
            return
        _mend(store)
        queue = _ours(store, [State.QUEUED])
        if not queue:
            return
        paused = store.paused
        reasons = {job.id: why_after(job) for job in queue if job.blockers}
        reasons |= {job.id: "held until released" for job in queue if job.held}
        absent = _find_absent(store, queue)
        if paused:
            reasons = {job.id: PAUSED for job in queue} | reasons
        # The process that queued a GPU job since then dispatches it.
        ready = [
            job
            for job in queue
            if not (job.passed_over or paused or job.id in absent) and (asked or job.wanted is None)
        ]
        gpus = [gpu for gpu in present if gpu.unusable is None]
        claims = store.claims()
        indices = {gpu.uuid: gpu.index for gpu in gpus}
        active = _ours(store, ACTIVE)
        decisions = place(
            [Request(job.id, job.wanted, job.shares) for job in ready],
            claims,
            list(indices),
            [job.id for job in active if job.wanted is None],
            cpu_slots=cpu_slots(),
            # A claimed GPU is never foreign: its claim is kept until its ranks are gone.
            foreign=devices.foreign_users(gpus, (), claims),
            indices=indices,
        )
        for job, decision in zip(ready, decisions, strict=True):
            if not isinstance(decision, Start):
                reasons[job.id] = decision.reason
            elif store.claim(job.id, decision.gpus, _where(decision, indices), job):
                _start_supervisor(store.get(job.id))
        store.explain_all(absent | reasons)


def _find_absent(store: Store, queue: Sequence[Job]) -> dict[int, str]:
    """Return the jobs whose model or data is absent, and why; fail those that cannot get it."""
    waiting = {}
    for job in queue:
        try:
            reason, failed = why_waiting(job.run_dir)
        except (UserError, OSError) as error:
            reason, failed = f"its model cannot be fetched: {error}", False
        if not reason:
            continue
        waiting[job.id] = reason
        if failed and store.change(job.id, State.FAILED, reason, only_from={State.QUEUED}):
            forget(job.run_dir)
    return waiting


def _ours(store: Store, states: Iterable[State]) -> list[Job]:
    return [job for job in store.in_states(states) if job.backend == LOCAL]


def look(store: Store) -> bool:
    """Dispatch if there are any jobs; return whether there are."""
    if not _ours(store, [State.QUEUED, *ACTIVE]):
        return False
    dispatch(store)
    return True


def needs_attention(store: Store) -> bool:
    """Whether a `dispatch` could change anything; cheap enough to ask every second."""
    return any(
        job.state is State.QUEUED or _needs_mending(job, standing_of(job.boot_id, store.home))
        for job in _ours(store, [State.QUEUED, *ACTIVE])
    )


def _mend(store: Store) -> None:
    """Give jobs without a supervisor a new one; mark jobs of an earlier boot as lost.

    Those that live elsewhere are judged there.
    """
    for job in _ours(store, ACTIVE):
        standing = standing_of(job.boot_id, store.home)
        if standing is Standing.ELSEWHERE:
            continue
        if standing is Standing.REBOOTED:
            lost = store.change(job.id, State.LOST, "the machine rebooted", only_from=ACTIVE)
            if lost and job.auto_resume and not job.stop_level:
                store.requeue(job.id, "resumed after a reboot")
        elif _unsupervised(job):
            _start_supervisor(job)
        elif job.supervisor is not None and (why := why_silent(job.supervisor)):
            _do_without(store, job, job.supervisor, why)
        elif _told_as_silent(job):
            store.explain(job.id, "all ranks are up", State.RUNNING)


def _do_without(store: Store, job: Job, supervisor: ProcessId, why: str) -> None:
    """Report a supervisor that does not respond, and replace it if the job needs one.

    Otherwise a job whose ranks are gone would still be shown as running.
    """
    try:
        running = bool(processes.with_run_id(job.run_id))
    except OSError:  # the kernel does not say
        running = True
    if job.stop_level or not running:
        processes.end([supervisor], grace=0, timeout=_KILLED_WITHIN)
        if supervisor.is_dead():
            _start_supervisor(job)
        return
    store.explain(job.id, _silent(supervisor, why), State.RUNNING)


def why_silent(supervisor: ProcessId) -> str:
    """Say why a live supervisor does not respond; "" if it does.

    A supervisor counts as blocked when it waits for the kernel and has not run for `_BLOCKED_FOR`
    seconds; repeated calls notice that. A short wait is normal.
    """
    if supervisor.suspended():
        return _SUSPENDED
    if not is_waiting_for_kernel(supervisor.pid):
        _blocked.pop(supervisor, None)
        return ""
    count, now = switches(supervisor.pid), time.monotonic()
    before, since = _blocked.setdefault(supervisor, (count, now))
    if before != count:
        _blocked[supervisor] = count, now
        return ""
    return _BLOCKED if now - since >= _BLOCKED_FOR else ""


_blocked: dict[ProcessId, tuple[int | None, float]] = {}  # its switches, and since when


def _silent(supervisor: ProcessId, why: str) -> str:
    return f"its supervisor (process {supervisor.pid}) {why}; its ranks keep running"


def _told_as_silent(job: Job) -> bool:
    supervisor = job.supervisor
    if supervisor is None:
        return False
    return job.reason in (_silent(supervisor, _SUSPENDED), _silent(supervisor, _BLOCKED))


def _needs_mending(job: Job, standing: Standing) -> bool:
    if standing is not Standing.HERE:
        return standing is Standing.REBOOTED and job.state.active
    return (
        _unsupervised(job)
        or _told_as_silent(job)
        or (job.state.active and job.supervisor is not None and bool(why_silent(job.supervisor)))
    )


def _unsupervised(job: Job) -> bool:
    if not job.state.active:
        return False
    if job.supervisor is not None:
        return job.supervisor.is_dead()
    return time.time() - (job.started or 0.0) > _SUPERVISOR_STARTS_WITHIN


def _start_supervisor(job: Job) -> None:
    run_dir = job.run_dir
    run_dir.create()
    start_detached(
        "jobs.backends.local",
        str(job.id),
        home=run_dir.root.parent.parent,
        cwd=run_dir.root,
        log=run_dir.supervisor_log,
    )


def _where(decision: Start, indices: Mapping[str, int]) -> str:
    if not decision.gpus:
        return "starting on CPU ranks"
    return "starting on GPU " + ", ".join(str(indices[uuid]) for uuid in decision.gpus)


def cpu_slots() -> int:
    """Return how many jobs may share the CPU: 1, or `FSDP_TUI_CPU_JOBS`."""
    text = os.environ.get("FSDP_TUI_CPU_JOBS", "1")
    return max(1, int(text)) if text.isdigit() else 1


@contextmanager
def _one_at_a_time(store: Store) -> Iterator[bool]:
    """Take the queue's lock; yield False if another process holds it."""
    with open(store.home / "dispatch.lock", "ab+", buffering=0) as lock:
        free = file_lock.acquire(lock, _QUEUE_IS_FREE_WITHIN)
        if free:
            with suppress(OSError):  # a full disk; the number is only to be shown
                lock.truncate(0)
                lock.write(b"%d" % os.getpid())
        else:
            lock.seek(0)
            pid = (lock.read(_LONGEST_PID) or b"").decode(errors="replace").strip()
            holder = f"process {pid}" if pid else "another process"
            reason = f"{holder} holds the queue and does not respond"
            store.explain_all({job.id: reason for job in store.in_states([State.QUEUED])})
        yield free
