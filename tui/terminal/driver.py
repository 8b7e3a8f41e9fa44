"""Terminal output with a byte budget, so that keys stay responsive on slow links.

Over the budget, nothing is painted; changes are collected and painted together later. A key may
borrow, so that its response shows at once, and a terminal that stops reading (a suspended
laptop) never blocks the loop that handles keys and snapshots. Only cells that differ from what
the terminal shows are sent.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
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
# The bytes that may be sent to the terminal now. Pure: time is an argument, nothing blocks.


RATE: Final = 50_000.0  # bytes a second; half of a slow link, so that no queue builds up
SAVED: Final = 25_000.0  # bytes that may be sent at once after a pause: about a whole screen
BORROWED: Final = 50_000.0  # bytes by which responses to keys may run ahead
ANSWERS_WITHIN: Final = 0.4  # seconds after a key in which painting counts as its response
MOST_BYTES_BEHIND: Final = 16_384  # with more, the terminal is not reading
MOST_WRITES_BEHIND: Final = 12  # a frame takes three; Textual blocks its loop at thirty
_LOOK_AGAIN: Final = 0.05  # seconds until a terminal that is not reading is tried again


@dataclass
class ByteBudget:
    """Decides whether painting waits. All times are seconds of one clock.

    Attributes:
        now: Time of the last call.
        left: Bytes that may be sent at once; a negative number is a debt.
        asked_at: Time of the user's last input.
    """

    now: float
    left: float = SAVED
    asked_at: float = float("-inf")

    def spend(self, now: float, count: int) -> None:
        """Count bytes that were sent."""
        self._earn(now)
        self.left -= count

    def wait(self, now: float, bytes_behind: int = 0, writes_behind: int = 0) -> float:
        """Return the seconds until painting is allowed; 0 if it is allowed now.

        Args:
            now: The time.
            bytes_behind: Bytes sent that the terminal has not read.
            writes_behind: The same in calls.
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
    r"|([\s\S])"  # a newline, followed by a cursor position, or anything else
)
_PLACE: Final = re.compile(r"\d+;\d+")
_PICTURE: Final = re.compile(r"\n*\x1b\[\d+;\d+H")  # how an image begins
# Sequences that leave the cells alone: modes (except the alternate screen), titles, bell, …
_HARMLESS: Final = re.compile(
    r"(?:\x1b\[\?(?!1049|1047|47)\d+(?:[hl]|\$p)|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x07"
    r"|\x1b\[[<>]\d*u)+"
)
# Unchanged cells between two changed ones: rewriting them costs less than a cursor move.
_NEAR: Final = 6
_BEHIND: Final = -1  # the column after text of unknown width
# Blanks that are cheaper to erase, and to move over, than to write.
_LONG_BLANK: Final = re.compile(r"( {12,})")


class TerminalCells:
    """The cells of a terminal as far as they are known. No other code may draw on it.

    Args:
        erases: Whether erased cells take the background color.
    """

    def __init__(self, *, erases: bool = False) -> None:
        self._erases = erases
        self._size = (0, 0)
        self._texts: list[list[str]] = []  # a character for each cell; "" if unknown
        self._styles: list[list[str]] = []  # SGR parameters after a reset
        self._pen = _Pen(0, erases, None)
        self._runs: list[_Run] = []  # changed text that is not written yet
        self._rest: tuple[int, int] | None = None  # where the last frame left the cursor

    def forget(self) -> None:
        """Mark everything unknown: the next frames are sent in full."""
        width, height = self._size
        self._texts = [[""] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]
        self._rest = None

    def shorten(self, data: str, size: tuple[int, int]) -> str:
        """Return what to send in place of `data`; "" if all of it is shown already.

        Args:
            data: Textual's output.
            size: Columns and lines of the terminal.
        """
        if size != self._size:  # resizing may have moved its cells
            self._size = size
            self.forget()
        if not is_picture(data):
            if _HARMLESS.fullmatch(data) is None:
                self.forget()
            return data
        return self._picture(data)

    # -- inside ----------------------------------------------------------------------------

    def _picture(self, data: str) -> str:
        self._pen, self._runs = _Pen(self._size[0], self._erases, self._rest), []
        x = y = 0
        style, knows_place, behind = "", False, (0, 0)
        for numbers, code, text, other in _TOKEN.findall(data):
            if code == "m":
                both = f"{style};{numbers}" if style else numbers
                style = "" if numbers in ("", "0") else intern(both)
            elif text and knows_place:
                x = self._text(x, y, text, style)
                behind = y, x
            elif code == "H" and _PLACE.fullmatch(numbers):
                line, column = numbers.split(";")
                x, y, knows_place = int(column) - 1, int(line) - 1, True
                if (y, x) < behind:  # may draw over what this frame has drawn
                    self._write_runs()
            elif other == "\n":
                knows_place = False
            else:
                self.forget()
                return data
        self._write_runs()
        if not self._pen.out and self._rest == (x, y):
            return ""
        self._pen.write_in("")
        if x != _BEHIND:
            self._pen.go_to(x, y)
        self._rest = self._pen.at
        return "".join(self._pen.out)

    def _text(self, x: int, y: int, text: str, style: str) -> int:
        """Write the changed cells of a piece of text; return the column after it."""
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
                self._runs.append((x + first, y, text[first : last + 1], style))
            texts[x:stop], styles[x:stop] = new, looks
        return stop

    def _unsure(self, x: int, y: int, text: str, style: str) -> None:
        """Write text of unknown cell width, to the end of its line."""
        self._write_runs()
        width, height = self._size
        if y >= height:
            self.forget()  # a terminal that became lower draws it on its last line
        elif x != _BEHIND:
            at = min(x, width - 1)
            self._texts[y][at:] = [""] * (width - at)
        self._pen.write_in(style)
        if x != _BEHIND:
            self._pen.go_to(x, y)
        self._pen.out.append(text)
        self._pen.at = None

    def _write_runs(self) -> None:
        """Write the collected runs line by line or style by style, whichever is shorter.

        A change of style takes up to 20 bytes and a cursor move 3 to 8, but a run that follows
        another one needs no move.
        """
        runs, self._runs = self._runs, []
        pens = []
        for ordered in (runs, _by_style(runs)):
            pens.append(pen := replace(self._pen, out=[*self._pen.out]))
            for run in ordered:
                pen.write(*run)
        self._pen = min(pens, key=lambda pen: sum(map(len, pen.out)))


