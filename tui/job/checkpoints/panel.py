"""The list of the checkpoints screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tui.job.checkpoints.rows import checkpoint_rows
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.run.checkpoint_list import Listed
    from tui.text.format import Row


class CheckpointsPanel(PickList):
    """The checkpoints, the newest first, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="checkpoints")
        self.listed: list[Listed] = []

    @property
    def count(self) -> int:
        return len(self.listed)

    @property
    def highlighted(self) -> Listed | None:
        return self.listed[self.index] if self.listed else None

    def update_from(self, listed: Sequence[Listed]) -> None:
        """Show these; given oldest first. What is highlighted stays so while others come and go."""
        before = self.highlighted
        self.listed = list(reversed(listed))
        names = [checkpoint.name for checkpoint in self.listed]
        if before is not None and before.name in names:
            self.index = names.index(before.name)
        elif before is not None:  # what has come into the place of one that is gone
            self.index = max(0, min(self.index, len(names) - 1))
        else:  # the one that a resume takes
            self.index = next((n for n, checkpoint in enumerate(self.listed) if checkpoint.next), 0)
        self.fill()
        if self.highlighted != before:
            self.post_message(self.Highlighted())

    def table(self, width: int) -> Sequence[Row]:
        return checkpoint_rows(self.listed, width, time.time())
