"""The way to a real terminal, with a budget of bytes, so that no slow link makes keys lag.

Over the budget nothing is painted: what changes meanwhile is painted together, later. A key may
borrow, so that its answer is seen at once, and a terminal that takes nothing (a laptop that
sleeps) never blocks the loop that handles keys and snapshots. Of what is painted, only cells that
the terminal does not show yet are sent.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from sys import intern
from typing import IO, TYPE_CHECKING, Any, Final

from rich.cells import cell_len
from textual import events
from textual._ansi_sequences import SYNC_END, SYNC_START
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size

if TYPE_CHECKING:
    from asyncio import TimerHandle
    from collections.abc import Iterator

    from textual.message import Message


# -- byte budget ----------------------------------------------------------------------------
# How many bytes may go to the terminal now. Pure: time is given, nothing is waited for.


RATE: Final = 50_000.0  # bytes a second; half of a slow link, so that nothing queues up in it
SAVED: Final = 25_000.0  # bytes that may be spent at once after a rest: about a whole screen
BORROWED: Final = 50_000.0  # bytes by which what answers a key may run ahead
ANSWERS_WITHIN: Final = 0.4  # seconds after a key in which what is painted counts as its answer
MOST_BYTES_BEHIND: Final = 16_384  # with more, the terminal takes nothing just now
MOST_WRITES_BEHIND: Final = 12  # three make a frame; Textual blocks its loop at thirty
_LOOK_AGAIN: Final = 0.05  # seconds until a terminal that takes nothing is tried again


@dataclass
class ByteBudget:
    """Decides whether painting waits. All times are seconds of one clock.

    Attributes:
        now: When it was last asked.
        left: Bytes that may be sent at once; below zero there is a debt to wait off.
        asked_at: When a person last did something.
    """

    now: float
    left: float = SAVED
    asked_at: float = float("-inf")

    def spend(self, now: float, count: int) -> None:
        """Count bytes that are on their way."""
        self._earn(now)
        self.left -= count

    def wait(self, now: float, bytes_behind: int = 0, writes_behind: int = 0) -> float:
        """Seconds until something may be painted; 0 when it may be now.

        Args:
            now: The time.
            bytes_behind: What was sent and the terminal has not taken.
            writes_behind: The same, in calls.
        """
        self._earn(now)
        if bytes_behind > MOST_BYTES_BEHIND or writes_behind > MOST_WRITES_BEHIND:
            return _LOOK_AGAIN
        answers = now - self.asked_at < ANSWERS_WITHIN
        least = -BORROWED if answers else 0.0
        return max(0.0, (least - self.left) / RATE)

    def _earn(self, now: float) -> None:
        self.left = min(SAVED, self.left + max(0.0, now - self.now) * RATE)
        self.now = now


# -- terminal cells -------------------------------------------------------------------------
# The cells that a terminal shows, and the fewest bytes that update them.
#
# Textual sends a widget's line from its left edge to the last cell that changed, with all
# colors at every change of style. Here each frame is compared with the last one sent:
# unchanged cells are skipped, and of a style only the differences are written. Understands
# the sequences that Textual 8 writes (cursor position, SGR, text); after any other, every
# cell counts as unknown.


_TOKEN: Final = re.compile(
    r"\x1b\[([\d;]*)([mH])"  # SGR, or the cursor position: line, column, from 1
    r"|([^\x00-\x1f\x7f-\x9f]+)"  # text
    r"|([\s\S])"  # a line feed, behind which a cursor position follows, or anything else
)
_PLACE: Final = re.compile(r"\d+;\d+")
_PICTURE: Final = re.compile(r"\n*\x1b\[\d+;\d+H")  # how one begins
# Modes (but for the alternate screen), titles, clipboard, bell, keyboard: they leave the cells.
_HARMLESS: Final = re.compile(
    r"(?:\x1b\[\?(?!1049|1047|47)\d+(?:[hl]|\$p)|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x07"
    r"|\x1b\[[<>]\d*u)+"
)
_NEAR: Final = 6  # unchanged cells between two that change: writing them costs less than moving
_BEHIND: Final = -1  # the column behind text of which the width is not known


class TerminalCells:
    """The cells of a terminal as far as they are known. No other code may draw on it."""

    def __init__(self) -> None:
        self._size = (0, 0)
        self._texts: list[list[str]] = []  # a character for each cell; "" where it is not known
        self._styles: list[list[str]] = []  # SGR parameters from a reset
        self._out: list[str] = []
        self._at: tuple[int, int] | None = None  # the cursor, column and line, if it is known
        self._style = ""  # what is written in
        self._rest: tuple[int, int] | None = None  # where the last frame left the cursor

    def forget(self) -> None:
        """Take nothing as known: the next frames are sent whole."""
        width, height = self._size
        self._texts = [[""] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]
        self._rest = None

    def shorten(self, data: str, size: tuple[int, int]) -> str:
        """Return what to send in place of `data`; "" where everything is shown already.

        Args:
            data: What Textual sends.
            size: Columns and lines of the terminal.
        """
        if size != self._size:  # its cells may have moved
            self._size = size
            self.forget()
        if not is_picture(data):
            if _HARMLESS.fullmatch(data) is None:
                self.forget()
            return data
        return self._picture(data)

    # -- inside ----------------------------------------------------------------------------

    def _picture(self, data: str) -> str:
        self._out, self._at, self._style = [], self._rest, ""
        x = y = 0
        style, knows_place = "", False
        for numbers, code, text, other in _TOKEN.findall(data):
            if code == "m":
                both = f"{style};{numbers}" if style else numbers
                style = "" if numbers in ("", "0") else intern(both)
            elif text and knows_place:
                x = self._text(x, y, text, style)
            elif code == "H" and _PLACE.fullmatch(numbers):
                line, column = numbers.split(";")
                x, y, knows_place = int(column) - 1, int(line) - 1, True
            elif other == "\n":
                knows_place = False
            else:
                self.forget()
                return data
        if not self._out and self._rest == (x, y):
            return ""
        self._write_in("")
        if x != _BEHIND:
            self._go_to(x, y)
        self._rest = self._at
        return "".join(self._out)

    def _text(self, x: int, y: int, text: str, style: str) -> int:
        """Write the cells of a piece of text that are not there yet; where the next one begins."""
        width, height = self._size
        stop = x + len(text)
        if x == _BEHIND or stop > width or y >= height or not is_plain(text):
            self._unsure(x, y, text, style)
            return _BEHIND
        texts, styles, new = self._texts[y], self._styles[y], list(text)
        looks = [style] * len(new)
        if " " in text and (blank := style_of_blank(style)) != style:
            looks = [blank if sign == " " else style for sign in text]
        if texts[x:stop] != new or styles[x:stop] != looks:
            old = zip(texts[x:stop], styles[x:stop], strict=True)
            changed = [at for at, was in enumerate(old) if was != (new[at], looks[at])]
            for first, last in _near(changed):
                self._write(x + first, y, text[first : last + 1], style)
            texts[x:stop], styles[x:stop] = new, looks
        return stop

    def _unsure(self, x: int, y: int, text: str, style: str) -> None:
        """Write text of which it is not known which cells it fills: to the end of its line."""
        width, height = self._size
        if y >= height:
            self.forget()  # a terminal that became lower draws it on its last line
        elif x != _BEHIND:
            at = min(x, width - 1)
            self._texts[y][at:] = [""] * (width - at)
        self._write_in(style)
        if x != _BEHIND:
            self._go_to(x, y)
        self._out.append(text)
        self._at = None

    def _write(self, x: int, y: int, text: str, style: str) -> None:
        # Blanks look the same in every colour of text.
        if text.strip(" ") or style_of_blank(style) != style_of_blank(self._style):
            self._write_in(style)
        self._go_to(x, y)
        self._out.append(text)
        self._at = (x + len(text), y) if x + len(text) < self._size[0] else None

    def _write_in(self, style: str) -> None:
        if style != self._style:
            self._out.append(change_of_style(self._style, style))
            self._style = style

    def _go_to(self, x: int, y: int) -> None:
        if self._at != (x, y):
            near = self._at is not None and self._at[1] == y and x > self._at[0]
            right = f"\x1b[{x - self._at[0]}C" if near and self._at is not None else ""
            self._out.append(right or f"\x1b[{y + 1};{x + 1}H")
            self._at = (x, y)


def _near(cells: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last cell of each group that is written at once; `cells` is not empty."""
    first = last = cells[0]
    for cell in cells:
        if cell - last > _NEAR:
            yield first, last
            first = cell
        last = cell
    yield first, last


