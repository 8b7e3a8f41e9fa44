"""Open the form from the dashboard: for a new job, a copy, or a queued job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from jobs.errors import StateError, UserError
from jobs.queue.states import State
from jobs.run.checkpoint_files import newest_whole
from jobs.service.edit import copy_of, fresh_values
from jobs.spec.file.load import load_spec
from tui.form.purpose import Purpose, Source
from tui.form.screen import NewJobScreen

if TYPE_CHECKING:
    from jobs.queue.store import Job
    from tui.dashboard.screen import DashboardScreen


def open_new(dashboard: DashboardScreen) -> None:
    """Open a blank form; a key fills in the newest job's model, data and ranks."""
    jobs = [view.job for view in dashboard.snapshot.jobs]
    newest = max(jobs, key=lambda job: job.id, default=None)
    values = fresh_values(jobs)
    source = Source(newest.id, newest.name, values) if newest is not None and values else None
    _push(dashboard, {}, Purpose(source=source))


def open_copy(dashboard: DashboardScreen, job: Job) -> None:
    """Open a new job with all the values of this one, under a new name."""
    taken = {view.job.name for view in dashboard.snapshot.jobs} | {job.name}
    try:
        values = copy_of(job, taken)
    except UserError as error:
        dashboard.app.say(str(error), "warning")
    else:
        _push(dashboard, values, Purpose(heading=f"copy of job {job.id} “{job.name}”"))


def open_edit(dashboard: DashboardScreen, number: int) -> None:
    """Open the values of a queued job; for any other job, offer a copy."""
    from tui.widgets.questions import ConfirmScreen

    try:
        job = dashboard.store.get(number)  # the displayed job may be a second old
        if job.state is State.QUEUED:
            spec = load_spec(job.run_dir.job_file)
            heading = f"job {job.id} “{job.name}”, queued"
            first = tuple(number for number, _ in job.follows)
            purpose = Purpose(heading, "change", job.id, spec, followed=first, follows=first)
            _push(dashboard, spec.to_dict(), purpose)
            return
    except UserError as error:
        dashboard.app.say(str(error), "warning")
        return

    def answered(yes: bool | None) -> None:
        if yes:
            open_copy(dashboard, job)

    question = f"Job {job.id} is {job.state}: create a copy?"
    detail = "Only a queued job can be edited. The copy is a new job."
    screen = ConfirmScreen(question, detail, "copy", refuse="no", harmful=False)
    dashboard.app.push_screen(screen, answered)


def open_resume(dashboard: DashboardScreen, number: int) -> None:
    """Open the settings of an ended job that a resume may change."""
    try:
        job = dashboard.store.get(number)
        if not job.state.ended:
            raise StateError(f"job {number} is {job.state}; only an ended job can resume")
        spec = load_spec(job.run_dir.job_file)
        begin = newest_whole(job.run_dir)
    except UserError as error:
        dashboard.app.say(str(error), "warning")
        return
    place = f"after step {begin.step}" if begin is not None else "from step 0"
    heading = f"resume job {job.id} “{job.name}” {place}"
    fixed = begin is not None
    purpose = Purpose(heading, "resume", job.id, spec, resumes=True, fixed=fixed)
    _push(dashboard, spec.to_dict(), purpose)


def _push(dashboard: DashboardScreen, values: dict[str, Any], purpose: Purpose) -> None:
    screen = NewJobScreen(dashboard.store, values, dashboard.snapshot, purpose)
    dashboard.app.push_screen(screen, partial(_announce, dashboard, screen))


def _announce(dashboard: DashboardScreen, screen: NewJobScreen, job: int | None) -> None:
    if job is not None:
        dashboard.jobs.awaited = job
        dashboard.app.collector.wake()
        dashboard.app.say(screen.submission.done)
