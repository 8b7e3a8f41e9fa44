"""The list of the block modal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.message import Message

from tui.form.blocks.rows import block_rows
from tui.text.format import Span
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs.models.blocks.detection import BlockClass
    from tui.text.format import Row


class BlocksPanel(PickList):
    """Classes with a box each, one of them highlighted. A search leaves some out."""

    BINDINGS: ClassVar = [
        Binding(
            "space",
            "check",
            "check",
            id="detect.check",
            tooltip="Check or uncheck the selected class",
        )
    ]

    @dataclass
    class Toggled(Message):
        """The person wants this class checked, or not any more."""

        class_name: str

    def __init__(self) -> None:
        super().__init__(id="detect-blocks")
        self.known: list[BlockClass] = []
        self.listed: list[BlockClass] = []
        self.chosen: frozenset[str] = frozenset()
        self.wanted = ""  # what is searched for
        self._class_name: str | None = None  # stays highlighted while others come and go

    @property
    def count(self) -> int:
        return len(self.listed)

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
        names = [one.class_name for one in self.listed]
        self.index = names.index(self._class_name) if self._class_name in names else 0
        self.fill()
        self.post_message(self.Highlighted())

    def check(self, chosen: Collection[str]) -> None:
        """Check these classes, and only these."""
        self.chosen = frozenset(chosen)
        self.fill()

    def highlight(self, index: int) -> None:
        super().highlight(index)
        self._class_name = self.listed[index].class_name

    def action_check(self) -> None:
        if (one := self.highlighted) is not None:
            self.post_message(self.Toggled(one.class_name))

    def pick(self, row: int) -> None:
        if row < self.count:
            super().pick(row)
            self.action_check()

    def nothing(self) -> Sequence[Row]:
        return [(), (Span("  no class matches", "dim"),)] if self.known else []

    def table(self, width: int) -> Sequence[Row]:
        names = max(len(one.class_name) for one in self.known)
        return block_rows(self.listed, self.chosen, width, names)
