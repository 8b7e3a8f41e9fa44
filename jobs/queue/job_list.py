"""All jobs, for callers that poll: rows are read only when the database has changed."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.queue.eta import Costs, Counted, habits_of, phases_of, time_left
from jobs.queue.states import State
from jobs.run.eventlog import EventLog, ReportLog, RunReport, read_end
from jobs.run.judging import UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jobs.queue.store import Job, Store
    from jobs.run.judging import Measurements


class JobList:
    """Reads through its own connection, which stays open. Use it from one thread at a time.

    Reading the rows of 5,000 jobs every second would take 2 % of a core.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._version: int | None = None
        self._jobs: list[Job] = []
        self.paused = False  # the queue, at the last look
        self.sweeps: Mapping[int, str] = {}  # of the jobs that belong to one

    def look(self) -> list[Job]:
        """Return every job, newest first; the same list object while nothing was written.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        version = self._read_version()
        if version is None or version != self._version:
            self._version = None
            self._jobs = self._store.all()  # what is written from here on makes another version
            self.paused = self._store.paused
            self.sweeps = self._store.sweeps()
            self._version = version
        return self._jobs

    def close(self) -> None:
        """Close the connection; the next `look` opens it again."""
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
        self._db = self._file = self._version = None

    def _read_version(self) -> int | None:
        """Return SQLite's `data_version`, which changes when others write; None on errors."""
        try:
            stat = os.stat(self._store.path)
            if self._db is None or self._file != (stat.st_dev, stat.st_ino):
                self.close()
                uri = f"{self._store.path.absolute().as_uri()}?mode=ro"
                self._db = sqlite3.connect(uri, uri=True, check_same_thread=False)
                self._file = stat.st_dev, stat.st_ino
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            return int(version)
        except (OSError, sqlite3.Error):
            self.close()
            return None


# -- summaries ------------------------------------------------------------------------------
# How far jobs are, and what their runs say of themselves, without reading all that they
# wrote.
#
# The summary of a job that has ended is kept in the database, written by its supervisor at
# its end. If there is none (the supervisor was killed, or was of an older version), the first
# reader computes and keeps it. Of a run that is still active, the newest steps are read from
# the end of its events, and the rest from where the last reader stopped.


_PATIENCE: Final = 0.2  # seconds for a database that is locked
_WORTH_KEEPING: Final = 1 << 20  # bytes of events that nobody needs to read again


