"""Rows under a heading, one of them highlighted by keys and by clicks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from tui.text.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Click, Resize

    from tui.text.format import Row


class PickList(Lines, can_focus=True):
    """A list to pick from. Subclasses say what is in it: `count` and `table`.

    Attributes:
        index: The number of the highlighted row, the heading not counted.
    """

    @dataclass
    class Highlighted(Message):
        """Another row is highlighted, or the same one has changed."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(fixed=1, id=id)
        self.index = 0

    @property
    def count(self) -> int:
        """How many rows there are to pick from."""
        raise NotImplementedError

    def table(self, width: int) -> Sequence[Row]:
        """Return the heading, and a row for each item; called only if there are items."""
        raise NotImplementedError

    def nothing(self) -> Sequence[Row]:
        """Return the rows shown when the list is empty."""
        return []

    def highlight(self, index: int) -> None:
        """Take note of another highlighted row."""
        self.index = index

    def pick(self, row: int) -> None:
        """Select a clicked row; below the last one, the last row."""
        self.go(row - self.index)

    def go(self, by: int) -> None:
        """Highlight another one."""
        index = max(0, min(self.index + by, self.count - 1))
        if index != self.index:
            self.highlight(index)
            self.fill()
            self.post_message(self.Highlighted())

    def is_marked(self, index: int) -> bool:
        return self.count > 0 and index - 1 == self.index

    def on_resize(self, event: Resize) -> None:
        self.fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self.row_at(offset.y) >= 1:
            self.pick(self.row_at(offset.y) - 1)

    def fill(self) -> None:
        """Show the rows, and scroll so that the highlighted one is seen."""
        width = self.scrollable_content_region.width
        if not width:
            return
        if not self.count:
            self.show(self.nothing())
            return
        heading, *rows = self.table(width - 2)
        marks = [Span("▸ " if n == self.index else "  ", "accent") for n in range(len(rows))]
        self.show([(Span("  "), *heading), *((m, *r) for m, r in zip(marks, rows, strict=True))])
        seen, top = self.size.height - 1, self.scroll_offset.y
        if seen > 0 and not top <= self.index < top + seen:
            below = self.index >= top + seen
            y = self.index - seen + 1 if below else self.index
            self.scroll_to(y=y, animate=False, force=True)
