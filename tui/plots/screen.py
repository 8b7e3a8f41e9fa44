"""The curves of a run full screen, compared with others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import SelectionList, Static
from textual.widgets.selection_list import Selection

from tui.keys.key_table import Key, bindings_of, line_of
from tui.plots.drawing import MOST_RUNS
from tui.plots.panel import PlotsPanel
from tui.widgets.bars import Links
from tui.widgets.job_actions import OfOneJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.queue.store import Job, Store


# -- pick runs ------------------------------------------------------------------------------
# Pick the runs to compare.


CHOSEN, FREE = "■", "□"


class _Runs(SelectionList[int]):
    """Marks selected items with a sign; Textual's list uses color alone."""

    def render_line(self, y: int) -> Strip:
        line = super().render_line(y)
        index = self.scroll_offset.y + y
        if index >= self.option_count:
            return line
        _, _, _, gap, *rest = line
        chosen = self.get_option_at_index(index).value in self.selected
        sign = Segment(f" {CHOSEN if chosen else FREE} ", gap.style)
        return Strip([sign, gap, *rest], line.cell_length)


class PickRunsScreen(ModalScreen["list[int] | None"]):
    """Returns the numbers of the jobs to compare, or None if the user cancels.

    Args:
        jobs: All jobs.
        chosen: The jobs compared now.
        first: The job whose plots are shown; always included.
    """

    CSS_PATH = "plots.tcss"
    AUTO_FOCUS = "#runs"
    KEYS: ClassVar = (
        Key("cursor(1)", "j", "j", "next", "Next job"),
        Key("cursor(-1)", "k", "k", "previous", "Previous job"),
        Key("dismiss", "escape,q", "esc", "cancel", "Cancel"),
    )
    BINDINGS: ClassVar = [
        *bindings_of("pick_runs", KEYS),
        # Takes precedence over the list's own key, which would select the highlighted item again.
        Binding(
            "enter",
            "take",
            "compare",
            tooltip="Compare the chosen runs",
            priority=True,
            id="pick_runs.take",
        ),
    ]

    def __init__(self, jobs: Sequence[Job], chosen: Sequence[int], first: Job) -> None:
        super().__init__()
        # Jobs that never started have no curve.
        others = sorted(
            (job for job in jobs if job.id != first.id),
            key=lambda job: (job.started is None, -job.id),
        )
        self.first = first
        self.list = _Runs(
            *(
                Selection(
                    Content(f"{job.id:>3}  {job.name}  {job.state}"), job.id, job.id in chosen
                )
                for job in others
            ),
            id="runs",
        )

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="pick-runs") as dialog:
            dialog.border_title = f"compare {self.first.id} {self.first.name} with"
            dialog.border_subtitle = "space choose · enter compare · esc cancel"
            if self.list.option_count:
                yield self.list
            else:
                yield Static("no other jobs")
            yield Static("", id="too-many", markup=False)

    def action_cursor(self, by: int) -> None:
        if by > 0:
            self.list.action_cursor_down()
        else:
            self.list.action_cursor_up()

    def action_take(self) -> None:
        chosen = self.list.selected
        if len(chosen) >= MOST_RUNS:
            text = f"{len(chosen)} chosen; the limit is {MOST_RUNS - 1}"
            self.query_one("#too-many", Static).update(text)
            return
        self.dismiss(list(chosen))


# -- comparing ------------------------------------------------------------------------------
# Choose the runs that a panel of curves compares.


async def choose_runs(panel: PlotsPanel, store: Store, job: Job) -> None:
    """Ask in a worker which runs are shown beside a job's.

    Args:
        panel: The panel.
        store: The jobs; read in a thread, since the database may be locked.
        job: The job that is always included.
    """
    jobs = {listed.id: listed for listed in await asyncio.to_thread(store.all)}
    shown = [listed.id for listed in panel.jobs]

    def show(chosen: list[int] | None) -> None:
        if chosen is not None:
            panel.compare([job, *(jobs[job_id] for job_id in chosen)])

    # docs/upstream.md says why this does not use `push_screen_wait`.
    panel.app.push_screen(PickRunsScreen(list(jobs.values()), shown, job), show)


# -- screen ---------------------------------------------------------------------------------


class PlotsScreen(OfOneJob[None]):
    """Connects the panel of curves to the choice of runs."""

    CSS_PATH = "plots.tcss"
    AUTO_FOCUS = "#plots"
    KEYS: ClassVar = (
        Key("leave", "escape,q,v", "esc", "close", "Clear the cursor, or close the plots"),
        Key("compare", "c", "c", "compare", "Choose other runs to compare with"),
        Key("app.show_help", "question_mark", "?", "help", "Keys of this screen"),
    )
    BINDINGS: ClassVar = bindings_of("plots_screen", KEYS[:2])

    def __init__(self, store: Store, job: Job, others: Sequence[Job] = ()) -> None:
        """
        Args:
            store: The jobs.
            job: The job whose curves are shown.
            others: The jobs to compare with at first.
        """
        super().__init__(job)
        self.store = store
        self.panel = PlotsPanel([job, *others], resting=self._is_covered)
        self.key_line = Links("", id="plots-keys")

    def compose(self) -> ComposeResult:
        yield Static(
            f"plots of job {self.job.id} “{self.job.name}”", id="plots-title", markup=False
        )
        yield self.panel
        yield self.key_line

    def on_resize(self) -> None:
        self.show_keys()

    def show_keys(self) -> None:
        keys = (*self.KEYS, *self.job_keys(self.job_now), *self.panel.KEYS)
        self.key_line.update(line_of(keys, self.size.width - 2))

    def _is_covered(self) -> bool:
        stack = self.app.screen_stack
        return self in stack and any(
            not screen.is_modal for screen in stack[stack.index(self) + 1 :]
        )

    def action_leave(self) -> None:
        if not self.panel.stop_reading():
            self.dismiss()

    def action_compare(self) -> None:

        work = choose_runs(self.panel, self.store, self.job)
        self.run_worker(work, group="compare", exclusive=True, exit_on_error=False)
