"""A growing log file as lines: its end at once, the rest on request. Independent of widgets.

Only the number of lines before each block of the file is kept in memory: kilobytes for a
gigabyte. Text and line starts are read from the file when a line is shown. One thread
may call `poll` and `index_older` while another one reads lines.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TAIL_BYTES: Final = 256 << 10
_POLL_BYTES: Final = 4 << 20
LONGEST_LINE: Final = 8 << 10
_FINGERPRINT: Final = 32
_BLOCK: Final = 64 << 10
_KEPT_BLOCKS: Final = 64  # blocks whose line starts are cached

_SGR: Final = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*(?:[@-~]|$)"  # CSI, complete or cut off
    r"|[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS, SOS, PM, APC with their text
    r"|[ -/]*[0-~]?)"  # short ones, or a lone escape at the end
)
# A tqdm bar directly followed by other text.
_BAR: Final = re.compile(r"[^|]{0,200}?\d{1,3}%\|[^|]*\|[^\[]{0,40}\[[^\]]*\] *(?=\S)")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f\x80-\x9f]")


class Change(Enum):
    """The result of a poll."""

    NOTHING = "nothing"
    GREW = "grew"
    REPLACED = "replaced"  # first poll, rotation or truncation: all lines are new


class LogModel:
    """The lines of a file, which may be missing, growing, truncated or replaced.

    Attributes:
        path: The file.
        generation: Changes when all lines are new; offsets of another generation are invalid.
    """

    def __init__(self, path: Path, tail: int = TAIL_BYTES) -> None:
        self.path = path
        self.generation = 0
        self._tail = tail
        self._lock = Lock()
        self._blocks = _Blocks()
        self._end = 0  # bytes read so far
        self._last = 0  # the byte after the last newline
        self._fd = -1
        self._inode: tuple[int, int] | None = None
        self._fingerprint = b""  # the bytes just before `_end`, to detect a rewrite
        self._starts: OrderedDict[int, tuple[int, array[int]]] = OrderedDict()

    def __len__(self) -> int:
        with self._lock:
            return self._blocks.newlines + (self._end > self._last)

    @property
    def complete(self) -> bool:
        """Return whether every line from the beginning of the file is indexed."""
        with self._lock:
            return not self._blocks.begins or self._blocks.begins[0] == 0

    @property
    def extent(self) -> tuple[int, int]:
        """Return the first indexed byte and the byte after the last."""
        with self._lock:
            return (self._blocks.begins[0] if self._blocks.begins else self._end), self._end

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def poll(self, limit: int = _POLL_BYTES) -> Change:
        """Read what was appended, at most `limit` bytes; never raises for a missing file."""
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
        """Index lines before the tail; return how many were added at the front."""
        with self._lock:
            if not self._blocks.begins or self._blocks.begins[0] == 0 or self._fd < 0:
                return 0
            stop, generation = self._blocks.begins[0], self.generation
        older, at = _Blocks(), 0
        while at < stop:
            data = b"" if cancelled() else self.read(at, min(1 << 20, stop - at), generation)
            if not data:
                return 0
            older.take(data, at)
            at += len(data)
        with self._lock:
            if generation != self.generation:
                return 0
            self._blocks = older.followed_by(self._blocks)
            return older.newlines

    def raw(self, index: int) -> tuple[int, int]:
        """Return the first byte of a line and the byte after its last; usable as a cache key."""
        with self._lock:
            more = index < self._blocks.newlines
            return self._start(index), self._start(index + 1) if more else self._end

    def index_of(self, offset: int) -> int:
        """Return the number of the line with this byte, or of the first indexed line."""
        with self._lock:
            block = bisect_right(self._blocks.begins, offset) - 1
            if block < 0:
                return 0
            within = offset - self._blocks.begins[block]
            return self._blocks.before[block] + bisect_left(self._newlines_of(block), within)

    def read(self, offset: int, size: int, generation: int) -> bytes:
        """Return bytes of the file for a search; b"" if it has been replaced since."""
        with self._lock:
            if generation != self.generation or self._fd < 0:
                return b""
            fd = os.dup(self._fd)
        try:
            return os.pread(fd, size, offset)
        except OSError:
            return b""
        finally:
            os.close(fd)

    def line(self, index: int) -> str:
        """Return a line that is safe to print.

        SGR codes are kept; all other control codes are removed.
        """
        start, stop = self.raw(index)
        with self._lock:
            if self._fd < 0:
                return ""
            try:
                if stop - start <= LONGEST_LINE:
                    return clean(os.pread(self._fd, stop - start, start))
                # A progress bar that was redrawn for hours is one long line; only its end matters.
                end = os.pread(self._fd, LONGEST_LINE, stop - LONGEST_LINE)
                if b"\r" in end.rstrip(b"\r\n"):
                    return clean(end)
                return clean(os.pread(self._fd, LONGEST_LINE, start)) + " …"
            except OSError:
                return ""

    # -- inside ----------------------------------------------------------------------------

    def _start(self, index: int) -> int:
        """Return the first byte of a line; for the number after the last, the next line's start."""
        blocks = self._blocks
        if index <= 0 or not blocks.begins:
            return blocks.begins[0] if blocks.begins else 0
        block = bisect_left(blocks.before, index) - 1
        newlines, nth = self._newlines_of(block), index - blocks.before[block] - 1
        if nth >= len(newlines):  # truncated since it was counted; the next poll notices
            return self._end
        return blocks.begins[block] + newlines[nth] + 1

    def _newlines_of(self, block: int) -> array[int]:
        """Return the offsets of a block's newlines."""
        begins = self._blocks.begins
        begin = begins[block]
        stop = begins[block + 1] if block + 1 < len(begins) else self._end
        cached = self._starts.pop(begin, None)
        if cached is None or cached[0] != stop:
            data = os.pread(self._fd, stop - begin, begin) if self._fd >= 0 else b""
            cached = stop, array("I", (match.start() for match in re.finditer(b"\n", data)))
        self._starts[begin] = cached
        if len(self._starts) > _KEPT_BLOCKS:
            self._starts.popitem(last=False)
        return cached[1]

    def _rewritten(self, size: int) -> bool:
        """Return whether a file that is not shorter has different contents than before."""
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
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._inode, self._blocks = fd, inode, _Blocks()
            self._starts.clear()
            self._last = begin
            self._fingerprint = b""
            self.generation += 1
            self._take(data, begin)
        return Change.REPLACED

    def _grow(self, stop: int) -> Change:
        data = os.pread(self._fd, stop - self._end, self._end)
        with self._lock:
            self._take(data, self._end)
        return Change.GREW if data else Change.NOTHING

    def _take(self, data: bytes, at: int) -> None:
        self._blocks.take(data, at)
        self._end = at + len(data)
        if newline := data.rfind(b"\n") + 1:
            self._last = at + newline
        self._fingerprint = (self._fingerprint + data)[-_FINGERPRINT:]


