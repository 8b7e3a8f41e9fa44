"""Suspends a job's ranks at a moment of their run, so that no test has to be quicker than they."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from jobs.machine.procfs import is_suspended, started_at
from jobs.run.eventlog import EventLog
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir


class HeldRanks:
    """Suspends them, from a thread of its own, as soon as something is so.

    Args:
        store: The jobs.
        when: Asked of the run directory of each job, until it says yes of one.
        seconds: How long at most.
    """

    def __init__(self, store: Store, when: Callable[[RunDir], bool], seconds: float) -> None:
        self._store = store
        self._when = when
        self._seconds = seconds
        self._job: Job | None = None
        self._problem: AssertionError | None = None
        self._thread = threading.Thread(target=self._suspend, daemon=True)
        self._thread.start()

    def are_suspended(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._problem is not None:
            raise self._problem
        return True

    def let_go(self) -> None:
        """Let those that live continue."""
        assert self.are_suspended()
        self._signal(signal.SIGCONT)

    def _suspend(self) -> None:
        try:
            eventually(self._found, self._seconds)
            self._signal(signal.SIGSTOP)
            eventually(self._is_done, self._seconds)
        except AssertionError as problem:
            self._problem = problem

    def _is_done(self) -> bool:
        """A signal takes its time; what a rank is just writing it writes to its end."""
        assert self._job is not None
        pids = [status.pid for status in self._job.run_dir.rank_statuses()]
        return all(is_suspended(pid) or started_at(pid) is None for pid in pids)

    def _found(self) -> bool:
        self._job = next((job for job in self._store.all() if self._when(job.run_dir)), None)
        return self._job is not None

    def _signal(self, number: int) -> None:
        assert self._job is not None, "what was waited for did not come true"
        for status in self._job.run_dir.rank_statuses():
            with suppress(ProcessLookupError):
                os.kill(status.pid, number)


def has_done_more_than(step: int) -> Callable[[RunDir], bool]:
    """Whether a job has done a step after this one."""

    def so(run_dir: RunDir) -> bool:
        last = EventLog(run_dir.events).read_all().last
        return last is not None and last.step > step

    return so
