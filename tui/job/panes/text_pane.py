"""Scrollable rows: the base of the text tabs."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Final

from tui.text.format import Span, plain
from tui.widgets.lines import Lines
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.events import Resize

    from tui.look.job_look import Look
    from tui.text.format import Row


# -- text rows ------------------------------------------------------------------------------
# Rows of text that several tabs use. Pure.


LABEL: Final = 12  # columns for a fact's name


def heading(text: str) -> Row:
    return (Span(text, "title"),)


def fact(name: str, words: str, width: int, role: str = "", *, label: int = LABEL) -> list[Row]:
    """Return `name        words` in as many rows as needed; `label` columns for the name."""
    rows: list[Row] = []
    for paragraph in words.splitlines() or [""]:
        # Break paths as late as possible, because users copy them.
        lines = textwrap.wrap(
            paragraph, max(20, width - label), break_on_hyphens=False, drop_whitespace=True
        )
        for line in lines or [""]:
            before = "" if rows else name
            rows.append((Span(before.ljust(label), "dim"), Span(line, role)))
    return rows


def clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


def day(t: float) -> str:
    return time.strftime("%A, %Y-%m-%d", time.localtime(t))


def moment(t: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) if t else "–"


# -- text pane ------------------------------------------------------------------------------


class ScrolledLines(Lines, can_focus=True):
    """Lines that fill the available room."""

    DEFAULT_CSS = "ScrolledLines { height: 1fr; padding: 0 1; }"


class TextPane(Pane):
    """Shows rows built from the newest data. Subclasses implement `rows_of`."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self.lines = ScrolledLines(id=f"{id}-lines")
        self.look: Look | None = None

    def compose(self) -> ComposeResult:
        yield self.lines

    def rows_of(self, look: Look, width: int) -> Sequence[Row]:
        """Return the text at a width."""
        raise NotImplementedError

    def update_from(self, look: Look) -> None:
        self.look = look
        self.fill()

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.fill)

    def fill(self) -> None:
        """Show the rows again; unchanged rows are not repainted."""
        width = self.lines.scrollable_content_region.width
        if self.look is not None and width:
            self.lines.show(self.rows_of(self.look, width))

    def action_scroll_by(self, lines: int) -> None:
        self.lines.scroll_relative(y=lines, animate=False)

    def as_text(self) -> str:
        """Return everything shown."""
        return "\n".join(plain(row).rstrip() for row in self.lines.rows)
