"""The buckets of the data screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tui.form.data.rows import bucket_rows
from tui.text.data_text import some
from tui.widgets.pick_list import PickList

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tui.text.format import Row


class BucketsPanel(PickList):
    """The buckets, one a row, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="buckets")
        self._report: Mapping[str, Any] | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._report["buckets"]) if self._report else 0

    def update_from(self, report: Mapping[str, Any]) -> None:
        self._report = report
        self.index = min(self.index, self.count - 1)
        self.border_title = some(self.count, "bucket")
        self.fill()

    def table(self, width: int) -> Sequence[Row]:
        assert self._report is not None, "some buckets"
        return bucket_rows(self._report["buckets"], width)
