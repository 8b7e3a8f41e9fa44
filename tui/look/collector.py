"""Poll jobs and devices once a second, in a thread. Independent of widgets."""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict, deque
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import UserError
from jobs.machine import devices
from jobs.queue.job import Clocks
from jobs.queue.job_list import JobList, measured_of, progress_of
from jobs.queue.states import State
from jobs.queue.sweeps import Groups
from jobs.queue.tables import trouble
from jobs.run.eventlog import EventLog, RunReport
from jobs.run.judging import UNMEASURED, Measurements
from jobs.service.outlook import Forecast, Outlook
from tui.look.snapshot import Curve, JobView, Snapshot, in_order, in_step
from tui.text.format import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.machine.devices import Gpu
    from jobs.queue.store import Job, Store
    from jobs.service import Progress


# -- gpu history ----------------------------------------------------------------------------
# Recent utilization and memory use of each GPU, for graphs. Takes times as arguments.


EVERY: Final = 2.0  # seconds per column; each added column sends the line again
_COLUMNS: Final = 240  # eight minutes


class History:
    """Averages of driver samples. One thread adds; published values are replaced, not changed."""

    def __init__(self) -> None:
        self.shown: dict[str, tuple[int | None, ...]] = {}
        self.filled: dict[str, tuple[int | None, ...]] = {}  # memory use in percent
        self._columns: dict[str, deque[int | None]] = {}
        self._memory: dict[str, deque[int | None]] = {}
        self._seen: dict[str, list[int]] = {}  # the column in progress
        self._until = 0.0

    def add(self, now: float, gpus: Sequence[Gpu]) -> None:
        """Add a sample of each GPU. Every two seconds, the average becomes a column."""
        for gpu in gpus:
            seen = self._seen.setdefault(gpu.uuid, [])
            if gpu.utilisation is not None:
                seen.append(gpu.utilisation)
        if now < self._until:
            return
        self._until = now + EVERY - 0.25  # polls may be a little early or late
        for uuid, seen in self._seen.items():
            columns = self._columns.setdefault(uuid, deque(maxlen=_COLUMNS))
            columns.append(round(sum(seen) / len(seen)) if seen else None)
            seen.clear()
        for gpu in gpus:
            full = self._memory.setdefault(gpu.uuid, deque(maxlen=_COLUMNS))
            readable = gpu.memory_used is not None and gpu.memory_total
            full.append(
                round(100 * (gpu.memory_used or 0) / gpu.memory_total) if readable else None
            )
        self.shown = {gpu.uuid: tuple(self._columns[gpu.uuid]) for gpu in gpus}
        self.filled = {gpu.uuid: tuple(self._memory[gpu.uuid]) for gpu in gpus}


# -- collector ------------------------------------------------------------------------------


PERIOD: Final = 1.0  # seconds
_POLL_BYTES: Final = 1 << 20  # per event log and poll, so that the screen's thread is not starved
# Events of a long log read at first; rows do not wait for it. Each later poll reads twice as much.
_POLLS_PER_LOOK: Final = 2
# Seconds for the screen's thread to draw the part of a long log that was published.
_TURN: Final = 0.2
_ENDED_AT_FIRST: Final = 25
_ENDED_PER_LOOK: Final = 250  # jobs whose files have to be read
_KEPT_LOGS: Final = 6  # event logs of ended jobs that were selected


