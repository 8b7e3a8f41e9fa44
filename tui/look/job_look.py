"""Poll one job, in a thread. Independent of widgets."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from fractions import Fraction
from threading import Event
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import NotFoundError, UserError
from jobs.hub.pushes import Push
from jobs.memory import calibration
from jobs.queue.eta import Counted, habits_of
from jobs.queue.job import Clocks
from jobs.queue.states import State
from jobs.run.eventlog import RunReport
from jobs.run.failure import read_failure
from jobs.run.samples import Samples
from jobs.run.timeline import Timeline
from jobs.run.why_failed import diagnose
from tui.look.snapshot import Curve, JobView, in_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.memory.predicted import Predicted
    from jobs.queue.store import Change, Job, Store
    from jobs.run.failure import Failure
    from jobs.run.samples import Sample
    from jobs.run.timeline import Moment, Stage

PERIOD: Final = 1.0  # seconds
_POLL_BYTES: Final = 1 << 20  # bytes of events per poll, so that the screen's thread is not starved


@dataclass(frozen=True)
class Look:
    """The state of one job at one moment.

    Attributes:
        t: Unix seconds.
        view: The job, its progress, and its ranks' reports.
        history: Its states since it was first queued.
        moments: The run's events.
        report: The run's own report.
        errors: Error files of failed ranks, the earliest first.
        curve: Its steps.
        newest: The step of its newest complete checkpoint.
        exported: Whether an export exists.
        samples: Its samples; the same tuple while nothing has changed.
        predicted: The predicted memory of a rank, if there is a prediction.
        failure: Why it failed, if it did.
        stages: The phases before its first step.
        push: Progress of its pushes to the hub.
        problem: What could not be read, in one line.
        saves_every: Steps between the checkpoints of a failed job, if known; epochs are fractions.
    """

    t: float
    view: JobView
    history: tuple[Change, ...] = ()
    moments: tuple[Moment, ...] = ()
    report: RunReport = field(default_factory=RunReport)
    errors: tuple[dict[str, Any], ...] = ()
    curve: Curve = field(default_factory=lambda: Curve(-1))
    samples: tuple[Sample, ...] = ()
    newest: int | None = None
    exported: bool = False
    predicted: Predicted | None = None
    failure: Failure | None = None
    stages: tuple[Stage, ...] = ()
    push: Push = field(default_factory=Push)
    problem: str = ""
    saves_every: Fraction | None = None

    @property
    def job(self) -> Job:
        return self.view.job


class Looker:
    """Polls a job. One thread runs `run`; any thread may call `wake` or `close`."""

    def __init__(self, store: Store, job: Job) -> None:
        self._store = store
        self._job = job
        self._log = Timeline(job.run_dir.events)
        self._samples = Samples(job.run_dir)
        self._clocks = Clocks()
        self._moments: tuple[Moment, ...] = ()
        self._curve = Curve(-1)
        # When it was read, and its value.
        self._predicted: tuple[int | None, Predicted | None] = (None, None)
        self._wake, self._closed = Event(), Event()
        self._last = Look(time.time(), JobView(job))

    def run(
        self,
        publish: Callable[[Look], None],
        resting: Callable[[], bool],
        cancelled: Callable[[], bool],
    ) -> None:
        """Poll until closed or cancelled, except while nobody can see the job."""
        while not self._closed.is_set() and not cancelled():
            if not resting():
                publish(self.look())
            self._wake.wait(PERIOD)
            self._wake.clear()

    def wake(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def look(self) -> Look:
        """Poll once; what cannot be read keeps its last value."""
        try:
            self._last = self._look()
        except Exception as error:  # one failed poll must not end the loop
            words = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            self._last = replace(self._last, t=time.time(), problem=words)
        return self._last

    def _look(self) -> Look:
        self._job = job = self._store.get(self._job.id)
        if not job.run_dir.root.is_dir():
            raise NotFoundError(f"the run directory of the job is gone: {job.run_dir.root}")
        log, changed = self._log, False
        while log.poll(_POLL_BYTES) and not self._closed.is_set():
            changed = True
        if changed or self._curve.job != job.id:
            newest = log.validations[-1][1] if log.validations else None
            self._moments = tuple(log.moments)
            self._curve = Curve(job.id, tuple(log.steps), newest)
        report = RunReport.of(log)
        progress = service.progress(job, log)
        view = JobView(
            job,
            progress,
            phase=log.phase if job.state.active else None,
            ranks=in_step(
                self._clocks.of(job, time.time()),
                progress,
                time.time(),
                training=log.phase is None,
            ),
            strategy=report.strategy,
            strategy_reason=report.reason,
        )
        saved = job.run_dir.latest_checkpoint()
        errors = tuple(job.run_dir.rank_errors()) if job.state.ended else ()
        return Look(
            time.time(),
            view,
            tuple(self._store.history(job.id)),
            self._moments,
            report,
            errors,
            self._curve,
            self._samples.look(),
            saved[0] if saved else None,
            job.run_dir.export.is_dir(),
            self._prediction(),
            self._failure(),
            tuple(log.stages),
            Push.read(job.run_dir),
            saves_every=self._saves_every(),
        )

    def _saves_every(self) -> Fraction | None:
        """Return the steps between a failed job's checkpoints; reads its job file once."""
        if self._job.state is not State.FAILED or self._last.saves_every is not None:
            return self._last.saves_every
        habits = habits_of(self._job.run_dir)
        if habits is None:
            return None
        rhythm = habits.counted(Counted.read(self._job.run_dir)).rhythm
        return None if "save" in rhythm.epochs else Fraction(rhythm.every["save"])

    def _failure(self) -> Failure | None:
        if self._job.state is not State.FAILED:
            return None
        # Older versions recorded only the ranks' facts.
        return read_failure(self._job.run_dir) or diagnose(self._job.run_dir, None)

    def _prediction(self) -> Predicted | None:
        """Read the prediction, which may appear while the job runs and change with an attempt."""
        try:
            changed = calibration.path_of(self._job.run_dir).stat().st_mtime_ns
        except OSError:
            changed = None
        if changed != self._predicted[0]:
            self._predicted = changed, calibration.read(self._job.run_dir)
        return self._predicted[1]
