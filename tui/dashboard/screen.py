"""The main screen: connects panels to snapshots, and keys to actions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from textual import on
from textual.containers import Container, Vertical
from textual.worker import get_current_worker

from jobs import service
from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.queue.job import why_after
from jobs.queue.states import State
from jobs.spec.file.load import load_spec
from tui.dashboard.jobs_panel import JobsPanel
from tui.dashboard.panels import ActivityPanel, CurvePanel, DevicesPanel
from tui.keys.actions import bindings
from tui.log.log_view import LogView
from tui.log.screen import log_sources, log_title
from tui.look.snapshot import Snapshot
from tui.widgets.bars import KeyBar, ProblemBar, TitleBar
from tui.widgets.job_actions import JobActions
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.timer import Timer

    from jobs.queue.job import Place
    from jobs.queue.store import Job, Store
    from tui.look.snapshot import JobView


# -- queue control --------------------------------------------------------------------------
# Queue actions: hold, release, move, change priorities, pause.


class QueueControl(JobActions[None]):
    """A screen that shows the queue."""

    snapshot: Snapshot

    def action_hold_job(self) -> None:
        def hold(job: int) -> str:
            service.hold(self.app.store, job)
            return f"job {job} is held until it is released"

        self.act_on_all("hold_job", hold, "hold")

    def action_release_job(self) -> None:
        def release(job: int) -> str:
            released = service.hold(self.app.store, job, False)
            waits = f": {why}" if (why := why_after(released)) else ""
            return f"job {job} is {released.state}{waits}"

        self.act_on_all("release_job", release, "release")

    def action_move_up(self) -> None:
        self._move("up")

    def action_move_down(self) -> None:
        self._move("down")

    def _move(self, to: Place) -> None:
        def move(job: int) -> str:
            service.move(self.app.store, job, to=to)
            return ""  # the screen shows its place in the queue

        self.act(move)

    def action_raise_priority(self) -> None:
        self._change_priority(1)

    def action_lower_priority(self) -> None:
        self._change_priority(-1)

    def _change_priority(self, by: int) -> None:
        def change(job: int) -> str:
            priority = self.app.store.get(job).priority + by
            service.move(self.app.store, job, priority=priority)
            return f"job {job} has priority {priority}"

        self.act(change)

    def action_pause_queue(self) -> None:
        pause = not self.snapshot.paused  # the state that the user sees

        def change() -> str:
            service.pause(self.app.store, pause)
            return "the queue is paused; running jobs continue" if pause else "the queue is running"

        self.app.act(change)


# -- exporting ------------------------------------------------------------------------------
# Exports started by the dashboard. They continue when their screen is closed.


@dataclass
class Export:
    """An export in progress. Its thread updates the progress, the screen reads it.

    Attributes:
        step: The checkpoint's step.
        done: Work done so far.
        total: Work in total; 0 while unknown.
        cancelled: Whether the user cancelled it.
    """

    step: int
    done: int = 0
    total: int = 0
    cancelled: bool = False


class Exports:
    """The exports in progress, at most one for each job.

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
        except Exception as error:  # top level: report every failure to the user
            message = say(f"the export of {what} failed: {type(error).__name__}: {error}", "error")
        finally:
            self.running.pop(job.id, None)
        self._dashboard.app.post_message(message)


# -- screen ---------------------------------------------------------------------------------


_PASSING: Final = 0.15  # seconds between keys that pass a job; a terminal repeats 10 to 30 a second