_Run = tuple[int, int, str, str]  # column, line, text, style


@dataclass
class _Pen:
    """A cursor that writes.

    Attributes:
        width: Columns of the terminal.
        erases: Whether erased cells take the background color.
        at: Column and line, if known.
        style: The current style.
        out: What was written.
    """

    width: int
    erases: bool
    at: tuple[int, int] | None
    style: str = ""
    out: list[str] = field(default_factory=list)

    def write(self, x: int, y: int, text: str, style: str) -> None:
        # Blanks look the same in every text color.
        blank = style_of_blank(style)
        if text.strip(" ") or blank != style_of_blank(self.style):
            self.write_in(style)
        erases = self.erases and is_background(blank)
        for number, part in enumerate(_LONG_BLANK.split(text) if erases else [text]):
            if part:
                self.go_to(x, y)
                erased = number % 2
                self.out.append(f"\x1b[{len(part)}X" if erased else part)
                x += len(part)
                if not erased:
                    self.at = (x, y) if x < self.width else None

    def write_in(self, style: str) -> None:
        if style != self.style:
            self.out.append(change_of_style(self.style, style))
            self.style = style

    def go_to(self, x: int, y: int) -> None:
        if self.at != (x, y):
            self.out.append(cursor_move(self.at, (x, y)))
            self.at = (x, y)


def cursor_move(start: tuple[int, int] | None, to: tuple[int, int]) -> str:
    """Return the shortest codes that move the cursor; columns and lines from 0. Pure.

    Args:
        start: Where it is; None if unknown.
        to: Where it should be.
    """
    x, y = to
    best = f"\x1b[{y + 1};{x + 1}H"
    if start is not None and (down := y - start[1]) >= 0:
        right = x - start[0]
        across = "\b" * -right if right < 0 else _by(right, "C")
        best = min(best, _by(down, "B") + across, key=len)
    return best


def _by(count: int, code: str) -> str:
    """Return the code that moves the cursor by a number of cells or lines."""
    return f"\x1b[{count if count > 1 else ''}{code}" if count else ""


def _by_style(runs: list[_Run]) -> list[_Run]:
    """Sort runs so that those of a style follow each other."""
    styles: dict[str, list[_Run]] = {}
    backgrounds: dict[str, str] = {}  # background → a style that has it
    for run in runs:
        _, _, text, style = run
        alike = backgrounds.setdefault(style_of_blank(style), style)
        styles.setdefault(style if text.strip(" ") else alike, []).append(run)
    return [run for alike in styles.values() for run in alike]


