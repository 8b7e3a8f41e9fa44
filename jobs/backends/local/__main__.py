"""`python -m jobs.backends.local ID`: run the supervisor of a job, detached from the starter."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from jobs.machine.start_detached import leave_starter

if TYPE_CHECKING:
    from jobs.queue.store import Store


def supervise(store: Store, job_id: int) -> None:
    """Supervise a job that has no live supervisor, then dispatch the next ones.

    Returns at once if another supervisor was faster. If this one is killed, the next command that
    reads the queue starts a new one, which adopts the launcher and the ranks that are still
    running.
    """
    from jobs.backends.local.dispatch import dispatch
    from jobs.backends.local.ranks import LocalRanks
    from jobs.backends.local.report import DatabaseReport
    from jobs.machine import processes
    from jobs.machine.residence import Standing, standing_of
    from jobs.supervise.supervisor import Supervisor

    me = processes.ProcessId.of(os.getpid())
    assert me is not None
    job = store.get(job_id)
    if not job.state.active or standing_of(job.boot_id, store.home) is Standing.ELSEWHERE:
        return
    if job.supervisor is not None and not job.supervisor.is_dead():
        return
    if not store.take_over(job_id, job.supervisor, me):
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.become_subreaper()
    with store.held_open():
        job = store.get(job_id)
        report = DatabaseReport(store, job)
        Supervisor(job.run_dir, LocalRanks(job, report), report).run()
    dispatch(store)


def main() -> None:
    """Detach from the starter's process and session, then supervise."""
    leave_starter()
    # After detaching: this import takes longer than the starter should wait.
    from jobs.queue.store import SERVICE, Store

    supervise(Store(patience=SERVICE), int(sys.argv[1]))


if __name__ == "__main__":
    main()
