"""A log file on the screen: follows its end, scrolls back, paints only visible lines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.text import Text
from textual.binding import Binding
from textual.cache import LRUCache
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.log.finders import level_of
from tui.log.log_model import Change, LogModel, without_colours
from tui.log.scan import Answer, Looked, Watch

if TYPE_CHECKING:
    import re
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console
    from rich.style import Style
    from textual.events import Resize


# -- paint ----------------------------------------------------------------------------------
# Log lines as strips: colored by level, with marked matches. Pure but for a cache.


GUTTER: Final = 2  # columns of the level's letter and its gap


def paint(
    line: str,
    style: Callable[[str], Style],
    console: Console,
    *,
    gutter: bool = False,
    marked: re.Pattern[str] | None = None,
) -> Strip:
    """Return one line as a strip.

    Args:
        line: Its text, which may contain SGR codes.
        style: Returns the style of a role; `""` is a plain line.
        console: Resolves the styles.
        gutter: Begin with the level's letter.
        marked: The pattern to mark in it.
    """
    printed = without_colours(line)
    level = level_of(printed)
    segments = []
    if gutter:
        segments.append(Segment(level.mark.ljust(GUTTER), style(level.role)))
    spans = [match.span() for match in marked.finditer(printed)] if marked is not None else []
    if "\x1b" not in line and not spans:
        return Strip([*segments, Segment(line, style(level.role))])
    base = style("")
    if "\x1b" in line:
        text = Text.from_ansi(line)
    else:
        text, base = Text(line), style(level.role)
    for start, stop in spans:
        text.stylize(style("match"), start, stop)
    segments += [
        Segment(piece, base + own if own else base)
        for piece, own, _ in text.render(console)
        if piece
    ]
    return Strip(segments)


def folded(strip: Strip, width: int, indent: int = 0) -> list[Strip]:
    """Wrap a strip into pieces of at most `width` columns.

    All but the first are indented by `indent`.
    """
    length = strip.cell_length
    if length <= width or width <= indent:
        return [strip]
    cuts = [0, *range(width, length, width - indent), length]
    pieces = [strip.crop(a, b) for a, b in pairwise(cuts)]
    room = Strip([Segment(" " * indent)])
    return [pieces[0], *(Strip.join([room, piece]) for piece in pieces[1:])] if indent else pieces


def pieces_of(length: int, width: int, indent: int = 0) -> int:
    """Return the number of pieces that `folded` makes of this many columns."""
    if length <= width or width <= indent:
        return 1
    return 1 + -(-(length - width) // (width - indent))


# -- log view -------------------------------------------------------------------------------


_LOOK_EVERY: Final = 0.25  # seconds; following faster costs an SSH link more than it is worth


class LogView(ScrollView, can_focus=True):
    """Shows one log file. `following` stays at the end; scrolling back ends that."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"log--bad", "log--warn", "log--dim"}
    DEFAULT_CSS = """
    LogView {
        scrollbar-size: 0 0;
        /* A scrollbar is painted several times for each growth: as many bytes as the text. */
        &.-held { scrollbar-size: 0 1; }
        .log--bad { color: $error; }
        .log--warn { color: $warning; }
        .log--dim { color: $foreground 62%; }
    }
    """
    BINDINGS: ClassVar = [
        Binding("j", "scroll_down", show=False, tooltip="Scroll down", id="log_panel.down"),
        Binding("k", "scroll_up", show=False, tooltip="Scroll up", id="log_panel.up"),
        Binding(
            "g", "scroll_home", show=False, tooltip="Scroll to the first line", id="log_panel.first"
        ),
        Binding(
            "G,shift+g",
            "scroll_end",
            show=False,
            tooltip="Scroll to the last line",
            id="log_panel.last",
        ),
        Binding(
            "ctrl+d",
            "page_down",
            show=False,
            tooltip="Scroll a page down",
            id="log_panel.page_down",
        ),
        Binding(
            "ctrl+u", "page_up", show=False, tooltip="Scroll a page up", id="log_panel.page_up"
        ),
    ]
    following: reactive[bool] = reactive(True)

    @dataclass
    class Watched(Message):
        """A message of the watching thread."""

        watch: Watch
        what: Looked | Answer

    def __init__(
        self,
        resting: Callable[[], bool] = lambda: False,
        *,
        id: str = "log",  # noqa: A002
    ) -> None:
        """
        Args:
            resting: Whether nobody can see the log; called in the watching thread.
        """
        super().__init__(id=id)
        self._resting = resting
        self.model: LogModel | None = None
        self.watching: Watch | None = None
        self._strips: LRUCache[tuple[int, int], Strip] = LRUCache(2000)
        self._palette: dict[str, Style] = {}
        self._widest = 0
        self._moving = False
        self._title = ""

    # -- what is shown ---------------------------------------------------------------------

    def open(self, path: Path | None, title: str) -> None:
        """Show another file from its end; None shows nothing. `title` is markup."""
        if title != self._title:  # `border_title` returns different markup than it was given
            self._title = self.border_title = title
        if self.model is not None and self.model.path == path:
            return
        self.close()
        self.model = LogModel(path) if path is not None else None
        self.watching = None
        self._start_over()
        self.following = True
        if self.model is not None:
            self.watching = Watch(self.model, _LOOK_EVERY, self._resting)
            self.run_worker(
                partial(self.watching.run, partial(self._tell, self.watching)),
                group="log",
                exclusive=True,
                exit_on_error=False,
                thread=True,
            )

    def close(self) -> None:
        """End the watching thread."""
        if self.watching is not None:
            self.watching.close()

    def on_unmount(self) -> None:
        self.close()

    def _tell(self, watch: Watch, what: Looked | Answer) -> None:
        """Post a message, in the watching thread."""
        self.post_message(self.Watched(watch, what))

    def on_log_view_watched(self, event: Watched) -> None:
        event.stop()
        if event.watch is not self.watching:
            return
        if isinstance(event.what, Answer):
            self.take_answer(event.what)
        elif event.what.problem:
            self.border_subtitle = event.what.problem
        else:
            self.take_looked(event.what)

    def take_looked(self, looked: Looked) -> None:
        """Handle a change of the file: more lines, or other lines."""
        if looked.change is Change.REPLACED:
            self._start_over()
        self.grow(looked.added)

    def take_answer(self, answer: Answer) -> None:
        """Handle search results; the panel requests none."""

    @property
    def count(self) -> int:
        """Return the number of lines to show."""
        return len(self.model) if self.model is not None else 0

    def grow(self, added: int = 0) -> None:
        """Show the current lines; `added` of them are new at the front."""
        before = self.virtual_size.height
        self._move(lambda: self._resize_to(self.count))
        if added:
            self._move(lambda: self.scroll_to(y=self.scroll_y + added, animate=False, force=True))
        if self.following:
            self._to_end()
        last_seen = self.scroll_offset.y + self.size.height
        if added or before <= last_seen or self.following:
            self.refresh()
        self._say_where()

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        base = self._style("")
        width = self.size.width
        if self.model is None or index >= len(self.model):
            return Strip.blank(width, base)
        strip = self._strip(self.model, index)
        if strip.cell_length > self._widest:
            self._widest = strip.cell_length
            self.call_later(self._resize_to, len(self.model))
        left = self.scroll_offset.x
        return strip.crop_extend(left, left + width, base).simplify()

    # -- moving ----------------------------------------------------------------------------

    def toggle_follow(self) -> None:
        self.following = not self.following
        if self.following:
            self._to_end()

    def action_scroll_end(self) -> None:
        self.following = True
        self._to_end()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._moving:
            self.following = round(new_value) >= self.max_scroll_y
            self._say_where()

    def watch_following(self, following: bool) -> None:
        self.set_class(not following, "-held")
        self.vertical_scrollbar.position = self.scroll_y  # it was not mounted yet
        self._say_where()

    def on_resize(self, event: Resize) -> None:
        if self.following:
            self._to_end()

    def notify_style_update(self) -> None:
        self._palette.clear()
        self._strips.clear()
        super().notify_style_update()

    # -- inside ----------------------------------------------------------------------------

    def _move(self, change: Callable[[], object]) -> None:
        """Scroll without changing whether the end is followed."""
        self._moving = True
        try:
            change()
        finally:
            self._moving = False

    def _to_end(self) -> None:
        # `scroll_end` would wait for a refresh; lines that arrive meanwhile would look as if the
        # user
        # had scrolled back.
        self._move(lambda: self.scroll_to(y=self.max_scroll_y, animate=False, force=True))

    def _start_over(self) -> None:
        self._strips.clear()
        self._widest = 0
        self._move(lambda: self._resize_to(0))
        self._say_where()
        self.refresh()

    def _resize_to(self, lines: int) -> None:
        size = Size(self._widest, lines)
        if size != self.virtual_size:
            self.virtual_size = size

    def _say_where(self) -> None:
        count = self.virtual_size.height
        if self.model is None or not count:
            text = "" if self.model is None else "no output yet"
        elif self.following:
            text = "following"
        else:
            last = min(count, self.scroll_offset.y + self.size.height)
            text = f"paused at line {last} of {count} · f: follow"
        if self.border_subtitle != text:
            self.border_subtitle = text

    def _strip(self, model: LogModel, index: int) -> Strip:
        key = model.raw(index)
        strip = self._strips.get(key)
        if strip is None:
            strip = self._strips[key] = self._paint(model.line(index))
        return strip

    def _paint(self, line: str) -> Strip:
        return paint(line, self._style, self.app.console)

    def _style(self, role: str) -> Style:
        if role not in self._palette:
            style = self.visual_style
            if role:
                style += self.get_visual_style(f"log--{role}", partial=True)
            self._palette[role] = style.rich_style
        return self._palette[role]
