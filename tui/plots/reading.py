"""Read the events of runs as they come, in a thread. Knows no widgets."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Final

from jobs.run.eventlog import EventLog
from tui.plots.measures import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.queue.store import Job

_EVERY: Final = 2.0  # seconds; a plot is the most expensive thing on a screen
_PIECE: Final = 1 << 20  # bytes, after which the screen's thread gets a turn


class Reading:
    """Follows the event streams of some jobs until closed.

    Args:
        resting: Whether nobody can see the curves now; asked in the thread.
    """

    def __init__(self, resting: Callable[[], bool] = lambda: False) -> None:
        self._resting = resting
        self._jobs: Sequence[Job] = ()
        self._logs: dict[int, EventLog] = {}
        self._closed = Event()
        self._wake = Event()

    def follow(self, jobs: Sequence[Job]) -> None:
        """Read these from now on."""
        self._jobs = tuple(jobs)
        self._wake.set()

    def close(self) -> None:
        """Let the thread end."""
        self._closed.set()
        self._wake.set()

    def run(self, post: Callable[[list[Run]], None]) -> None:
        """Post the runs whenever they change, until closed."""
        posted: Sequence[Job] | None = None
        while not self._closed.is_set():
            jobs = self._jobs
            if not self._resting() and (self._read(jobs) or jobs != posted):
                posted = jobs
                if jobs:
                    post([self._run_of(job) for job in jobs])
            self._wake.wait(_EVERY)
            self._wake.clear()

    def _read(self, jobs: Sequence[Job]) -> bool:
        """Take in what is new; whether anything is."""
        self._logs = {
            job.id: self._logs.get(job.id) or EventLog(job.run_dir.events) for job in jobs
        }
        changed = False
        for log in self._logs.values():
            while not self._closed.is_set() and log.poll(_PIECE):
                changed = True
        return changed

    def _run_of(self, job: Job) -> Run:
        log = self._logs[job.id]
        return Run(job.id, job.name, job.run_dir.root, tuple(log.steps), tuple(log.validations))