class Collector:
    """Makes snapshots. One thread runs `run`; any thread may set `selected` and call `wake`."""

    def __init__(
        self, store: Store, selected: int | None = None, period: float | None = None
    ) -> None:
        """
        Args:
            store: The jobs.
            selected: The job to collect details of.
            period: Seconds between polls; default `PERIOD`.
        """
        self.store = store
        self.selected = selected
        self.period = period
        self._wake = Event()
        self._closed = Event()
        self._logs: OrderedDict[int, EventLog] = OrderedDict()
        self._ended: dict[int, tuple[float | None, Progress]] = {}
        self._resting: dict[int, JobView] = {}  # of jobs that are not running
        self._present: dict[str, int] = {}  # GPU indices by UUID
        self._curve = Curve(-1)
        self._share = self._polls = _POLLS_PER_LOOK  # per poll, and what is left of it
        self._behind = False  # a log has unread data
        self._history = History()
        self._list = JobList(store)
        self._groups = Groups()
        self._differing: dict[int, dict[str, Any]] = {}  # of jobs in sweeps
        self._judged: dict[int, Measurements] = {}  # the best ones of ended jobs in sweeps
        self._clocks = Clocks()
        self._forecast, self._outlook = Forecast(), Outlook()
        self._listed: list[Job] | None = None  # in the store's order, and in display order
        self._jobs: list[Job] = []
        self._ids: set[int] = set()
        self._moving: dict[int, int] | None = None  # indices of views that change; None: any may
        self._shown: int | None = None  # the job shown in detail
        self._views: tuple[JobView, ...] = ()  # the last views stay when reading fails
        self._untended = ""  # why the queue could not be updated; one thread writes, one reads

    def run(self, publish: Callable[[Snapshot], None]) -> None:
        """Poll until closed. Failures are published, and polling continues."""
        while not self._closed.is_set():
            publish(self.look())
            period = PERIOD if self.period is None else self.period
            self._wake.wait(min(period, _TURN) if self._behind else period)
            self._wake.clear()

    def tend(self) -> None:
        """Synchronize the database with the process table, until closed.

        Runs in a thread of its own: it may wait for another process that does the same, and the
        screen must stay current meanwhile.
        """
        while not self._closed.is_set():
            try:
                service.refresh(self.store)
            except Exception as error:  # one failure must not end the loop
                self._untended = f"cannot start the queue runner: {_words(error)}"
            else:
                self._untended = ""
            self._closed.wait(PERIOD)

    def wake(self) -> None:
        """Poll now: the selection or a job has changed."""
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def look(self) -> Snapshot:
        """Return one snapshot of everything that can be read."""
        problems = [self._untended] if self._untended else []
        gpus: list[Gpu] = []
        host = None
        try:
            gpus, host = devices.gpus(), devices.host()
            present = {gpu.uuid: gpu.index for gpu in gpus}
            if present != self._present:
                self._present = present
                self._resting.clear()
                self._moving = None
            self._history.add(time.time(), gpus)
            listed = self._list.look()
            if listed is not self._listed:
                self._listed, self._jobs = listed, in_order(listed)
                self._ids = {job.id for job in listed}
                before = self._differing
                self._differing = self._groups.differing(listed, self._list.sweeps)
                for job_id in before.keys() | self._differing.keys():
                    if before.get(job_id) != self._differing.get(job_id):
                        self._resting.pop(job_id, None)
                self._moving = None
            jobs = self._jobs
            chosen = self._chosen(jobs)
            if self._moving is None:
                self._read_ended(jobs)
            self._share = self._share * 2 if self._behind else _POLLS_PER_LOOK
            self._polls, self._behind = self._share, False
            self._look_at(jobs, gpus, chosen, problems)
            self._outlook = self._forecast.look(
                self.store,
                listed,
                {view.job.id: view.progress for view in self._views if view.job.state.active},
                gpus,
                self._logs,
            )
            self._draw(chosen)
        except Exception as error:  # one failed poll must not end the loop
            problems.append(f"cannot read the jobs: {_words(error)}")
        return Snapshot(
            t=time.time(),
            jobs=self._views,
            gpus=tuple(gpus),
            host=host,
            curve=self._curve,
            problem="; ".join(problems),
            busy=self._history.shown,
            filled=self._history.filled,
            paused=self._list.paused,
            outlook=self._outlook,
        )

    # -- inside ----------------------------------------------------------------------------

    def _chosen(self, jobs: Sequence[Job]) -> int | None:
        """Return the selected job; the first one if none is selected."""
        if self.selected in self._ids:
            return self.selected
        return jobs[0].id if jobs else None

    def _look_at(
        self, jobs: Sequence[Job], gpus: Sequence[Gpu], chosen: int | None, problems: list[str]
    ) -> None:
        """Update the views of all jobs; if very many are idle, only views that may have changed."""
        if self._moving is None or chosen != self._shown:
            views = [self._try_view(job, gpus, chosen == job.id, problems) for job in jobs]
            self._views = tuple(views)
            self._forget(jobs)
            resting = all(job.state.active or job.id in self._ended for job in jobs)
            self._shown, self._moving = (
                chosen,
                {
                    job.id: place
                    for place, job in enumerate(jobs)
                    if job.state.active or job.id == chosen
                }
                if resting and not problems
                else None,
            )
            return
        moved = {}
        for job_id, place in self._moving.items():
            view = self._try_view(jobs[place], gpus, chosen == job_id, problems)
            if view != self._views[place]:
                moved[place] = view
        if moved:  # else return the same tuple, which tells others that nothing has changed
            views = list(self._views)
            for place, view in moved.items():
                views[place] = view
            self._views = tuple(views)

    def _try_view(
        self, job: Job, gpus: Sequence[Gpu], chosen: bool, problems: list[str]
    ) -> JobView:
        """Return a job's view; if its files cannot be read, the view that the database gives."""
        try:
            return self._view(job, gpus, chosen)
        except Exception as error:
            problems.append(f"cannot read the files of job {job.id}: {_words(error)}")
            return JobView(job, where=where_of(job, gpus))

    def _view(self, job: Job, gpus: Sequence[Gpu], chosen: bool) -> JobView:
        resting = self._resting.get(job.id)
        if resting is not None and resting.job is job and job.id in self._ended and not chosen:
            return resting  # for a thousand ended jobs, more would be too slow
        where = where_of(job, gpus)
        if job.state.active:
            log = self._follow(job)
            progress = self._progress(job, log)
            training = not log.behind and log.phase is None
            clocks = self._clocks.of(job, time.time())
            ranks = in_step(clocks, progress, time.time(), training=training)
            report = RunReport.of(log)
            phase = None if log.behind else log.phase
            view = JobView(job, progress, where, phase, ranks, report.strategy, report.reason)
            return self._in_sweep(view, log)
        if chosen:
            log = self._follow(job)
            return self._in_sweep(JobView(job, self._progress(job, log), where), log)
        view = self._in_sweep(JobView(job, self._ended_progress(job), where))
        # Return the same view while nothing changes, so that its row is not rebuilt.
        if resting == view:
            return resting
        self._resting[job.id] = view
        return view

    def _in_sweep(self, view: JobView, log: EventLog | None = None) -> JobView:
        """Add how a job of a sweep differs from the others."""
        job = view.job.id
        if job not in self._list.sweeps:
            return view
        judged = log.measured().only_best() if log is not None else UNMEASURED
        return replace(
            view,
            sweep=self._list.sweeps[job],
            differs=self._differing.get(job, {}),
            judged=judged or self._judged.get(job, UNMEASURED),
        )

    def _follow(self, job: Job) -> EventLog:
        """Read a job's new events; a long log takes several refreshes."""
        log = self._logs.get(job.id)
        if log is None:
            log = self._logs[job.id] = EventLog(job.run_dir.events)
        self._logs.move_to_end(job.id)
        changed = False
        while log.poll(_POLL_BYTES) and not self._closed.is_set():
            changed = True
            self._polls -= 1
            if self._polls <= 0 and log.behind:
                self._behind = True
                break
        if changed and self._curve.job == job.id:
            self._curve = Curve(-1)
        return log

    def _progress(self, job: Job, log: EventLog) -> Progress:
        """Return a job's progress; while its log is partly unread, from the log's end."""
        return service.progress(job, None if log.behind else log)

    def _ended_progress(self, job: Job) -> Progress:
        ended = self._ended.get(job.id)
        return ended[1] if ended else service.Progress()

    def _read_ended(self, jobs: Sequence[Job]) -> None:
        """Read the progress of ended jobs from the database, or of a few, from their files."""
        new = [
            job
            for job in jobs
            if not job.state.active
            and ((ended := self._ended.get(job.id)) is None or ended[0] != job.ended)
        ]
        if new:
            most = _ENDED_PER_LOOK if self._views else _ENDED_AT_FIRST
            progress = progress_of(self.store, new, most=most)
            for job in new:
                if job.id in progress:
                    self._ended[job.id] = job.ended, progress[job.id]
                    self._judged.pop(job.id, None)
                    self._resting.pop(job.id, None)  # its view was made before this was read

            swept = [job for job in new if job.id in progress and job.id in self._list.sweeps]
            for job_id, measured in measured_of(self.store, swept).items() if swept else ():
                self._judged[job_id] = measured.only_best()

    def _forget(self, jobs: Sequence[Job]) -> None:
        """Drop data of jobs that are gone or were not shown for long."""
        present = {job.id for job in jobs}
        active = {job.id for job in jobs if job.state.active}
        self._clocks.forget(active)
        for gone in [job_id for job_id in self._ended if job_id not in present]:
            del self._ended[gone]
        for gone in [job_id for job_id in self._resting if job_id not in present]:
            del self._resting[gone]
        idle = [job_id for job_id in self._logs if job_id not in active]
        for job_id in idle[: max(0, len(idle) - _KEPT_LOGS)]:
            del self._logs[job_id]
        for job_id in [job_id for job_id in self._logs if job_id not in present]:
            del self._logs[job_id]

    def _draw(self, chosen: int | None) -> None:
        if chosen is None:
            self._curve = Curve(-1)
        elif self._curve.job != chosen:
            log = self._logs.get(chosen)
            newest = log.validations[-1][1] if log and log.validations else None
            self._curve = Curve(chosen, tuple(log.steps) if log else (), newest)


def _words(error: Exception) -> str:
    if isinstance(error, sqlite3.Error):
        return str(trouble(error))
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def where_of(job: Job, gpus: Sequence[Gpu]) -> str:
    """Return the job's devices in a few characters: `0-3`, `any 2`, `cpu×2`."""
    if job.wanted is None:
        return f"cpu×{job.ranks}"
    if not job.here:
        return f"{job.backend}×{job.ranks}"
    index = {gpu.uuid: gpu.index for gpu in gpus}
    names = job.gpus or (job.wanted if isinstance(job.wanted, list) else [])
    if not names:
        return f"any {job.wanted}" if job.state is State.QUEUED else f"×{job.ranks}"
    indices = [index[name] for name in names if name in index]
    return ranges(indices) if len(indices) == len(names) else f"×{len(names)}"
