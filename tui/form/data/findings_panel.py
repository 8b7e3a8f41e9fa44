"""The findings of the data screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding

from tui.form.data.rows import finding_rows
from tui.text.data_text import groups
from tui.text.format import Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.events import Resize


class FindingsPanel(Lines, can_focus=True):
    """What was skipped, what was converted, and what may surprise."""

    BINDINGS: ClassVar = [
        Binding("j,down", "scroll_down", "scroll down", show=False, id="findings.down"),
        Binding("k,up", "scroll_up", "scroll up", show=False, id="findings.up"),
        Binding(
            "pagedown,space,ctrl+d", "page_down", "page down", show=False, id="findings.page_down"
        ),
        Binding("pageup,ctrl+u", "page_up", "page up", show=False, id="findings.page_up"),
        Binding("home,g", "scroll_home", "first line", show=False, id="findings.first"),
        Binding("end,G,shift+g", "scroll_end", "last line", show=False, id="findings.last"),
    ]

    def __init__(self) -> None:
        super().__init__(id="findings")
        self._report: Mapping[str, Any] | None = None

    def update_from(self, report: Mapping[str, Any]) -> None:
        self._report = report
        self.border_title = " · ".join(group.count for group in groups(report)) or "nothing skipped"
        self._fill()

    def on_resize(self, event: Resize) -> None:
        self._fill()

    def _fill(self) -> None:
        width = self.scrollable_content_region.width
        if self._report is not None and width:
            rows = finding_rows(self._report, width)
            self.show(rows or [(Span("every file is used unchanged", "dim"),)])
