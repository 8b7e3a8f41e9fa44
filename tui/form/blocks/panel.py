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
    """Classes with a box each, one of them highlighted. A search hides some."""

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
        self.block_classes: list[BlockClass] = []
        self.listed: list[BlockClass] = []
        self.chosen: frozenset[str] = frozenset()
        self.search_text = ""
        self._class_name: str | None = None  # stays highlighted while others come and go

    @property
    def count(self) -> int:
        return len(self.listed)

    @property
    def highlighted(self) -> BlockClass | None:
        return self.listed[self.index] if self.listed else None

    def update_from(self, classes: Sequence[BlockClass]) -> None:
        """Show these."""
        self.block_classes = list(classes)
        self.search(self.search_text)

    def search(self, search_text: str) -> None:
        """List only classes with this in their name or their paths, whatever its case."""
        self.search_text = search_text
        word = search_text.strip().lower()
        self.listed = [
            block_class
            for block_class in self.block_classes
            if any(
                word in text.lower() for text in (block_class.class_name, *block_class.sample_paths)
            )
        ]
        names = [block_class.class_name for block_class in self.listed]
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
        if (highlighted := self.highlighted) is not None:
            self.post_message(self.Toggled(highlighted.class_name))

    def pick(self, row: int) -> None:
        if row < self.count:
            super().pick(row)
            self.action_check()

    def nothing(self) -> Sequence[Row]:
        return [(), (Span("  no class matches", "dim"),)] if self.block_classes else []

    def table(self, width: int) -> Sequence[Row]:
        names = max(len(block_class.class_name) for block_class in self.block_classes)
        return block_rows(self.listed, self.chosen, width, names)