# The codes that end a part of a style.
_OFF: Final = {"text": "39", "background": "49", "1": "22", "2": "22", "3": "23", "4": "24"}
_UNSEEN: Final = {"text", "background", "1", "2", "3"}  # a blank cell has of these its background


@lru_cache(4096)
def change_of_style(before: str, after: str) -> str:
    """Return the codes that change one style to another, both SGR parameters from a reset. Pure."""
    if not after:
        return "\x1b[m"
    was, now = _parts(before), _parts(after)
    if was is None or now is None:
        return f"\x1b[0;{after}m" if before else f"\x1b[{after}m"
    gone = {_OFF.get(kind, "0") for kind in was.keys() - now.keys()}
    new = [code for kind, code in now.items() if was.get(kind) != code]
    # One code ends bold and dim alike; some attributes only a reset takes away.
    if "0" in gone or ("22" in gone and now.keys() & {"1", "2"}):
        return f"\x1b[0;{after}m"
    part, whole = ";".join([*sorted(gone), *new]), f"0;{after}"
    return f"\x1b[{part if len(part) <= len(whole) else whole}m"


@lru_cache(4096)
def style_of_blank(style: str) -> str:
    """Return what is seen of a style in a blank cell: its background, unless lines are drawn."""
    parts = _parts(style)
    if parts is None or not parts.keys() <= _UNSEEN:
        return style
    return parts.get("background", "")


