"""The list of the fleet screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tui.fleet.rows import box_rows
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.fleet.link import BoxView
    from tui.text.format import Row


class BoxesPanel(PickList):
    """The boxes in the order of machines.yaml, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="boxes")
        self.views: tuple[BoxView, ...] = ()

    @property
    def count(self) -> int:
        return len(self.views)

    @property
    def highlighted(self) -> BoxView | None:
        return self.views[self.index] if self.views else None

    def update_from(self, views: tuple[BoxView, ...]) -> None:
        self.views = views
        self.fill()

    def table(self, width: int) -> Sequence[Row]:
        return box_rows(self.views, time.monotonic(), width)
