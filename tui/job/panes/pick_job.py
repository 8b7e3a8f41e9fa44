"""Pick one of the jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import Vertical
from textual.screen import ModalScreen

from tui.keys.key_table import Key, bindings_of, moving
from tui.text.format import Span, cut, left, right
from tui.widgets.job_rows import GLYPHS
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.queue.store import Job
    from tui.text.format import Row


class JobList(PickList):
    """The jobs, the newest first."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        super().__init__(id="pick-list")
        self.jobs = sorted(jobs, key=lambda job: -job.id)

    @property
    def count(self) -> int:
        return len(self.jobs)

    def nothing(self) -> Sequence[Row]:
        return [(Span("no other jobs", "dim"),)]

    def table(self, width: int) -> Sequence[Row]:
        ids = max(2, *(len(str(job.id)) for job in self.jobs))
        rows: list[Row] = [(Span(f"{right('id', ids)}  {left('state', 12)}  name", "dim"),)]
        for job in self.jobs:
            glyph, role = GLYPHS[job.state]
            rows.append(
                (
                    Span(right(str(job.id), ids) + "  ", "dim"),
                    Span(left(f"{glyph} {job.state}", 12) + "  ", role),
                    Span(cut(job.name, max(4, width - ids - 16)), "strong"),
                )
            )
        return rows


class PickJobScreen(ModalScreen["Job | None"]):
    """Returns the job, or None when the person thought better of it."""

    CSS_PATH = "../job.tcss"
    KEYS: ClassVar = (
        *moving("job"),
        Key("pick", "enter", "enter", "select", "Choose the selected job"),
        Key("dismiss", "escape,q", "esc", "cancel", "Cancel"),
    )
    BINDINGS: ClassVar = bindings_of("pick_job", KEYS)
    AUTO_FOCUS = "#pick-list"

    def __init__(self, jobs: Sequence[Job], question: str) -> None:
        super().__init__()
        self.list = JobList(jobs)
        self.question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="pick-job") as dialog:
            dialog.border_title = self.question
            dialog.border_subtitle = "enter select · esc cancel"
            yield self.list

    def action_go(self, by: int) -> None:
        self.list.go(by)

    def action_pick(self) -> None:
        self.dismiss(self.list.jobs[self.list.index] if self.list.jobs else None)