def _parts(style: str) -> dict[str, str] | None:
    """Parse a style into its parts, by kind.

    Text colour, background, each attribute. None if unsure.
    """
    codes = style.split(";") if style else []
    parts: dict[str, str] = {}
    at = 0
    while at < len(codes):
        code = codes[at]
        taken = 1
        if code in ("38", "48"):
            taken = 5 if codes[at + 1 : at + 2] == ["2"] else 3
        tens, ones = code[:-1], code[-1:]
        if tens in ("3", "9") and ones <= "8":
            kind = "text"
        elif tens in ("4", "10") and ones <= "8":
            kind = "background"
        elif not tens and ones != "0":
            kind = code
        else:
            return None
        parts[kind] = ";".join(codes[at : at + taken])
        at += taken
    return parts


_narrow: set[str] = set()  # characters of one cell that have been seen


def is_picture(data: str) -> bool:
    """Whether this draws on cells, as Textual says it."""
    return _PICTURE.match(data) is not None


def is_plain(text: str) -> bool:
    """Whether every character fills one cell on every terminal."""
    if text.isascii():
        return True
    unknown = set(text) - _narrow
    _narrow.update(character for character in unknown if cell_len(character) == 1)
    return unknown <= _narrow


# -- driver ---------------------------------------------------------------------------------


_BY_A_PERSON = (
    events.Key,
    events.MouseDown,
    events.MouseScrollUp,
    events.MouseScrollDown,
    events.Paste,
)


