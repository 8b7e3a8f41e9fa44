"""The buckets of the data screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual.message import Message

from tui.data.rows import bucket_rows
from tui.data.words import some
from tui.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.events import Click, Resize


class BucketsPanel(Lines, can_focus=True):
    """The buckets, one a row, one of them highlighted."""

    @dataclass
    class Highlighted(Message):
        """Another bucket is highlighted."""

        index: int

    def __init__(self) -> None:
        super().__init__(fixed=1, id="buckets")
        self.index = 0
        self._report: Mapping[str, Any] | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._report["buckets"]) if self._report else 0

    def update_from(self, report: Mapping[str, Any]) -> None:
        self._report = report
        self.index = min(self.index, self.count - 1)
        self.border_title = some(self.count, "bucket")
        self._fill()

    def is_marked(self, index: int) -> bool:
        return index - 1 == self.index

    def go(self, by: int) -> None:
        """Highlight another one."""
        index = max(0, min(self.index + by, self.count - 1))
        if index != self.index:
            self.index = index
            self._fill()
            self.post_message(self.Highlighted(index))

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self.row_at(offset.y) >= 1:
            self.go(self.row_at(offset.y) - 1 - self.index)

    def _fill(self) -> None:
        width = self.scrollable_content_region.width
        if self._report is None or not width:
            return
        heading, *rows = bucket_rows(self._report["buckets"], width - 2)
        marks = [Span("▸ " if n == self.index else "  ", "accent") for n in range(len(rows))]
        self.show([(Span("  "), *heading), *((m, *r) for m, r in zip(marks, rows, strict=True))])
        seen, top = self.size.height - 1, self.scroll_offset.y
        if seen > 0 and not top <= self.index < top + seen:
            below = self.index >= top + seen
            y = self.index - seen + 1 if below else self.index
            self.scroll_to(y=y, animate=False, force=True)
