"""A panel of colored lines that repaints only changed lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from rich.cells import cell_len
from rich.segment import Segment
from textual.filter import ANSIToTruecolor
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.text.format import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.style import Style
    from textual.events import Click, Resize
    from textual.filter import LineFilter

    from tui.text.format import Row


ROLES = (
    "dim",
    "faint",
    "strong",
    "title",
    "good",
    "warn",
    "bad",
    "bar",
    "accent",
    "raw",
    "smooth",
)


class Lines(ScrollView, can_focus=False, inherit_bindings=False):
    """Shows rows of spans. The first `fixed` rows do not scroll.

    Textual does not compare cells: refreshed ones are sent to the terminal. `show` therefore
    compares rows, and refreshes those that differ.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"lines--{role}" for role in (*ROLES, "cursor")}
    DEFAULT_CSS = """
    Lines {
        height: auto;
        overflow-x: hidden;
        scrollbar-size-vertical: 1;
        scrollbar-gutter: auto;
        .lines--dim { color: $foreground 62%; }
        .lines--faint { color: $foreground 26%; }
        .lines--strong { color: $foreground; text-style: bold; }
        .lines--title { color: $secondary; }
        .lines--good { color: $success; }
        .lines--warn { color: $warning; }
        .lines--bad { color: $error; text-style: bold; }
        .lines--bar { color: $primary; }
        .lines--accent { color: $accent; }
        .lines--raw { color: $primary 42%; }
        .lines--smooth { color: $accent; text-style: bold; }
        .lines--cursor { background: $primary 16%; }
        &:focus .lines--cursor { background: $primary 28%; }
        &:ansi .lines--cursor { background: ansi_cyan; color: ansi_black; }
        &:focus:ansi .lines--cursor {
            background: $block-cursor-background;
            color: $block-cursor-foreground;
        }
    }
    """

    _border_only = False  # a class attribute, since widgets refresh themselves in their constructor

    def __init__(self, *, fixed: int = 0, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self.rows: tuple[Row, ...] = ()
        self.fixed = fixed
        self._titles = ("", "")
        self._palette: dict[tuple[str, bool], Style] = {}

    def show(self, rows: Sequence[Row]) -> None:
        """Replace the rows; unchanged lines are not repainted."""
        before, self.rows = self.rows, tuple(rows)
        if len(before) != len(self.rows):
            self.virtual_size = Size(self.size.width, len(self.rows))
            self.refresh(layout=True)
            return
        changed = {
            index: changed_cells(old, new)
            for index, (old, new) in enumerate(zip(before, self.rows, strict=True))
            if old is not new and old != new
        }
        self.repaint(changed)

    def repaint(self, rows: Mapping[int, range]) -> None:
        """Repaint some cells of visible rows."""
        regions, height = [], self.size.height
        for index, cells in rows.items():
            y = index if index < self.fixed else index - self.scroll_offset.y
            if (0 if index < self.fixed else self.fixed) <= y < height:
                regions.append(Region(cells.start, y, len(cells), 1))
        if regions:
            self.refresh(*regions)

    def show_titles(self, title: str, subtitle: str = "") -> None:
        """Set the border titles; nothing else is repainted.

        Args:
            title: The upper title, in Textual's markup.
            subtitle: The lower title.
        """
        if (title, subtitle) == self._titles:
            return
        self._titles = title, subtitle
        self._border_only = True
        self.border_title, self.border_subtitle = title, subtitle
        self._border_only = False

    def refresh(
        self,
        *regions: Region,
        repaint: bool = True,
        layout: bool = False,
        recompose: bool = False,
    ) -> Self:
        """See `Widget.refresh`; a change of the border title calls it for the whole widget."""
        if self._border_only:
            left, top = self.content_offset
            width, height = self.outer_size
            regions = tuple(Region(-left, y - top, width, 1) for y in (0, height - 1))
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def row_at(self, y: int) -> int:
        """Return the row painted in the widget's line `y`."""
        return y if y < self.fixed else y + self.scroll_offset.y

    def is_marked(self, index: int) -> bool:
        """Return whether a row is painted as the selected one."""
        return False

    def render_line(self, y: int) -> Strip:
        index, width = self.row_at(y), self.size.width
        if index >= len(self.rows):
            return Strip.blank(width, self._style("", False))
        marked = self.is_marked(index)
        segments = [Segment(span.text, self._style(span.role, marked)) for span in self.rows[index]]
        cells = sum(cell_len(segment.text) for segment in segments)
        if cells < width:
            segments.append(Segment(" " * (width - cells), self._style("", marked)))
        strip = Strip(segments, max(cells, width))
        return strip if cells <= width else strip.crop(0, width)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Drop the filter for ANSI colors and dim text, which these lines do not use."""
        filters = super().get_line_filters()
        return [each for each in filters if not isinstance(each, ANSIToTruecolor)]

    def notify_style_update(self) -> None:
        self._palette.clear()
        super().notify_style_update()

    def _style(self, role: str, marked: bool) -> Style:
        key = (role, marked)
        if key not in self._palette:
            names = ["cursor"] * marked + [role] * bool(role)
            if self.app.current_theme.ansi:
                # Its colors have no shades: a role's color may be that of the cursor.
                names.reverse()
            style = self.visual_style
            for name in names:
                style += self.get_visual_style(f"lines--{name}", partial=True)
            self._palette[key] = style.rich_style
        return self._palette[key]

    def watch_has_focus(self, focused: bool) -> None:
        super().watch_has_focus(focused)
        self._palette.clear()


def changed_cells(old: Row, new: Row) -> range:
    """Return the first and last cell whose span differs.

    Textual draws a line up to the last cell to be painted, so rows have what changes most often
    first. A terminal is sent even less, see `terminal_cells`; a browser is not.
    """
    same = start = 0
    for before, after in zip(old, new, strict=False):
        if before != after:
            break
        same += 1
        start += _cells(after.text)
    before_end, after_end = (
        sum([_cells(span.text) for span in row[same:]], start) for row in (old, new)
    )
    end = max(before_end, after_end)
    if before_end == after_end:  # the rest of the line has not moved
        for before, after in zip(reversed(old[same:]), reversed(new[same:]), strict=False):
            if before != after:
                break
            end -= _cells(after.text)
    return range(start, max(end, start + 1))


def _cells(text: str) -> int:
    return len(text) if text.isascii() and text.isprintable() else cell_len(text)


# -- pick list ------------------------------------------------------------------------------
# Rows under a heading, one of them highlighted by keys and clicks.


class PickList(Lines, can_focus=True):
    """A list to pick from. Subclasses implement `count` and `table`.

    Attributes:
        index: The number of the highlighted row, excluding the heading.
    """

    @dataclass
    class Highlighted(Message):
        """Another row is highlighted, or the same one has changed."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(fixed=1, id=id)
        self.index = 0

    @property
    def count(self) -> int:
        """Return the number of rows to pick from."""
        raise NotImplementedError

    def table(self, width: int) -> Sequence[Row]:
        """Return the heading, and a row for each item; called only if there are items."""
        raise NotImplementedError

    def nothing(self) -> Sequence[Row]:
        """Return the rows shown when the list is empty."""
        return []

    def highlight(self, index: int) -> None:
        """Handle a change of the highlighted row."""
        self.index = index

    def pick(self, row: int) -> None:
        """Select a clicked row; below the last one, the last row."""
        self.go(row - self.index)

    def go(self, by: int) -> None:
        """Highlight another row."""
        index = max(0, min(self.index + by, self.count - 1))
        if index != self.index:
            self.highlight(index)
            self.fill()
            self.post_message(self.Highlighted())

    def is_marked(self, index: int) -> bool:
        return self.count > 0 and index - 1 == self.index

    def on_resize(self, event: Resize) -> None:
        self.fill()

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and self.row_at(offset.y) >= 1:
            self.pick(self.row_at(offset.y) - 1)

    def fill(self) -> None:
        """Show the rows, and scroll to the highlighted one."""
        width = self.scrollable_content_region.width
        if not width:
            return
        if not self.count:
            self.show(self.nothing())
            return
        heading, *rows = self.table(width - 2)
        marks = [Span("▸ " if n == self.index else "  ", "accent") for n in range(len(rows))]
        self.show([(Span("  "), *heading), *((m, *r) for m, r in zip(marks, rows, strict=True))])
        seen, top = self.size.height - 1, self.scroll_offset.y
        if seen > 0 and not top <= self.index < top + seen:
            below = self.index >= top + seen
            y = self.index - seen + 1 if below else self.index
            self.scroll_to(y=y, animate=False, force=True)
