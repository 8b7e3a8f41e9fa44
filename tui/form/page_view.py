"""One page of the form: its fields under headings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.containers import Container, Vertical
from textual.widgets import Static

from tui.form.beside.fit import FitBars
from tui.form.fields.field_row import FieldRow
from tui.form.fields.pages import SHOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

    from tui.form.fields.pages import Page
    from tui.look.snapshot import Snapshot


class PageView(Container):
    """Made when the page is first turned to: a hundred fields take their time. `rows` by key.

    Args:
        page: Which one.
        values: What its fields hold.
        snapshot: The machine as it is.
        reasons: Why fields do not apply, by key.
    """

    def __init__(
        self,
        page: Page,
        values: Mapping[str, Any],
        snapshot: Snapshot,
        reasons: Mapping[str, str],
    ) -> None:
        super().__init__(id=f"page-{page.name}", classes="page")
        self.page = page
        self.rows = {
            name: FieldRow(
                name,
                values.get(name),
                snapshot,
                off=reasons.get(name, ""),
                detailed=name not in SHOWN,
            )
            for name in page.fields
            if name != "gpus" or snapshot.gpus
        }

    def compose(self) -> ComposeResult:
        for heading, names in self.page.groups.items():
            with Vertical(classes="group", id=f"group-{names[0]}") as group:
                group.border_title = heading
                yield from (self.rows[name] for name in names if name in self.rows)
                if "num_processes" in names:
                    yield Static("", id="cascade", markup=False)
                    yield FitBars()
