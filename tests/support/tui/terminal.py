"""A program on a terminal of its own: its bytes are counted, keys are sent, reading can stop."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.tui.emulated_screen import EmulatedScreen
from tests.support.waiting import PATIENCE, attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_ESCAPES = re.compile(
    r"\x1b(\[[0-9;?<>=$]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[P_^][^\x1b]*\x1b\\|.)"
)
# Every terminal answers this; the program would wait for it.
_ATTRIBUTES_QUERY, _ATTRIBUTES = b"\x1b[c", b"\x1b[?64;1;2;6;9;15;18;21;22c"
_TICKS = os.sysconf("SC_CLK_TCK")


class Reader:
    """A thread that reads a descriptor, and owns it.

    If another thread closed it, this one would go on reading what gets the same number next: a
    file of another test.
    """

    def __init__(self, descriptor: int, take: Callable[[bytes], object]) -> None:
        """
        Args:
            descriptor: Is closed by `close`.
            take: Called with each piece, and with nothing at the end.
        """
        self._descriptor, self._take = descriptor, take
        self._over = os.eventfd(0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        poll = select.poll()
        for descriptor in (self._descriptor, self._over):
            poll.register(descriptor, select.POLLIN)
        while self._over not in {descriptor for descriptor, _ in poll.poll()}:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:  # the program ended
                data = b""
            self._take(data)
            if not data:
                return

    def close(self) -> None:
        """Stop reading and close the descriptor."""
        os.eventfd_write(self._over, 1)
        self._thread.join()
        os.close(self._descriptor)
        os.close(self._over)


class Terminal:
    """The reading end of a pseudo-terminal. A thread reads, unless `stalled` is set.

    Attributes:
        received: Bytes so far.
        first_byte, last_byte: When they came (monotonic), None before.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int]
    ) -> None:
        """
        Args:
            command: What runs on the terminal.
            env: Its whole environment.
            size: Columns and rows.
        """
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=dict(env), start_new_session=True
        )
        os.close(slave)
        self.received = 0
        self._size = size
        self._kept = bytearray()
        self._all = bytearray()
        self._came = threading.Condition()
        self._going = threading.Event()
        self._going.set()
        self._reader = Reader(self._master, self._take)

    def _take(self, data: bytes) -> None:
        if _ATTRIBUTES_QUERY in data:
            os.write(self._master, _ATTRIBUTES)
        with self._came:
            self.received += len(data)
            self._kept += data
            self._all += data
            self._came.notify_all()
        self._going.wait()

    @property
    def text(self) -> str:
        """What was received since `forget`, without escape codes."""
        with self._came:
            return _ESCAPES.sub(" ", self._kept.decode(errors="replace"))

    @property
    def raw(self) -> str:
        """What was received since `forget`, as it came."""
        with self._came:
            return self._kept.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """What stands on the screen now; a program sends only what is not there yet."""
        with self._came:
            data = self._all.decode(errors="replace")
        screen = EmulatedScreen(self._size)
        with suppress(AssertionError):  # the last code has come in part
            screen.feed(data)
        return screen.lines

    def shows(self, what: str) -> bool:
        """Whether this stands on the screen now."""
        return any(what in line for line in self.lines)

    def forget(self) -> None:
        with self._came:
            self._kept.clear()

    def wait_for(self, true: Callable[[str], object], seconds: float = PATIENCE) -> float:
        """Seconds until what was received since `forget` makes this true."""
        begun = time.monotonic()
        for _ in attempts(lambda: true(self.text), seconds, told=lambda: repr(self.text[-2000:])):
            with self._came:
                self._came.wait(0.25)
        return time.monotonic() - begun

    def wait_quiet(self, seconds: float, most: float = PATIENCE) -> None:
        """Wait until nothing has come for so long."""
        deadline = time.monotonic() + most
        while True:
            with self._came:
                if not self._came.wait(seconds):
                    return
            assert time.monotonic() < deadline, "the terminal never rested"

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, size: tuple[int, int], *, tell: bool = True) -> None:
        """Another number of columns and rows, of which the program is told."""
        self._size = size
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)  # the terminal is not of its session

    def stall(self) -> None:
        """Read no more, as a laptop that went to sleep; one read may still be under way."""
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    def hang_up(self) -> None:
        """Close the terminal. The program is not of the session that would get a signal."""
        self._going.set()
        self._reader.close()

    def processor_seconds(self) -> float:
        """User and system time of the program so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def resident(self) -> int:
        """Bytes of memory that are the program's own or shared with others."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def close(self) -> None:
        self._going.set()
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        self._reader.close()


@contextmanager
def terminal(
    command: Sequence[str], env: Mapping[str, str], size: tuple[int, int] = (80, 24)
) -> Iterator[Terminal]:
    """A program on a terminal, ended in the end. It does not ask whether this one shows images."""
    shown = dict(env) | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
    shown["FSDP_TUI_PICTURES"] = "blocks"  # a late answer would be taken for keys
    one = Terminal(command, shown, size)
    try:
        yield one
    finally:
        one.close()
