"""Pick the runs that are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import SelectionList, Static
from textual.widgets.selection_list import Selection

from tui.keys.key_table import Key, bindings_of
from tui.plots.drawing import MOST_RUNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.queue.store import Job


CHOSEN, FREE = "■", "□"


class _Runs(SelectionList[int]):
    """Tells by a sign what is chosen; Textual's list tells it by colour alone."""

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
    """Returns the numbers of the jobs to compare, or None when the person thought better of it.

    Args:
        jobs: All there are.
        chosen: Those that are compared now.
        first: The job whose plots are shown, which stays.
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
        # Before the list's own, which would choose once more what is highlighted.
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
        others = sorted((job for job in jobs if job.id != first.id), key=lambda job: -job.id)
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
