"""The log view for reading: a cursor, folded lines, marked matches, filtered lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from tui.log.log_model import without_colours
from tui.log.log_view import GUTTER, LogView, folded, paint, pieces_of
from tui.log.scan import Hits, nearest

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from textual.events import Click, Resize

    from tui.log.scan import Answer, Looked


# -- pages ----------------------------------------------------------------------------------
# Which lines fill a page when long ones are folded into several rows. Pure.
#
# `rows_of` gives the rows of a line. Lines are read from the current page only, so a page of
# a log with millions of lines costs as much as one of a short log.


Page = list[tuple[int, int]]  # for each row of the screen, a line and the number of its row


def page(top: int, height: int, count: int, rows_of: Callable[[int], int]) -> Page:
    """Return the rows starting at line `top`.

    At the end of the log, they may be fewer than `height`.
    """
    rows: Page = []
    line = top
    while line < count and len(rows) < height:
        rows += [(line, row) for row in range(rows_of(line))]
        line += 1
    return rows[:height]


def last_page(height: int, count: int, rows_of: Callable[[int], int]) -> Page:
    """Return the rows that end with the end of the log."""
    top = top_for(count - 1, height, rows_of)
    rows = page(top, height, count, rows_of) if count else []
    while top > 0 and len(rows) < height:
        top -= 1
        rows = [(top, row) for row in range(rows_of(top))] + rows
    if rows and rows[-1][0] == count - 1:  # a last line taller than the page shows its end
        end = rows_of(count - 1)
        rows += [(count - 1, row) for row in range(rows[-1][1] + 1, end)]
    return rows[-height:] if height else []


def top_for(line: int, height: int, rows_of: Callable[[int], int]) -> int:
    """Return the first line of a page that ends with all of `line`."""
    top, left = max(0, line), height - (rows_of(line) if line >= 0 else 0)
    while top > 0 and (left := left - rows_of(top - 1)) >= 0:
        top -= 1
    return top


def last_top(height: int, count: int, rows_of: Callable[[int], int]) -> int:
    """Return the last line that a page may begin with; that page shows the log's end."""
    return top_for(count - 1, height, rows_of)


# -- reader ---------------------------------------------------------------------------------


_MOST_COPIED = 50_000  # lines


