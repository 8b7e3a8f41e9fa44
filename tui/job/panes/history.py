"""The history tab: attempts, restarts, stops, and what happened in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from tui.job.panes.history_rows import history_rows
from tui.job.panes.text_pane import TextPane
from tui.keys.key_table import Key, bindings_of, scrolling
from tui.text.format import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.look.job_look import Look
    from tui.text.format import Row


class HistoryPane(TextPane):
    """Opens at its end, and stays there while nobody scrolls back."""

    KEYS: ClassVar = (
        *scrolling(),
        Key("toggle_events", "e", "e", "events", "Show or hide events of the run"),
        Key("copy_all", "y", "y", "copy", "Copy the full history as text"),
    )
    BINDINGS: ClassVar = bindings_of("history", KEYS)

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.states_only = False
        self._made: tuple[object, ...] = ()
        self._rows: list[Row] = []

    def rows_of(self, look: Look, width: int) -> Sequence[Row]:
        key = (look.history, look.moments, width, self.states_only)
        if key != self._made:
            self._made = key
            self._rows = history_rows(
                look.history, look.moments, width, states_only=self.states_only
            ) or [(Span("no events yet", "dim"),)]
        return self._rows

    def fill(self) -> None:
        follows = self.lines.scroll_offset.y >= self.lines.max_scroll_y
        before = len(self.lines.rows)
        super().fill()
        if follows and len(self.lines.rows) != before:
            # The size is known only after the layout.
            self.call_after_refresh(self.lines.scroll_end, animate=False)

    def action_toggle_events(self) -> None:
        self.states_only = not self.states_only
        self.fill()

    def action_copy_all(self) -> None:
        self.copy(self.as_text())
