"""The list of the block modal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.message import Message

from tui.detect.rows import block_rows
from tui.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from textual.events import Click, Resize

    from jobs.blocks import BlockClass


class BlocksPanel(Lines, can_focus=True):
    """Classes with a box each, one of them highlighted. A search leaves some out."""

    BINDINGS: ClassVar = [Binding("space", "check", "check")]

    @dataclass
    class Highlighted(Message):
        """Another class is highlighted."""

    @dataclass
    class Toggled(Message):
        """The person wants this class checked, or not any more."""

        class_name: str

    def __init__(self) -> None:
        super().__init__(fixed=1, id="detect-blocks")
        self.known: list[BlockClass] = []
        self.listed: list[BlockClass] = []
        self.chosen: frozenset[str] = frozenset()
        self.wanted = ""  # what is searched for
        self._name: str | None = None  # stays highlighted while others come and go

    @property
    def index(self) -> int:
        names = [one.class_name for one in self.listed]
        return names.index(self._name) if self._name in names else 0

    @property
    def highlighted(self) -> BlockClass | None:
        return self.listed[self.index] if self.listed else None

    def update_from(self, classes: Sequence[BlockClass]) -> None:
        """Show these."""
        self.known = list(classes)
        self.search(self.wanted)

    def search(self, wanted: str) -> None:
        """List only classes with this in their name or their paths, whatever its case."""
        self.wanted = wanted
        word = wanted.strip().lower()
        self.listed = [
            one
            for one in self.known
            if any(word in text.lower() for text in (one.class_name, *one.sample_paths))
        ]
        self._fill()
        self.post_message(self.Highlighted())

    def check(self, chosen: Collection[str]) -> None:
        """Check these classes, and only these."""
        self.chosen = frozenset(chosen)
        self._fill()

    def is_marked(self, index: int) -> bool:
        return bool(self.listed) and index - 1 == self.index

    def go(self, by: int) -> None:
        """Highlight another one."""
        if not self.listed:
            return
        index = max(0, min(self.index + by, len(self.listed) - 1))
        if index != self.index:
            self._name = self.listed[index].class_name
            self._fill()
            self.post_message(self.Highlighted())

    def action_check(self) -> None:
        if (one := self.highlighted) is not None:
            self.post_message(self.Toggled(one.class_name))

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or not 1 <= self.row_at(offset.y) <= len(self.listed):
            return
        self.go(self.row_at(offset.y) - 1 - self.index)
        self.action_check()

    def _fill(self) -> None:
        width = self.scrollable_content_region.width
        if not width:
            return
        if not self.listed:
            self.show([(), (Span("  no class matches", "dim"),)] if self.known else [])
            return
        names = max(len(one.class_name) for one in self.known)
        heading, *rows = block_rows(self.listed, self.chosen, width - 2, names)
        marks = [Span("▸ " if n == self.index else "  ", "accent") for n in range(len(rows))]
        self.show([(Span("  "), *heading), *((m, *r) for m, r in zip(marks, rows, strict=True))])
        seen, top = self.size.height - 1, self.scroll_offset.y
        if seen > 0 and not top <= self.index < top + seen:
            below = self.index >= top + seen
            y = self.index - seen + 1 if below else self.index
            self.scroll_to(y=y, animate=False, force=True)
