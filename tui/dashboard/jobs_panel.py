"""The jobs table: one row a job, a cursor that stays on its job while the order changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from jobs.states import ACTIVE, State
from tui.actions import bindings
from tui.dashboard.job_rows import columns, header_row, job_row
from tui.format import Row, Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from textual.events import Click, Resize

    from tui.snapshot import Snapshot

_EMPTY: tuple[Row, ...] = (
    (),
    (Span("  No jobs yet.", "strong"),),
    (),
    (Span("  n", "accent"), Span("  describes one and queues it", "dim")),
    (
        Span("  fsdp-tui demo", "accent"),
        Span("  in a shell trains a toy model, to see how it goes", "dim"),
    ),
    (),
)


class JobsPanel(Lines, can_focus=True):
    """Shows the jobs of a snapshot and says which one is selected."""

    BINDINGS = bindings("list")
    BORDER_TITLE = "jobs"

    @dataclass
    class Selected(Message):
        """Another job is selected."""

        job: int

    @dataclass
    class Opened(Message):
        """The selected job was clicked again."""

        job: int

    def __init__(self, selected: int | None) -> None:
        super().__init__(fixed=1, id="jobs")
        self.selected = selected
        self.awaited: int | None = None  # a new job, to be selected as soon as it is seen
        self._ids: list[int] = []
        self._snapshot: Snapshot | None = None

    def update_from(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._ids = [view.job.id for view in snapshot.jobs]
        if self.awaited in self._ids:
            self._select(self.awaited)
            self.awaited = None
        if self.selected not in self._ids:
            self._select(self._ids[0] if self._ids else None)
        self._fill()

    def is_marked(self, index: int) -> bool:
        return self._ids[index - 1 : index] == [self.selected] if index else False

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or not self._ids:
            return
        index = self.row_at(offset.y)
        if 1 <= index <= len(self._ids):
            job = self._ids[index - 1]
            if job == self.selected and event.chain == 2:
                self.post_message(self.Opened(job))
            self._go(index - 1)

    # -- keys ------------------------------------------------------------------------------

    def action_cursor_down(self) -> None:
        self._go(self._position + 1)

    def action_cursor_up(self) -> None:
        self._go(self._position - 1)

    def action_page_down(self) -> None:
        self._go(self._position + max(1, self.size.height // 2))

    def action_page_up(self) -> None:
        self._go(self._position - max(1, self.size.height // 2))

    def action_first(self) -> None:
        self._go(0)

    def action_last(self) -> None:
        self._go(len(self._ids) - 1)

    # -- inside ----------------------------------------------------------------------------

    @property
    def _position(self) -> int:
        return self._ids.index(self.selected) if self.selected in self._ids else 0

    def _go(self, position: int) -> None:
        if self._ids:
            self._select(self._ids[min(max(0, position), len(self._ids) - 1)])
            self._fill()

    def _select(self, job: int | None) -> None:
        if job == self.selected:
            return
        self.selected = job
        if job is not None:
            self.post_message(self.Selected(job))

    def _fill(self) -> None:
        snapshot = self._snapshot
        width = self.scrollable_content_region.width
        if snapshot is None or not width:
            return
        self._caption(snapshot)
        if not snapshot.jobs:
            self.show(_EMPTY)
            return
        shape = columns(snapshot, width - 2)
        self.show(
            [
                (Span("  "), *header_row(shape)),
                *(
                    (Span("▸ " if view.job.id == self.selected else "  ", "accent"),
                     *job_row(view, shape))
                    for view in snapshot.jobs
                ),
            ]
        )  # fmt: skip
        self._keep_in_sight()

    def _keep_in_sight(self) -> None:
        position, seen = self._position, self.size.height - 1
        if seen <= 0:
            return
        top = self.scroll_offset.y
        if position < top:
            self.scroll_to(y=position, animate=False, force=True)
        elif position >= top + seen:
            self.scroll_to(y=position - seen + 1, animate=False, force=True)

    def _caption(self, snapshot: Snapshot) -> None:
        running, queued = snapshot.count(*ACTIVE), snapshot.count(State.QUEUED)
        ended = len(snapshot.jobs) - running - queued
        title = f"jobs · {running} running · {queued} queued · {ended} ended"
        if self.border_title != title:
            self.border_title = title
