"""Exports started by the dashboard. They continue when their screen is closed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from textual.worker import get_current_worker

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError

if TYPE_CHECKING:
    from jobs.queue.store import Job
    from tui.dashboard.screen import DashboardScreen


@dataclass
class Export:
    """An export under way. Its thread counts, the screen reads.

    Attributes:
        step: Of the checkpoint.
        done: Of the work.
        total: Of the work; 0 while that is not known.
        cancelled: Whether the user cancelled it.
    """

    step: int
    done: int = 0
    total: int = 0
    cancelled: bool = False


class Exports:
    """The exports under way, at most one of a job.

    Attributes:
        running: Job → its export.
    """

    def __init__(self, dashboard: DashboardScreen) -> None:
        self._dashboard = dashboard
        self.running: dict[int, Export] = {}

    def start(self, job: Job, step: int) -> None:
        """Export a checkpoint in a thread, and show the result."""
        export = self.running[job.id] = Export(step)
        self._dashboard.run_worker(
            partial(self._run, job, export), group="export", exit_on_error=False, thread=True
        )

    def cancel(self, job_id: int) -> None:
        if (export := self.running.get(job_id)) is not None:
            export.cancelled = True

    def _run(self, job: Job, export: Export) -> None:
        worker, say = get_current_worker(), self._dashboard.app.Said
        what = f"step {export.step} of job {job.id}"

        def report(done: int, total: int) -> None:
            export.done, export.total = done, total

        try:
            from jobs.export import export_checkpoint

            made = export_checkpoint(
                job,
                export.step,
                progress=report,
                cancelled=lambda: export.cancelled or worker.is_cancelled,
            )
            more = "".join(f"; {warning}" for warning in made.warnings)
            message = say(f"{what} exported to {made.path}{more}")
        except Cancelled:
            message = say(f"the export of {what} was cancelled", "warning")
        except (UserError, ToolError) as error:
            message = say(f"{what} cannot be exported: {error}", "warning")
        except Exception as error:  # the edge: nothing a person asked for ends in silence
            message = say(f"the export of {what} failed: {type(error).__name__}: {error}", "error")
        finally:
            self.running.pop(job.id, None)
        self._dashboard.app.post_message(message)