def _near(cells: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last cell of each group written at once; `cells` is not empty."""
    first = last = cells[0]
    for cell in cells:
        if cell - last > _NEAR:
            yield first, last
            first = cell
        last = cell
    yield first, last


# The codes that reset a part of a style.
_OFF: Final = {"text": "39", "background": "49", "1": "22", "2": "22", "3": "23", "4": "24"}
_UNSEEN: Final = {"text", "background", "1", "2", "3"}  # in a blank cell, only the background shows


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
    # One code resets both bold and dim; some attributes need a full reset.
    if "0" in gone or ("22" in gone and now.keys() & {"1", "2"}):
        return f"\x1b[0;{after}m"
    part, whole = ";".join([*sorted(gone), *new]), f"0;{after}"
    return f"\x1b[{part if len(part) <= len(whole) else whole}m"


@lru_cache(4096)
def style_of_blank(style: str) -> str:
    """Return what a blank cell shows of a style: its background, unless lines are drawn."""
    parts = _parts(style)
    if parts is None or not parts.keys() <= _UNSEEN:
        return style
    return parts.get("background", "")


def is_background(style: str) -> bool:
    """Return whether a style is nothing but a background color, or none at all."""
    parts = _parts(style)
    return parts is not None and parts.keys() <= {"background"}


@lru_cache(4096)
def _parts(style: str) -> dict[str, str] | None:
    """Parse a style into its parts, by kind.

    The parts are text color, background and each attribute. None if unsure.
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


_narrow: set[str] = set()  # characters known to be one cell wide


def is_picture(data: str) -> bool:
    """Return whether the data draws an image in Textual's form."""
    return _PICTURE.match(data) is not None


def is_plain(text: str) -> bool:
    """Return whether every character is one cell wide on every terminal."""
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
    """The terminal's file for the writing thread; counts what the terminal has read."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._inside = [0, 0]  # bytes and writes not flushed yet
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
    """Delays painting while the terminal is behind or the budget is spent."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loop = asyncio.get_running_loop()
        # Textual starts with this size; another one would cost a layout.
        self._size = self._get_terminal_size()
        assert self._file is not None  # standard error; the dashboard checked that it is a terminal
        self._meter = _Meter(self._file)
        self._file = self._meter  # type: ignore[assignment]  # has what the writing thread uses
        self._budget = ByteBudget(time.monotonic())
        self._cells = TerminalCells(erases=erases_in_background(self._meter.fileno()))
        self._disturbed = False  # set by the thread that reads keys
        self._wrote = False  # a frame was written since the last one ended
        self._lost = False  # Textual made a frame that could not be sent
        self._before_picture = ""  # sent only if a frame follows
        self._sent_bytes = self._sent_writes = 0
        self._held = ExitStack()
        self._timer: TimerHandle | None = None

    def write(self, data: str) -> None:
        """Send what the terminal does not show yet; then painting may have to wait."""
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
        """Mark everything that the terminal shows unknown: something else may have written."""
        self._cells.forget()

    def resized(self) -> None:
        """Handle a new terminal size: cells may have moved, and the user waits for the redraw."""
        self.forget()
        self._budget.asked_at = time.monotonic()
        self._look()

    def follow_size(self) -> None:
        """Check the terminal's size: SIGWINCH does not get through every layer."""
        size = Size(*self._get_terminal_size())
        if size != self._app.size and not self._in_band_window_resize:
            self._app.post_message(events.Resize(size, size))

    def picture_ended(self) -> None:
        """Handle the end of a frame; Textual drops frames while painting is delayed."""
        self._lost = self._lost or (self._timer is not None and not self._wrote)
        self._wrote = False

    def process_message(self, message: Message) -> None:
        """Note user input, in the thread that reads keys, so that its response is not delayed."""
        if isinstance(message, events.AppFocus):  # another program may have drawn meanwhile
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
            return "" if before else data  # no frame between the two
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
        """Query the terminal's size. Textual prefers COLUMNS and LINES, which never change."""
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
        """Stop painting, and retry after a number of seconds."""
        self._held.enter_context(self._app.batch_update())
        self._timer = self.loop.call_later(wait, self._look)

    def _look(self) -> None:
        """Resume painting if allowed."""
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
        # Paint what was delayed. Not the screens below: updating one of those repaints the top
        # one, which would be delayed again, and so on forever.
        screen.check_idle()


def erases_in_background(terminal: int) -> bool:
    """Return whether terminfo says that erased cells take the background color.

    Args:
        terminal: The terminal's file descriptor.
    """
    try:
        import curses  # not in every build of Python; 5 ms
    except ImportError:
        return False
    with suppress(curses.error):  # no entry for TERM
        curses.setupterm(fd=terminal)
        return curses.tigetflag("bce") == 1 and curses.tigetstr("ech") is not None
    return False


def writable(text: str) -> str:
    """Return the text in valid UTF-8: file names may contain other bytes. Pure."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