class _Meter:
    """The terminal's file as the writing thread sees it; counts what the terminal has taken."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._inside = [0, 0]  # bytes and writes that were not flushed yet
        self.taken_bytes = self.taken_writes = 0

    def write(self, text: str) -> int:
        self._inside[0] += _bytes(text)
        self._inside[1] += 1
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()
        (count, writes), self._inside = self._inside, [0, 0]
        self.taken_bytes += count
        self.taken_writes += writes

    def fileno(self) -> int:
        return self._file.fileno()


class GovernedDriver(LinuxDriver):
    """Holds painting back while the terminal is behind or the budget is spent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loop = asyncio.get_running_loop()
        # What Textual begins with; another first size would be laid out for nothing.
        self._size = self._get_terminal_size()
        assert self._file is not None  # standard error; the dashboard asked that it is a terminal
        self._meter = _Meter(self._file)
        self._file = self._meter  # type: ignore[assignment]  # has what the writing thread uses
        self._budget = ByteBudget(time.monotonic())
        self._cells = TerminalCells()
        self._disturbed = False  # set by the thread that reads keys
        self._wrote = False  # a frame, since the last one ended
        self._lost = False  # a frame that Textual made while none could be sent
        self._before_picture = ""  # what is sent only if a frame follows
        self._sent_bytes = self._sent_writes = 0
        self._held = ExitStack()
        self._timer: TimerHandle | None = None

    def write(self, data: str) -> None:
        """Send what the terminal does not show yet; afterwards painting may have to wait."""
        data = self._shortened(writable(data))
        if not data:
            return
        count = _bytes(data)
        self._sent_bytes += count
        self._sent_writes += 1
        self._budget.spend(time.monotonic(), count)
        super().write(data)
        if self._timer is None and (wait := self._wait()):
            self._hold(wait)

    def forget(self) -> None:
        """Take nothing of what the terminal shows as known: something else may have written."""
        self._cells.forget()

    def resized(self) -> None:
        """Handle a new terminal size: cells may have moved, and the user waits for the redraw."""
        self.forget()
        self._budget.asked_at = time.monotonic()
        self._look()

    def follow_size(self) -> None:
        """Look at the terminal's size: not everything between it and us passes on its signal."""
        size = Size(*self._get_terminal_size())
        if size != self._app.size and not self._in_band_window_resize:
            self._app.post_message(events.Resize(size, size))

    def picture_ended(self) -> None:
        """Textual made a frame; it throws away those it makes while painting is held back."""
        self._lost = self._lost or (self._timer is not None and not self._wrote)
        self._wrote = False

    def process_message(self, message: Message) -> None:
        """In the thread that reads keys: what a person does may be answered at once."""
        if isinstance(message, events.AppFocus):  # others may have drawn on it meanwhile
            self._disturbed = True
        if isinstance(message, _BY_A_PERSON):
            self._budget.asked_at = time.monotonic()
            self.loop.call_soon_threadsafe(self._look)
        super().process_message(message)

    def _shortened(self, data: str) -> str:
        """Return the part of the data to send now."""
        if data == SYNC_START:
            self._before_picture = data
            return ""
        before, self._before_picture = self._before_picture, ""
        if data == SYNC_END:
            return "" if before else data  # with no frame between the two
        self._wrote = self._wrote or is_picture(data)
        if self._disturbed:
            self._disturbed = False
            self._cells.forget()
        width, height = self._app.size
        if shorter := self._cells.shorten(data, (width, height)):
            return before + shorter
        self._before_picture = before
        return ""

    def _get_terminal_size(self) -> tuple[int, int]:
        """Ask the terminal for its size. Textual prefers COLUMNS and LINES, which never change."""
        with suppress(OSError):
            size = os.get_terminal_size(self.fileno)
            if all(size):  # a container's terminal has none at first
                return size
        return super()._get_terminal_size()

    # -- holding, in the loop ----------------------------------------------------------------

    def _wait(self) -> float:
        behind = self._sent_bytes - self._meter.taken_bytes
        writes = self._sent_writes - self._meter.taken_writes
        return self._budget.wait(time.monotonic(), behind, writes)

    def _hold(self, wait: float) -> None:
        """Stop painting, and try again after a number of seconds."""
        self._held.enter_context(self._app.batch_update())
        self._timer = self.loop.call_later(wait, self._look)

    def _look(self) -> None:
        """Paint again if that may be."""
        if self._timer is None:
            return
        self._timer.cancel()
        if wait := self._wait():
            self._timer = self.loop.call_later(wait, self._look)
        else:
            self._release()

    def _release(self) -> None:
        self._timer = None
        self._held.close()
        if not self._app.screen_stack:
            return
        screen = self._app.screen_stack[-1]
        if self._lost:
            self._lost = False
            screen.refresh()
        # Paints what waited. Not of the screens below: a look at one of those repaints the
        # one on top, which would be held back again, and so on without end.
        screen.check_idle()


def writable(text: str) -> str:
    """Return the text in valid UTF-8: file names may contain other bytes. Pure."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
