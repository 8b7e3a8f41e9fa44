"""The way to a real terminal, with a budget of bytes, so that no slow link makes keys lag.

Over the budget nothing is painted: what changes meanwhile is painted together, later. A key may
borrow, so that its answer is seen at once, and a terminal that takes nothing (a laptop that
sleeps) never blocks the loop that handles keys and snapshots. Of what is painted, only cells that
the terminal does not show yet are sent.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, Any

from textual import events
from textual._ansi_sequences import SYNC_END, SYNC_START
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size

from tui.terminal.byte_budget import ByteBudget
from tui.terminal.terminal_cells import TerminalCells, is_picture

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from textual.message import Message

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
