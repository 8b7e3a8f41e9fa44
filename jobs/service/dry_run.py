"""Run two real steps of a job through the queue, measure them, and remove the run.

The run is killed after the measurement, since its regular end would write a full checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import NotFoundError, StateError, UserError
from jobs.machine.engine_tools import ToolError
from jobs.queue.states import State
from jobs.run.eventlog import EventLog, RunReport
from jobs.run.failure import Cause, read_failure
from jobs.service.plan import plan_submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec

STEPS: Final = 2  # Adam's state is allocated in the first; the second is like all others
_POLL_INTERVAL: Final = 0.2  # seconds
_LONGEST_NAME: Final = 64  # characters
_MAX_STEPS: Final = 1_000_000  # steps; the run must not end by itself, which would save
_OVERRIDES: Final[Mapping[str, Any]] = {
    "max_train_steps": _MAX_STEPS,
    "num_train_epochs": None,
    "checkpointing_steps": 0,
    "validation_prompts": [],
    "validation_fraction": 0.0,
    "validation_scores": [],
    "checkpoints_best_by": "validation_loss",
    "export_formats": None,
    "resume_from_checkpoint": None,
    "both_experts": False,
    "other_expert": None,
    "max_restarts": 0,
    "auto_resume": False,
    "report_to": [],
    "push_to_hub": False,
}
_NO_MEMORY: Final = (Cause.GPU_MEMORY, Cause.HOST_MEMORY)


@dataclass(frozen=True)
class Measured:
    """The result of a dry run.

    Attributes:
        strategy: The strategy that ran.
        measure: What `peaks` counts, as in `jobs.run.eventlog`.
        peaks: Phase → peak bytes of each rank.
        out_of_memory: Whether it ran out of memory; `peaks` may be empty then.
        reason: Why it ended that way.
    """

    strategy: str
    measure: str = ""
    peaks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    out_of_memory: bool = False
    reason: str = ""


def measure(
    store: Store, spec: JobSpec, tell: Callable[[str], None] = lambda text: None
) -> Measured:
    """Run two steps of a job on the devices it asks for, then remove the run.

    It waits in the queue like any other job. The captions and latents that it caches are kept for
    the job itself.

    Args:
        store: The jobs.
        spec: The job.
        tell: Called with a short text at every change of its state.

    Raises:
        UserError: It cannot run as configured, or was stopped.
        ToolError: It failed for a reason other than memory.
    """
    values = spec.to_dict() | dict(_OVERRIDES) | {"name": f"measure-{spec.name}"[:_LONGEST_NAME]}
    plan = plan_submit(store, type(spec).model_validate(values))
    with _exit_on_signals():
        job = service.carry_out(store, plan)
        try:
            report, ended = _watch(store, job, tell)
            failure = read_failure(job.run_dir)
        finally:
            _remove(store, job.id)
    if ended is not None and failure is not None and failure.cause in _NO_MEMORY:
        return Measured(report.strategy, report.measure, report.peaks, True, ended.reason)
    if ended is not None:
        if ended.state is State.STOPPED:
            raise UserError("the two steps were stopped before measuring")
        raise ToolError(f"the two steps failed: {ended.reason}")
    return Measured(report.strategy, report.measure, report.peaks)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Handle SIGHUP and SIGTERM like Ctrl-C, so that the endless run is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(store: Store, job: Job, tell: Callable[[str], None]) -> tuple[RunReport, Job | None]:
    """Wait for the measurement. Return it, and the job if the job ended first."""
    log, latest = EventLog(job.run_dir.events), ""
    while True:
        service.refresh(store)
        now = store.get(job.id)
        log.read_all()  # read after the state, so that the events of an ended job are complete
        if (words := f"{now.state}: {now.reason}") != latest:
            latest = words
            tell(words)
        report = RunReport.of(log)
        if "step" in report.peaks and log.last is not None and log.last.step >= STEPS:
            return report, None
        if now.state.ended:
            return report, now
        time.sleep(_POLL_INTERVAL)


def _remove(store: Store, job_id: int) -> None:
    """Kill the run, wait until none of its processes is left, and delete it."""
    with suppress(StateError):
        service.stop(store, job_id, now=True)
    with suppress(NotFoundError, service.FilesLeftError):
        while not store.get(job_id).state.ended:
            service.refresh(store)
            time.sleep(_POLL_INTERVAL)
        service.remove(store, job_id)
