"""A growing log file as lines: the end at once, the rest on request. Knows no widgets.

Only line starts are kept in memory; text is read from the file when a line is looked at. One
thread may call `poll` and `index_older` while another one reads lines.
"""

from __future__ import annotations

import os
import re
from array import array
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TAIL_BYTES: Final = 256 << 10
_POLL_BYTES: Final = 4 << 20
_LONGEST_LINE: Final = 8 << 10
_FINGERPRINT: Final = 32

_SGR: Final = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*(?:[@-~]|$)"  # CSI, whole or cut off
    r"|[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS, SOS, PM, APC with their text
    r"|[ -/]*[0-~]?)"  # the short ones, or a lone escape at the end
)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f\x80-\x9f]")


class Change(Enum):
    """What a poll found."""

    NOTHING = "nothing"
    GREW = "grew"
    REPLACED = "replaced"  # first look, rotation or truncation: all lines are new


class LogModel:
    """The lines of one file, which may not exist yet, grow, be truncated or be replaced."""

    def __init__(self, path: Path, tail: int = TAIL_BYTES) -> None:
        self.path = path
        self._tail = tail
        self._lock = Lock()
        self._starts = array("Q")
        self._end = 0  # bytes taken in so far
        self._fd = -1
        self._inode: tuple[int, int] | None = None
        self._fingerprint = b""  # the bytes just before `_end`; they change when it is rewritten
        self._generation = 0

    def __len__(self) -> int:
        with self._lock:
            return self._count()

    @property
    def complete(self) -> bool:
        """Whether every line from the beginning of the file is indexed."""
        with self._lock:
            return not self._starts or self._starts[0] == 0

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def poll(self, limit: int = _POLL_BYTES) -> Change:
        """Take in what was appended, `limit` bytes at most; never raises for a missing file."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return Change.NOTHING
        inode = (stat.st_dev, stat.st_ino)
        if inode != self._inode or stat.st_size < self._end or self._rewritten(stat.st_size):
            return self._open(inode)
        if stat.st_size == self._end:
            return Change.NOTHING
        return self._grow(min(stat.st_size, self._end + limit))

    def index_older(self, cancelled: Callable[[], bool] = lambda: False) -> int:
        """Find the lines before the tail; the number of lines that came to the front."""
        with self._lock:
            if not self._starts or self._starts[0] == 0 or self._fd < 0:
                return 0
            stop, generation, fd = self._starts[0], self._generation, os.dup(self._fd)
        try:
            older, at = array("Q", [0]), 0
            while at < stop:
                if cancelled():
                    return 0
                data = os.pread(fd, min(1 << 20, stop - at), at)
                if not data:
                    return 0
                _line_starts(data, at, older)
                at += len(data)
        except OSError:
            return 0
        finally:
            os.close(fd)
        with self._lock:
            if generation != self._generation:
                return 0
            while older and older[-1] >= stop:
                older.pop()
            added = len(older)
            older.extend(self._starts)
            self._starts = older
            return added

    def raw(self, index: int) -> tuple[int, int]:
        """First byte of a line and the byte after its last; what a cache may use as its key."""
        with self._lock:
            start = self._starts[index]
            more = index + 1 < len(self._starts)
            return start, self._starts[index + 1] if more else self._end

    def line(self, index: int) -> str:
        """A line as it may be printed: SGR codes are kept, all other control codes are gone."""
        start, stop = self.raw(index)
        with self._lock:
            if self._fd < 0:
                return ""
            try:
                if stop - start <= _LONGEST_LINE:
                    return clean(os.pread(self._fd, stop - start, start))
                # A progress bar that was redrawn for hours is one long line: its end counts.
                end = os.pread(self._fd, _LONGEST_LINE, stop - _LONGEST_LINE)
                if b"\r" in end.rstrip(b"\r\n"):
                    return clean(end)
                return clean(os.pread(self._fd, _LONGEST_LINE, start)) + " …"
            except OSError:
                return ""

    # -- inside ----------------------------------------------------------------------------

    def _count(self) -> int:
        if not self._starts:
            return 0
        return len(self._starts) - (self._starts[-1] >= self._end)

    def _rewritten(self, size: int) -> bool:
        """Whether a file that is not shorter holds something else than what was read."""
        if size == self._end or not self._fingerprint:
            return False
        at = self._end - len(self._fingerprint)
        return os.pread(self._fd, len(self._fingerprint), at) != self._fingerprint

    def _open(self, inode: tuple[int, int]) -> Change:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return Change.NOTHING
        size = os.fstat(fd).st_size
        begin = max(0, size - self._tail)
        data = os.pread(fd, size - begin, begin)
        if begin and (newline := data.find(b"\n") + 1):
            begin, data = begin + newline, data[newline:]
        starts = array("Q", [begin])
        _line_starts(data, begin, starts)
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._inode, self._starts = fd, inode, starts
            self._end = begin + len(data)
            self._fingerprint = data[-_FINGERPRINT:]
            self._generation += 1
        return Change.REPLACED

    def _grow(self, stop: int) -> Change:
        data = os.pread(self._fd, stop - self._end, self._end)
        fresh = array("Q")
        _line_starts(data, self._end, fresh)
        with self._lock:
            self._starts.extend(fresh)
            self._end += len(data)
            self._fingerprint = (self._fingerprint + data)[-_FINGERPRINT:]
        return Change.GREW if data else Change.NOTHING


def clean(raw: bytes) -> str:
    """One line's bytes as printable text with SGR codes only; a progress bar's last state."""
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    if "\r" in text:
        text = text[text.rindex("\r") + 1 :]
    if "\x1b" in text:
        text = _ESCAPE.sub(lambda found: found[0] if _SGR.fullmatch(found[0]) else "", text)
    return _CONTROL.sub("", text).expandtabs(8)


def _line_starts(data: bytes, base: int, into: array[int]) -> None:
    """Append the offset after every newline in `data`."""
    find, at, append = data.find, -1, into.append
    while (at := find(b"\n", at + 1)) >= 0:
        append(base + at + 1)
