"""The list of the checkpoints screen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from tui.checkpoints.rows import checkpoint_rows
from tui.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Click, Resize

    from jobs.checkpoint_list import Listed


class CheckpointsPanel(Lines, can_focus=True):
    """The checkpoints, the newest first, one of them highlighted."""

    @dataclass
    class Highlighted(Message):
        """Another checkpoint is highlighted, or the same one has changed."""

    def __init__(self) -> None:
        super().__init__(fixed=1, id="checkpoints")
        self.listed: list[Listed] = []
        self._name: str | None = None  # stays highlighted while others come and go

    @property
    def index(self) -> int:
        names = [one.name for one in self.listed]
        return names.index(self._name) if self._name in names else 0

    @property
    def highlighted(self) -> Listed | None:
        return self.listed[self.index] if self.listed else None

    def update_from(self, listed: Sequence[Listed]) -> None:
        """Show these; given oldest first."""
        before = self.highlighted
        index = self.index
        self.listed = list(reversed(listed))
        names = [one.name for one in self.listed]
        if self._name not in names:
            # The one that a resume takes, or what has come into the place of one that is gone.
            wanted = next((one.name for one in self.listed if one.next), None)
            place = names[min(index, len(names) - 1)] if names else None
            self._name = place if before is not None else wanted or place
        self._fill()
        if self.highlighted != before:
            self.post_message(self.Highlighted())

    def is_marked(self, index: int) -> bool:
        return bool(self.listed) and index - 1 == self.index

    def go(self, by: int) -> None:
        """Highlight another one."""
        if not self.listed:
            return
        index = max(0, min(self.index + by, len(self.listed) - 1))
        if index != self.index:
            self._name = self.listed[index].name
            self._fill()
            self.post_message(self.Highlighted())

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self.row_at(offset.y) >= 1:
            self.go(self.row_at(offset.y) - 1 - self.index)

    def _fill(self) -> None:
        width = self.scrollable_content_region.width
        if not width:
            return
        if not self.listed:
            self.show([])
            return
        heading, *rows = checkpoint_rows(self.listed, width - 2, time.time())
        marks = [Span("▸ " if n == self.index else "  ", "accent") for n in range(len(rows))]
        self.show([(Span("  "), *heading), *((m, *r) for m, r in zip(marks, rows, strict=True))])
        seen, top = self.size.height - 1, self.scroll_offset.y
        if seen > 0 and not top <= self.index < top + seen:
            below = self.index >= top + seen
            y = self.index - seen + 1 if below else self.index
            self.scroll_to(y=y, animate=False, force=True)
