"""A log file on the screen: follows its end, scrolls back, paints only what is seen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from threading import Event
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

from tui.logmodel import Change, LogModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.style import Style
    from textual.events import Resize

_LOOK_EVERY: Final = 0.25  # seconds; following faster costs an SSH link more than it tells
_LEVELS: Final = (
    (re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent|^\w*(Error|Exception):"),
     "bad"),
    (re.compile(r"\bWARN(ING)?\b|Warning:"), "warn"),
    (re.compile(r"\bDEBUG\b"), "dim"),
)  # fmt: skip


class LogView(ScrollView, can_focus=True):
    """Shows one log file. `following` sticks to its end; scrolling back lets go of it."""

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
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
        Binding("g", "scroll_home", show=False),
        Binding("G,shift+g", "scroll_end", show=False),
        Binding("ctrl+d", "page_down", show=False),
        Binding("ctrl+u", "page_up", show=False),
    ]
    following: reactive[bool] = reactive(True)

    @dataclass
    class Looked(Message):
        """The watching thread found something. `added`: lines that came to the front."""

        model: LogModel
        change: Change
        added: int = 0
        problem: str = ""

    def __init__(self, resting: Callable[[], bool] = lambda: False) -> None:
        """
        Args:
            resting: Whether nobody can see the log now; asked in the watching thread.
        """
        super().__init__(id="log")
        self._resting = resting
        self.model: LogModel | None = None
        self._stop_watching = Event()
        self._strips: LRUCache[tuple[int, int], Strip] = LRUCache(2000)
        self._palette: dict[str, Style] = {}
        self._widest = 0
        self._moving = False
        self._title = ""

    # -- what is shown ---------------------------------------------------------------------

    def open(self, path: Path | None, title: str) -> None:
        """Show another file from its end; None shows nothing. `title` is markup."""
        if title != self._title:  # `border_title` gives back other markup than it was given
            self._title = self.border_title = title
        if self.model is not None and self.model.path == path:
            return
        self.close()
        self._stop_watching = Event()
        self.model = LogModel(path) if path is not None else None
        self._start_over()
        self.following = True
        if self.model is not None:
            self.run_worker(
                partial(self._watch, self.model, self._stop_watching),
                group="log", exclusive=True, exit_on_error=False, thread=True,
            )  # fmt: skip

    def close(self) -> None:
        """Let the watching thread end."""
        self._stop_watching.set()

    def on_unmount(self) -> None:
        self.close()

    def on_log_view_looked(self, event: Looked) -> None:
        model = self.model
        if model is None or event.model is not model:
            return
        if event.problem:
            self.border_subtitle = event.problem
            return
        if event.change is Change.REPLACED:
            self._start_over()
        count, before = len(model), self.virtual_size.height
        if event.added:
            self._move(lambda: self._resize_to(count))
            self._move(
                lambda: self.scroll_to(y=self.scroll_y + event.added, animate=False, force=True)
            )
        else:
            self._move(lambda: self._resize_to(count))
        if self.following:
            self._to_end()
        last_seen = self.scroll_offset.y + self.size.height
        if event.added or before <= last_seen or self.following:
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
        self._say_where()

    def on_resize(self, event: Resize) -> None:
        if self.following:
            self._to_end()

    def notify_style_update(self) -> None:
        self._palette.clear()
        self._strips.clear()
        super().notify_style_update()

    # -- inside ----------------------------------------------------------------------------

    def _watch(self, model: LogModel, closed: Event) -> None:
        """In a thread: look at the file until closed. Posts; touches no widget."""
        failed = ""
        while not closed.is_set():
            if self._resting():
                closed.wait(_LOOK_EVERY)
                continue
            try:
                change = found = model.poll()
                while found is Change.GREW and not closed.is_set():
                    found = model.poll()
                if change is not Change.NOTHING:
                    self.post_message(self.Looked(model, change))
                if change is Change.REPLACED and (added := model.index_older(closed.is_set)):
                    self.post_message(self.Looked(model, Change.NOTHING, added))
                failed = ""
            except OSError as error:
                if failed != str(error):
                    failed = str(error)
                    self.post_message(self.Looked(model, Change.NOTHING, problem=failed))
            closed.wait(_LOOK_EVERY)
        model.close()

    def _move(self, change: object) -> None:
        """Scroll without taking it for the person's wish to follow or to stop following."""
        assert callable(change)
        self._moving = True
        try:
            change()
        finally:
            self._moving = False

    def _to_end(self) -> None:
        # `scroll_end` would wait for a refresh, and lines that come meanwhile would look as if
        # the person had scrolled back.
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
            text = "" if self.model is None else "nothing yet"
        elif self.following:
            text = "following"
        else:
            last = min(count, self.scroll_offset.y + self.size.height)
            text = f"held at line {last} of {count} · f follows"
        if self.border_subtitle != text:
            self.border_subtitle = text

    def _strip(self, model: LogModel, index: int) -> Strip:
        key = model.raw(index)
        strip = self._strips.get(key)
        if strip is None:
            strip = self._strips[key] = self._paint(model.line(index))
        return strip

    def _paint(self, line: str) -> Strip:
        if "\x1b" in line:
            base = self._style("")
            text = Text.from_ansi(line)
            segments = [
                Segment(piece, base + style if style else base)
                for piece, style, _ in text.render(self.app.console)
                if piece
            ]
            return Strip(segments)
        role = next((role for pattern, role in _LEVELS if pattern.search(line)), "")
        return Strip([Segment(line, self._style(role))])

    def _style(self, role: str) -> Style:
        if role not in self._palette:
            style = self.visual_style
            if role:
                style += self.get_visual_style(f"log--{role}", partial=True)
            self._palette[role] = style.rich_style
        return self._palette[role]