class LogReader(LogView, inherit_bindings=False):
    """Shows log lines, optionally filtered. The screen owns the filter.

    A row is a displayed line: of the file, or of `only`. While the end is followed there is no
    cursor; moving away from the end sets it.

    Attributes:
        only: The lines to show, if not all.
        cursor: The row that keys move.
        origin: The row at the other end of the selection.
        marked: The pattern marked in the lines.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {"log--match", "log--cursor", "log--selected"}
    DEFAULT_CSS = """
    LogReader {
        height: 1fr;
        background: $background;
        scrollbar-size: 0 1;
        .log--match { background: $accent; color: $background; }
        .log--cursor { background: $primary 28%; }
        .log--selected { background: $primary 16%; }
        &:ansi .log--cursor { background: ansi_blue; }
        &:ansi .log--selected { background: ansi_cyan; }
    }
    """
    wrap: reactive[bool] = reactive(False)

    @dataclass
    class Moved(Message):
        """The displayed position has changed."""

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, LogReader.Moved)

    @dataclass
    class Answered(Message):
        """An answer of the watching thread."""

        answer: Answer

    def __init__(self) -> None:
        super().__init__(id="reader")
        self.only: Hits | None = None
        self.cursor = 0
        self.origin: int | None = None
        self.marked: re.Pattern[str] | None = None
        self._marked_up_to = 0
        self._page: tuple[object, Page] = None, []

    # -- rows ------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self.only) if self.only is not None else super().count

    @property
    def row(self) -> int:
        """Return the current row: the cursor, or the end that is followed."""
        return max(0, self.count - 1) if self.following else min(self.cursor, self.count - 1)

    def line_of(self, row: int) -> int:
        """Return the line number of a row in the file, from 0."""
        if self.only is None or self.model is None:
            return row
        return self.model.index_of(self.only[row]) if 0 <= row < len(self.only) else 0

    def offset_of(self, row: int) -> int:
        """Return the first byte of a row's line."""
        if self.model is None or not 0 <= row < self.count:
            return 0
        return self.only[row] if self.only is not None else self.model.raw(row)[0]

    def row_of(self, offset: int) -> int:
        """Return the row of the line that begins at this byte, or the nearest before it."""
        if self.model is None:
            return 0
        if self.only is not None:
            return nearest(self.only, offset)
        return self.model.index_of(offset)

    def show_only(self, hits: Hits | None, offset: int | None) -> None:
        """Show these lines, or all.

        Args:
            hits: The lines.
            offset: The line to go to; None stays at the current one.
        """
        before, self.only = self.only, hits
        if offset is not None:
            self.origin = None
            if self.following:
                self.grow()
            else:
                self._move(lambda: self._resize_to(self.count))
                self.go_to(self.row_of(offset))
            self.refresh()
            return
        shift = hits.n_older - before.n_older if hits is not None and before is not None else 0
        self.grow(shift)

    # -- what the thread tells -------------------------------------------------------------

    def take_looked(self, looked: Looked) -> None:
        super().take_looked(looked)
        self.post_message(self.Moved())

    def take_answer(self, answer: Answer) -> None:
        self.post_message(self.Answered(answer))

    def grow(self, added: int = 0) -> None:
        self.cursor += added
        if self.origin is not None:
            self.origin += added
        super().grow(added)

    def _start_over(self) -> None:
        self.only = None if self.only is None else Hits()
        self.cursor, self.origin = 0, None
        super()._start_over()

    # -- painting --------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        base, width = self._style(""), self.size.width
        rows = self._rows()
        if self.model is None or y >= len(rows):
            return Strip.blank(width, base)
        row, piece = rows[y]
        strip = self._strip(self.model, self.line_of(row))
        if self.wrap:
            strip = folded(strip, width, GUTTER)[piece].adjust_cell_length(width, base)
        else:
            if strip.cell_length > self._widest:
                self._widest = strip.cell_length
                self.call_later(self._resize_to, self.count)
            left = self.scroll_offset.x
            strip = strip.crop_extend(left, left + width, base)
        return self._over(strip, self._role(row)).simplify()

    def _over(self, strip: Strip, role: str) -> Strip:
        """Paint a role's background behind a line, except where the line sets its own."""
        if not role:
            return strip
        behind = Style(bgcolor=self.get_visual_style(f"log--{role}").rich_style.bgcolor)
        plain = self._style("").bgcolor
        return Strip(
            [
                Segment(text, (style or behind) + behind)
                if style is None or style.bgcolor == plain
                else Segment(text, style)
                for text, style, _ in strip
            ],
            strip.cell_length,
        )

    def _role(self, row: int) -> str:
        if self.following:
            return ""
        if row == self.cursor:
            return "cursor"
        low, high = self.selected
        return "selected" if self.origin is not None and low <= row <= high else ""

    def _style(self, role: str) -> Style:
        if role == "match":  # a partial style has no opaque background
            return self.get_visual_style("log--match").rich_style
        return super()._style(role)

    def _rows(self) -> Page:
        """Return the rows of the screen."""
        top, height, count = self.scroll_offset.y, self.size.height, self.count
        key = (top, self.size, count, self.wrap, self.model and self.model.extent)
        if self._page[0] != key:
            if self.wrap and (self.following or top >= self.max_scroll_y):
                rows = last_page(height, count, self._rows_of)
            else:
                rows = page(top, height, count, self._rows_of)
            self._page = key, rows
        return self._page[1]

    def _rows_of(self, row: int) -> int:
        if not self.wrap or self.model is None:
            return 1
        strip = self._strip(self.model, self.line_of(row))
        return pieces_of(strip.cell_length, self.size.width, GUTTER)

    def _paint(self, line: str) -> Strip:
        marked = self.marked if len(line) <= self._marked_up_to else None
        return paint(line, self._style, self.app.console, gutter=True, marked=marked)

    def mark(self, pattern: re.Pattern[str] | None, up_to: int) -> None:
        """Mark matches in every line of at most this many characters."""
        self.marked, self._marked_up_to = pattern, up_to
        self._strips.clear()
        self.refresh()

    def _resize_to(self, lines: int) -> None:
        self._page = None, []
        if self.wrap and self.size.height:
            top = last_top(self.size.height, lines, self._rows_of)
            self.virtual_size = Size(self.size.width, top + self.size.height)
        else:
            super()._resize_to(lines)

    def _say_where(self) -> None:
        self.post_message(self.Moved())

    # -- moving ----------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Return how many lines a page moves by."""
        return max(1, len({row for row, _ in self._rows()}) - 1)

    def go(self, by: int) -> None:
        """Move the cursor; past the end, follow it."""
        at = self.row
        if by > 0 and at + by >= self.count:
            self.action_scroll_end()
        else:
            self.go_to(max(0, at + by), jump=False)

    def go_to(self, row: int, *, jump: bool = True) -> None:
        """Move the cursor to a row and show it.

        Args:
            row: The row.
            jump: If it is off screen, show its surroundings too.
        """
        self.following = False
        self.cursor = max(0, min(row, self.count - 1))
        height = self.size.height
        shown = [row for row, _ in self._rows()]
        if not shown or not shown[0] <= self.cursor <= shown[-1] or self._cut_off(shown):
            if jump or not shown:
                top = self.cursor - height // 3
            elif self.cursor <= shown[0]:
                top = self.cursor
            else:
                top = top_for(self.cursor, height, self._rows_of)
            self._move(lambda: self.scroll_to(y=top, animate=False, force=True))
        self.refresh()
        self.post_message(self.Moved())

    def _cut_off(self, shown: list[int]) -> bool:
        """Return whether rows of the cursor's line are off screen although they would fit."""
        height = self._rows_of(self.cursor)
        return shown.count(self.cursor) < min(height, self.size.height)

    def toggle_follow(self) -> None:
        if self.following:
            self.go_to(self.count - 1)
        else:
            self.action_scroll_end()

    def action_scroll_end(self) -> None:
        super().action_scroll_end()
        self.refresh()
        self.post_message(self.Moved())

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._moving and not self.following:  # by the wheel or the scrollbar
            shown = [row for row, _ in self._rows()]
            if shown:
                self.cursor = max(shown[0], min(self.cursor, shown[-1]))

    def watch_following(self, following: bool) -> None:
        if not following:
            self.cursor = min(max(self.cursor, self._last_shown()), max(0, self.count - 1))
        self.vertical_scrollbar.position = self.scroll_y
        self.post_message(self.Moved())

    def _last_shown(self) -> int:
        rows = self._rows()
        return rows[-1][0] if rows else 0

    def watch_wrap(self) -> None:
        row = self.row
        if self.wrap:
            self._move(lambda: self.scroll_to(x=0, animate=False, force=True))
        self._widest = 0
        self._move(lambda: self._resize_to(self.count))
        if self.following:
            self._to_end()
        elif self.count:
            self.go_to(row)
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        self._move(lambda: self._resize_to(self.count))
        super().on_resize(event)
        if not self.following and self.count:
            self.go_to(self.cursor)

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        rows = self._rows()
        if offset is None or offset.y >= len(rows):
            return
        if event.shift and self.origin is None:
            self.origin = self.row
        self.go_to(rows[offset.y][0])

    # -- copying ---------------------------------------------------------------------------

    @property
    def selected(self) -> tuple[int, int]:
        """Return the first and last selected row."""
        other = self.row if self.origin is None else min(self.origin, max(0, self.count - 1))
        return min(other, self.row), max(other, self.row)

    def select(self, on: bool) -> None:
        """Start a selection at the cursor, or clear it."""
        if on:
            self.go_to(self.row)
            self.origin = self.row
        else:
            self.origin = None
        self.refresh()
        self.post_message(self.Moved())

    def selected_text(self) -> str:
        """Return the selected lines, or the line under the cursor, without SGR codes."""
        if self.model is None or not self.count:
            return ""
        low, high = self.selected
        high = min(high, low + _MOST_COPIED - 1)
        lines = (self.model.line(self.line_of(row)) for row in range(low, high + 1))
        return "\n".join(without_colours(line) for line in lines)