@dataclass(frozen=True)
class Progress:
    """How far a job is, from its run directory.

    Attributes:
        step: The newest.
        loss: Its loss.
        seconds_per_step: The median of the latest ones.
        eta: Seconds until the job is done; at least, if `eta_unknown` names something.
        total_steps: What its ranks say, where the database does not know; None if they have not.
        eta_parts: `eta` by what takes it: `train` for steps, or `jobs.spec.rules.steps.AFTER`.
        eta_unknown: What is still to come, and not in `eta`: it has not happened yet.
    """

    step: int = 0
    loss: float | None = None
    seconds_per_step: float | None = None
    eta: float | None = None
    total_steps: int | None = None
    eta_parts: Mapping[str, float] = field(default_factory=dict)
    eta_unknown: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return what is kept of a job that has ended, which has nothing left to do."""
        return json.dumps([self.step, self.loss, self.seconds_per_step, None, self.total_steps])


def progress(job: Job, log: EventLog | None = None, now: float | None = None) -> Progress:
    """How far a job is.

    Args:
        job: The job.
        log: Its whole event log, if the caller follows it anyway; it is not polled here.
        now: Unix seconds; default: the present.
    """
    whole = log is not None
    log = log if log is not None else read_end(job.run_dir.events)
    last, ranks = log.last, Counted() if job.total_steps else Counted.read(job.run_dir)
    counted = ranks.total_steps
    if last is None:
        return Progress(total_steps=counted)
    pace, total = log.seconds_per_step(), job.total_steps or counted
    if total is None or not job.state.active:
        return Progress(last.step, last.loss, pace, None, counted)
    habits, costs = habits_of(job.run_dir), Costs.of(log)
    if habits is not None and habits.rhythm.epochs:
        habits = habits.counted(ranks if counted else Counted.read(job.run_dir))
    if not whole and habits is not None and costs.lacks(habits.rhythm):
        costs = Costs.of(log, phases_of(job.run_dir))
    left = time_left(log, habits, costs, total, time.time() if now is None else now)
    if left is None:
        return Progress(last.step, last.loss, pace, None, counted)
    return Progress(last.step, last.loss, pace, left.seconds, counted, left.parts, left.unknown)


def progress_of(store: Store, jobs: Iterable[Job], most: int | None = None) -> dict[int, Progress]:
    """How far each of these jobs is, by its id.

    Args:
        store: The jobs.
        jobs: Which ones.
        most: Read the files of at most this many ended jobs, and skip the others.
    """
    kept = kept_progress(store)
    by_job: dict[int, Progress] = {}
    read: list[tuple[Job, Progress, str]] = []
    for job in jobs:
        if job.state is State.QUEUED and job.attempt == 0 and job.started is None:
            by_job[job.id] = Progress()
        elif job.state.ended and job.id in kept and kept[job.id][0] == job.ended:
            by_job[job.id] = kept[job.id][1]
        elif not job.state.ended:
            by_job[job.id] = progress(job)
        elif most is None or len(read) < most:
            by_job[job.id] = progress(job)
            read.append((job, by_job[job.id], ""))
    _keep(store, read)
    return by_job


def kept_progress(store: Store) -> dict[int, tuple[float | None, Progress]]:
    """Return the kept progress, by job, with the end time of the job."""
    by_job = {}
    with store.connect() as db:
        for job, ended, text in db.execute("SELECT job, ended, progress FROM summaries"):
            with suppress(ValueError, TypeError):
                step, loss, pace, eta, *counted = json.loads(text)
                by_job[job] = ended, Progress(step, loss, pace, eta, *counted[:1])
    return by_job


def measured_of(store: Store, jobs: Sequence[Job]) -> dict[int, Measurements]:
    """Return what the checkpoints of these jobs are judged by, by job.

    Of an ended job they are kept in the database.
    """
    with store.connect() as db:
        query = "SELECT job, ended, report FROM summaries WHERE report != ''"
        kept = {row["job"]: (row["ended"], row["report"]) for row in db.execute(query)}
    by_job: dict[int, Measurements] = {}
    for job in jobs:
        ended, text = kept.get(job.id, (None, ""))
        if job.state is State.QUEUED and job.attempt == 0 and job.started is None:
            by_job[job.id] = UNMEASURED
        elif job.state.ended and text and ended == job.ended:
            by_job[job.id] = ReportLog.begin(job.run_dir, text).measured()
        else:
            by_job[job.id] = report_of(store, job).measured
    return by_job


def report_of(store: Store, job: Job) -> RunReport:
    """Return the report of a job's run."""
    with store.connect() as db:
        row = db.execute("SELECT ended, report FROM summaries WHERE job=?", (job.id,)).fetchone()
    log = ReportLog.begin(job.run_dir, row["report"] if row else "")
    before = log.offset
    if not (row and row["report"] and job.state.ended and row["ended"] == job.ended):
        log.read_all()
        if job.state.ended or log.offset - before >= _WORTH_KEEPING:
            _keep(store, [(job, progress(job), log.to_json())])
    return RunReport.of(log)


def keep_summary(store: Store, job: Job) -> None:
    """Keep what is asked of a job that has ended."""
    log = ReportLog.begin(job.run_dir).read_all()
    _keep(store, [(job, progress(job), log.to_json())])


def _keep(store: Store, summaries: Iterable[tuple[Job, Progress, str]]) -> None:
    """Where it cannot be kept, or a report is not known (""), it is read again next time."""
    rows = [(job.id, job.ended, at.to_json(), report, job.id) for job, at, report in summaries]
    if store.read_only or not rows:
        return
    with suppress(sqlite3.Error), store.write(patience=_PATIENCE) as db:
        db.executemany(
            "INSERT INTO summaries (job, ended, progress, report) SELECT ?,?,?,?"
            " WHERE EXISTS (SELECT 1 FROM jobs WHERE id=?)"
            " ON CONFLICT (job) DO UPDATE SET ended=excluded.ended, progress=excluded.progress,"
            " report=excluded.report",
            rows,
        )