class _Blocks:
    """The number of newlines before each block of a file."""

    def __init__(self) -> None:
        self.begins = array("Q")  # first byte of each block, ascending
        self.before = array("Q")  # newlines before it, counted from the first block
        self.newlines = 0

    def take(self, data: bytes, at: int) -> None:
        """Count the newlines of the next bytes; `at` is their offset in the file."""
        done = 0
        while done < len(data) or not self.begins:
            if not self.begins or at + done - self.begins[-1] >= _BLOCK:
                self.begins.append(at + done)
                self.before.append(self.newlines)
            upto = done + _BLOCK - (at + done - self.begins[-1])
            self.newlines += data.count(b"\n", done, upto)
            done = min(upto, len(data))

    def followed_by(self, other: _Blocks) -> _Blocks:
        """Return both, as if counted one after the other."""
        both = _Blocks()
        both.begins = self.begins + other.begins
        both.before = self.before + array("Q", (n + self.newlines for n in other.before))
        both.newlines = self.newlines + other.newlines
        return both


def clean(raw: bytes) -> str:
    """Return a line's bytes as printable text with only SGR codes; bars in their last state.

    Text printed after an unfinished bar stands alone, since the bar is drawn again below.
    """
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    if "\r" in text:
        text = text[text.rindex("\r") + 1 :]
    if "\x1b" in text:
        text = _ESCAPE.sub(lambda match: match[0] if _SGR.fullmatch(match[0]) else "", text)
    if "%|" in text and (bar := _BAR.match(text)) is not None:
        text = text[bar.end() :]
    return _CONTROL.sub("", text).expandtabs(8)


def without_colours(line: str) -> str:
    """Remove SGR codes from a line."""
    return _SGR.sub("", line) if "\x1b" in line else line
