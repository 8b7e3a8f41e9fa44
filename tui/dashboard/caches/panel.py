"""The list of the caches screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.text.cache_text import cache_rows
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.service.caches import Cache
    from tui.text.format import Row


class CachesPanel(PickList):
    """The caches, one a row, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="caches")
        self.caches: list[Cache] = []

    @property
    def count(self) -> int:
        return len(self.caches)

    @property
    def highlighted(self) -> Cache | None:
        return self.caches[self.index] if self.caches else None

    def update_from(self, caches: Sequence[Cache]) -> None:
        self.caches = list(caches)
        self.index = max(0, min(self.index, len(self.caches) - 1))
        self.fill()
        self.post_message(self.Highlighted())

    def pick(self, row: int) -> None:
        if row < self.count:
            super().pick(row)

    def table(self, width: int) -> Sequence[Row]:
        return cache_rows(self.caches, width)
