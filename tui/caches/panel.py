"""The list of the caches screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from tui.caches.rows import cache_rows
from tui.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Click, Resize

    from jobs.caches import Cache


class CachesPanel(Lines, can_focus=True):
    """The caches, one a row, one of them highlighted."""

    @dataclass
    class Highlighted(Message):
        """Another cache is highlighted, or the same one has changed."""

    def __init__(self) -> None:
        super().__init__(fixed=1, id="caches")
        self.index = 0
        self.caches: list[Cache] = []

    @property
    def highlighted(self) -> Cache | None:
        return self.caches[self.index] if self.caches else None

    def update_from(self, caches: Sequence[Cache]) -> None:
        self.caches = list(caches)
        self.index = max(0, min(self.index, len(self.caches) - 1))
        self._fill()
        self.post_message(self.Highlighted())

    def is_marked(self, index: int) -> bool:
        return bool(self.caches) and index - 1 == self.index

    def go(self, by: int) -> None:
        """Highlight another one."""
        index = max(0, min(self.index + by, len(self.caches) - 1))
        if index != self.index:
            self.index = index
            self._fill()
            self.post_message(self.Highlighted())

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and 1 <= self.row_at(offset.y) <= len(self.caches):
            self.go(self.row_at(offset.y) - 1 - self.index)

    def _fill(self) -> None:
        width = self.scrollable_content_region.width
        if not width or not self.caches:
            return
        heading, *rows = cache_rows(self.caches, width - 2)
        marks = [Span("▸ " if n == self.index else "  ", "accent") for n in range(len(rows))]
        self.show([(Span("  "), *heading), *((m, *r) for m, r in zip(marks, rows, strict=True))])
        seen, top = self.size.height - 1, self.scroll_offset.y
        if seen > 0 and not top <= self.index < top + seen:
            below = self.index >= top + seen
            y = self.index - seen + 1 if below else self.index
            self.scroll_to(y=y, animate=False, force=True)