class DashboardScreen(QueueControl):
    """Devices, jobs, and the selected job's activity, log and loss."""

    BINDINGS = bindings("jobs", "queue", "log", "app")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = "#jobs"

    def __init__(self, store: Store, host: str, selected: int | None) -> None:
        super().__init__()
        self.store = store
        self.snapshot = Snapshot(t=0)
        self.title_bar = TitleBar(host)
        self.devices = DevicesPanel()
        self.jobs = JobsPanel(selected)
        self.activity = ActivityPanel()
        self.log_view = LogView(resting=self.is_covered)
        self.curve = CurvePanel()
        self.problem = ProblemBar()
        self.key_bar = KeyBar()
        self._log_index = 0
        self._log_job: int | None = None
        self.exports = Exports(self)
        self._selected_at = float("-inf")  # monotonic
        self._passing: Timer | None = None  # runs while a held key passes jobs
        self.job_tab = ""  # the tab that was open last on the job screen

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        yield self.title_bar
        with Vertical(id="body"):
            yield self.devices
            with Container(id="main"):
                with Vertical(id="jobs-and-activity"):
                    yield self.jobs
                    yield self.jobs.prompt
                    yield self.activity
                with Container(id="details"):
                    yield self.log_view
                    yield self.curve
        yield self.problem
        yield self.key_bar

    def on_mount(self) -> None:
        self.app.collector.wake()  # the first snapshot may be older than the panels

    def on_screen_resume(self) -> None:
        self.app.collector.wake()  # the snapshot may date from before the screen was covered

    def is_covered(self) -> bool:
        """Return whether another screen fills the terminal.

        Textual repaints what covers a changed widget even if the widget is invisible, so a covered
        dashboard is not updated and costs nothing.
        """
        return any(not screen.is_modal for screen in self.app.screen_stack[1:])

    # -- snapshots come down ---------------------------------------------------------------

    def update_from(self, snapshot: Snapshot) -> None:
        """Update every panel with a new snapshot."""
        panels = (
            self.title_bar,
            self.devices,
            self.jobs,
            self.activity,
            self.log_view,
            self.curve,
            self.problem,
            self.key_bar,
        )
        if not all(panel.is_attached for panel in panels):
            return  # not mounted yet, or being removed
        self.snapshot = snapshot
        self.title_bar.update_from(snapshot)
        self.jobs.update_from(snapshot)
        self.problem.update_from(snapshot.problem)
        self._show_selected()

    @property
    def selected(self) -> JobView | None:
        return self.snapshot.find(self.jobs.selected)

    @property
    def job_acted_on(self) -> Job | None:
        return view.job if (view := self.selected) is not None else None

    @property
    def all_acted_on(self) -> list[Job]:
        """Return the marked jobs, or the selected one."""
        marked = [view.job for view in self.snapshot.jobs if view.job.id in self.jobs.marks]
        return marked or super().all_acted_on

    def acted(self) -> None:
        self.jobs.unmark()

    def _show_selected(self) -> None:
        view = self.selected
        self.devices.update_from(self.snapshot, self.jobs.selected)
        expected = self.snapshot.outlook.jobs.get(view.job.id) if view else None
        self.activity.update_from(view, self.snapshot.t, expected)
        self.key_bar.update_from(view.job if view else None)
        if self._passing is None:
            self._show_details(view)

    def _show_details(self, view: JobView | None) -> None:
        """Show the log and the loss of a job."""
        curve = self.snapshot.curve
        if view is None or (curve is not None and curve.job == view.job.id):
            self.curve.update_from(curve if view else None)
        self._fold(view)
        job_id = view.job.id if view else None
        if job_id != self._log_job:
            self._log_job, self._log_index = job_id, 0
        self._show_log()

    def _fold(self, view: JobView | None) -> None:
        """Give the lines of empty panels to the list: no log before a start, no loss yet."""
        begun = view is not None and view.job.started is not None
        trained = view is not None and bool(view.progress.step)
        self.set_class(not begun, "-no-log")
        self.set_class(not trained, "-no-curve")

    def _show_log(self) -> None:
        view = self.selected
        if view is None:
            self.log_view.open(None, "log")
            return
        sources = log_sources(view.job)
        self._log_index %= len(sources)
        self.log_view.open(sources[self._log_index].path, log_title(sources, self._log_index))

    @on(JobsPanel.Selected)
    def _job_selected(self, event: JobsPanel.Selected) -> None:
        # Of jobs that a held key passes, only the rows change: a log can take 4 kB at 200 columns.
        passing = time.monotonic() - self._selected_at < _PASSING
        self._selected_at = time.monotonic()
        if self._passing is not None:
            self._passing.stop()
        self._passing = self.set_timer(_PASSING, self._stay) if passing else None
        self.app.select(event.job)
        self._show_selected()

    def _stay(self) -> None:
        """Show the details of the job that a held key stopped at."""
        self._passing = None
        if not self.is_covered():
            self._show_selected()

    @on(JobsPanel.Opened)
    def _job_opened(self) -> None:
        self.action_details()

    # -- jobs ------------------------------------------------------------------------------

    def action_new_job(self) -> None:
        from tui.form.opening import open_new  # imported on demand

        open_new(self)

    def action_duplicate_job(self) -> None:
        if (view := self.selected) is not None:
            from tui.form.opening import open_copy

            open_copy(self, view.job)

    def action_edit_job(self) -> None:
        if (view := self.selected) is not None:
            from tui.form.opening import open_edit

            open_edit(self, view.job.id)

    def action_remove_job(self) -> None:
        jobs = self.all_acted_on
        if len(jobs) == 1 and not jobs[0].state.ended:
            self.app.say(f"job {jobs[0].id} is {jobs[0].state}; stop it first", "warning")
            return

        def tell(job: Job) -> str:
            if len(jobs) > 1:
                return str(job.run_dir.root)
            what = "Its run directory is deleted with all logs, checkpoints and exports:"
            return f"{what}\n{job.run_dir.root}"

        def remove(job: int) -> str:
            service.remove(self.store, job)
            return f"job {job} and its run directory were removed"

        if jobs:
            self.ask_about_all("remove_job", jobs, "remove", tell, remove, harmful=True)

    def action_export_job(self) -> None:
        def export(job: int) -> str:
            if job in self.exports.running:
                return f"job {job} is being exported already"
            current = self.store.get(job)
            steps = [step for step, _ in current.run_dir.complete_checkpoints()]
            if not steps:
                raise UserError(f"job {job} has no checkpoint to export")
            self.app.call_later(self.exports.start, current, max(steps))
            return f"exporting step {max(steps)} of job {job} …"

        self.act_on_all("export_job", export, "export")

    def action_toggle_ranks(self) -> None:
        self.devices.toggle_ranks()
        self.app.remember("of_ranks", self.devices.of_ranks)

    def action_details(self) -> None:
        view = self.selected
        failed = view is not None and view.job.state is State.FAILED
        self.open_job("overview" if failed else self.job_tab)

    def open_job(self, tab: str) -> None:
        """Open the screen of the selected job at a tab."""
        if (view := self.selected) is not None:
            from tui.job.screen import JobScreen

            self.app.push_screen(JobScreen(self.store, view.job, tab))

    def action_data(self) -> None:
        if (view := self.selected) is not None:
            from tui.form.data import DataScreen

            job = view.job
            heading = f"data of job {job.id} “{job.name}”"
            read = partial(load_spec, job.run_dir.job_file)
            self.app.push_screen(DataScreen(heading, read, job.run_dir.data_report))

    def action_plots(self) -> None:
        if (view := self.selected) is not None:
            from tui.plots.screen import PlotsScreen

            self.app.push_screen(PlotsScreen(self.store, view.job))

    def action_compare_sweep(self) -> None:
        """Plot the jobs of the sweep that have trained; if there are too many, the best ones."""
        view = self.selected
        if view is None:
            return
        if not view.sweep:
            self.app.say(f"job {view.job.id} belongs to no sweep; v plots it", "warning")
            return
        from tui.plots.drawing import MOST_RUNS
        from tui.plots.screen import PlotsScreen

        begun = [
            each
            for each in self.snapshot.jobs
            if each.sweep == view.sweep and each.progress.step and each is not view
        ]
        begun.sort(key=lambda each: (each.judged.lowest_cost(), each.job.id))
        if len(begun) >= MOST_RUNS:
            by = next((each.judged for each in begun if each.judged), view.judged)
            best = f"the {MOST_RUNS - 1} with the {by.extreme} {by.title}"
            self.app.say(f"beside job {view.job.id}: {best} of {len(begun)} others")
        others = [each.job for each in begun[: MOST_RUNS - 1]]
        self.app.push_screen(PlotsScreen(self.store, view.job, others))

    def action_checkpoints(self) -> None:
        self.open_job("checkpoints")

    # -- log -------------------------------------------------------------------------------

    def action_toggle_log(self, ask: str = "") -> None:
        if (view := self.selected) is not None:
            from tui.log.screen import LogScreen

            screen = LogScreen(view.job, self._log_index, ask=ask)
            self.app.push_screen(screen, self._log_closed)

    def _log_closed(self, shown: int | None) -> None:
        self.action_show_log(shown or 0)

    def action_search_log(self) -> None:
        self.action_toggle_log("search")

    def action_next_log(self) -> None:
        self._log_index += 1
        self._show_log()

    def action_previous_log(self) -> None:
        self._log_index -= 1
        self._show_log()

    def action_show_log(self, index: int) -> None:
        self._log_index = index
        self._show_log()

    def action_follow_log(self) -> None:
        self.log_view.toggle_follow()

    def action_log_page_up(self) -> None:
        self.log_view.action_page_up()

    def action_log_page_down(self) -> None:
        self.log_view.action_page_down()

    def action_log_home(self) -> None:
        self.log_view.action_scroll_home()

    def action_log_end(self) -> None:
        self.log_view.action_scroll_end()

    # -- dashboard -------------------------------------------------------------------------

    def action_show_help(self) -> None:
        self.app.action_show_help()

    def action_gpus(self) -> None:
        from tui.dashboard.gpus import GpusScreen

        self.app.push_screen(GpusScreen(self.snapshot, self.jobs.selected))

    def action_fleet(self) -> None:
        from tui.fleet.screen import FleetScreen

        self.app.push_screen(FleetScreen())

    def action_caches(self) -> None:
        from tui.dashboard.caches import CachesScreen

        self.app.push_screen(CachesScreen(self.store))

    def action_quit_app(self) -> None:
        self.app.exit()
