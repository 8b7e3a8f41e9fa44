"""Find lines in chunks of a log by pattern, level or time. Independent of files and widgets.

A finder receives whole lines as bytes, chunk by chunk in order, and may keep state from one
chunk to the next.
"""

from __future__ import annotations

import re
import time
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from jobs.errors import UserError
from tui.log.log_model import LONGEST_LINE, clean, without_colours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# -- levels ---------------------------------------------------------------------------------
# The severity of a log line, judged by its words. Pure.


class Level(IntEnum):
    """Severity, ascending. `PLAIN` lines have none."""

    DEBUG = 0
    PLAIN = 1
    WARNING = 2
    ERROR = 3

    @property
    def mark(self) -> str:
        """Return the letter in front of such a line, so that color is not the only sign."""
        return "D WE"[self]

    @property
    def role(self) -> str:
        """Return the color role."""
        return ("dim", "", "warn", "bad")[self]


# torch's launcher prefixes a rank's output: `[rank0]: Traceback …`.
_RANK: Final = r"^(?:\[rank\d+\]: )?"
_LEVELS: Final = (
    (
        Level.ERROR,
        re.compile(
            r"\b(?:ERROR|CRITICAL|FATAL)\b|Traceback \(most recent|Fatal Python error|"
            r"Segmentation fault|\b(?:CUDA|NCCL) error\b|"
            + _RANK
            + r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)"
        ),
    ),
    (Level.WARNING, re.compile(r"\bWARN(?:ING)?\b|Warning:")),
    (Level.DEBUG, re.compile(r"\bDEBUG\b")),
)
# Any warning or error contains one of these; bytes, to skip most input quickly.
NEEDLES: Final = {
    Level.ERROR: (
        b"ERROR",
        b"CRITICAL",
        b"FATAL",
        b"Traceback",
        b"Fatal Python",
        b"Segmentation fault",
        b" error",
        b"Error",
        b"Exception",
        b"Interrupt",
    ),
    Level.WARNING: (b"WARN", b"Warning:"),
}

_TRACEBACK: Final = "Traceback (most recent call last)"
_INDENTED: Final = re.compile(_RANK + r"(?:\s|$)")


def level_of(text: str) -> Level:
    """Classify one line."""
    return next((level for level, pattern in _LEVELS if pattern.search(text)), Level.PLAIN)


def begins_traceback(text: str) -> bool:
    """Return whether the following lines, up to the first unindented one, belong to this one."""
    return _TRACEBACK in text


def goes_on(text: str) -> bool:
    """Return whether a traceback continues after this line."""
    return _INDENTED.match(text) is not None


# -- finders --------------------------------------------------------------------------------


DAY: Final = 24 * 3600
_STAMP: Final = re.compile(
    rb"^(?:\[?\d{4}-\d\d-\d\d[ T])?\[?([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?(?!\d)", re.MULTILINE
)
_SPECIAL: Final = re.compile(r"[\\^$.|?*+()\[\]{}]")
_NEAR_END: Final = 16 << 10  # bytes at the end of a chunk that are searched for its last time


class Finder(Protocol):
    """Finds lines of one kind."""

    def find(self, data: bytes) -> list[int]:
        """Return the starts of the matching lines, ascending."""
        ...


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression that is case-sensitive only if it contains capitals.

    Invalid regular expressions, such as `loss (`, are searched for literally.
    """
    flags = re.MULTILINE | (re.NOFLAG if any(char.isupper() for char in text) else re.IGNORECASE)
    try:
        return re.compile(text, flags)
    # Such as `a{99999999999}`, or a thousand brackets.
    except (re.error, OverflowError, RecursionError):
        return re.compile(re.escape(text), flags)


class PatternFinder:
    """Finds lines whose printed text matches a pattern."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._folded = bool(pattern.flags & re.IGNORECASE)
        # Searching literal text without the pattern is ten times as fast.
        text = pattern.pattern
        simple = text.isascii() and text.isprintable() and not _SPECIAL.search(text)
        self._literal = (text.lower() if self._folded else text).encode() if simple else b""

    def find(self, data: bytes) -> list[int]:
        if data.isascii() and b"\x1b" not in data and b"\r" not in data:
            if self._literal:
                return candidates(data.lower() if self._folded else data, [self._literal])
            return list(self._in_plain(data.decode("ascii")))
        return [start for start, stop in lines_of(data) if self._search(plain(data[start:stop]))]

    def _search(self, text: str, at: int = 0) -> tuple[int, int] | None:
        """Return the first and last character of the next match."""
        match = self._pattern.search(text, at)
        return match.span() if match else None

    def _in_plain(self, text: str) -> Iterator[int]:
        """Yield the starts of matching lines in ASCII text, where a character is a byte."""
        at = 0
        while at < len(text) and (match := self._search(text, at)):
            first, last = match
            start = text.rfind("\n", 0, first) + 1
            stop = text.find("\n", first)
            stop = len(text) if stop < 0 else stop
            # A pattern may match across a line end, which is not part of the printed text.
            if first < len(text) and (last <= stop or self._search(text[start:stop])):
                yield start
            at = stop + 1


class LevelFinder:
    """Finds lines of a level or worse; tracebacks as a whole.

    Args:
        least: `WARNING` or `ERROR`.
        heads: Only the first of consecutive lines, as targets to jump to.
    """

    def __init__(self, least: Level, *, heads: bool = False) -> None:
        self._least = least
        self._heads = heads
        self._needles = [n for level, some in NEEDLES.items() if level >= least for n in some]
        self._inside = False  # within a traceback
        self._adjacent = False  # the previous line matched

    def find(self, data: bytes) -> list[int]:
        starts: list[int] = []
        expected = 0  # where the line after the last match begins
        adjacent = self._adjacent
        at = self._rest(data, 0, starts) if self._inside else 0
        if at:
            expected, adjacent = at, True
        for start in candidates(data, self._needles):
            if start < at:
                continue
            stop = _end_of(data, start)
            text = plain(data[start:stop])
            if level_of(text) < self._least:
                continue
            if not (self._heads and adjacent and start == expected):
                starts.append(start)
            at = min(stop + 1, len(data))
            if begins_traceback(text):
                at = self._rest(data, at, starts)
            expected, adjacent = at, True
        self._adjacent = adjacent and expected >= len(data)
        return starts

    def _rest(self, data: bytes, at: int, starts: list[int]) -> int:
        """Collect a traceback's lines from `at`; return where the next other line begins."""
        self._inside = True
        while self._inside and at < len(data):
            stop = _end_of(data, at)
            self._inside = goes_on(plain(data[at:stop]))
            if not self._heads:
                starts.append(at)
            at = stop + 1
        return min(at, len(data))


class TimeFinder:
    """Finds the first line at or after a time of day, for each day in the log.

    Args:
        seconds: Seconds since midnight.
    """

    def __init__(self, seconds: int) -> None:
        self._target = seconds
        self._before: int | None = None

    def find(self, data: bytes) -> list[int]:
        first = _STAMP.search(data)
        if first is None:
            return []
        last = first
        for stamp in _STAMP.finditer(data, max(first.start(), len(data) - _NEAR_END)):
            last = stamp
        before, here, there = self._before, seconds_of(first), seconds_of(last)
        if before is not None and before <= here <= there and not before < self._target <= there:
            self._before = there
            return []  # the time is not passed here
        return [stamp.start() for stamp in _STAMP.finditer(data) if self._passes(seconds_of(stamp))]

    def _passes(self, now: int) -> bool:
        before, self._before = self._before, now
        if before is None:
            return now >= self._target
        if now >= before:
            return before < self._target <= now
        if before - now < DAY // 2:  # clocks are set back, and threads write out of order
            self._before = before
            return False
        return self._target > before or self._target <= now


class Both:
    """Finds lines that two finders both find."""

    def __init__(self, first: Finder, other: Finder) -> None:
        self._first = first
        self._other = other

    def find(self, data: bytes) -> list[int]:
        there = set(self._other.find(data))
        return [start for start in self._first.find(data) if start in there]


def plain(line: bytes) -> str:
    """Return a line as printed, without colors; very long lines are cut."""
    return without_colours(clean(line[:LONGEST_LINE]))


def lines_of(data: bytes) -> Iterator[tuple[int, int]]:
    """Return the first byte of each line, and its newline."""
    at = 0
    while at < len(data):
        stop = _end_of(data, at)
        yield at, stop
        at = stop + 1


def candidates(data: bytes, needles: list[bytes]) -> list[int]:
    """Return the starts of lines that contain one of these, ascending."""
    starts = set()
    for needle in needles:
        at = data.find(needle)
        while at >= 0:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            at = data.find(needle, _end_of(data, at))
    return sorted(starts)


def seconds_of(stamp: re.Match[bytes]) -> int:
    """Return seconds since midnight."""
    hours, minutes, seconds = (int(part or 0) for part in stamp.groups())
    return hours * 3600 + minutes * 60 + seconds


def _end_of(data: bytes, at: int) -> int:
    stop = data.find(b"\n", at)
    return len(data) if stop < 0 else stop


# -- guarded --------------------------------------------------------------------------------
# A deadline for regular expressions that may take forever.
#
# `(a|aa)+$` takes longer than the age of the universe on a line of a hundred letters, and
# Python's `re` blocks all threads meanwhile: the screen would freeze. The `regex` library
# releases the interpreter while it searches, and supports a timeout.


SECONDS: Final = 2.0  # for one chunk of a log; milliseconds are normal
_QUOTED: Final = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_CHOICES: Final = re.compile(r"[*+?{|]")
_GROUP_AGAIN: Final = re.compile(r"\)[*+?{]")
# Line lengths at which a pattern with that number of choices is always fast.
_MARKED_UP_TO: Final = {0: 1 << 20, 1: 1 << 20, 2: 200, 3: 60}


class TooSlowError(UserError):
    """A pattern exceeded its deadline."""


def choices(text: str) -> int:
    """Count the places where a pattern can continue in several ways. Pure."""
    return len(_CHOICES.findall(_QUOTED.sub("", text)))


def marked_up_to(text: str) -> int:
    """Return the longest line, in characters, that can be matched without a deadline. Pure."""
    if _GROUP_AGAIN.search(_QUOTED.sub("", text)):
        return 0
    return _MARKED_UP_TO.get(choices(text), 0)


def pattern_finders(text: str) -> Callable[[], Finder]:
    """Return a factory of finders for matching lines; a finder may raise `TooSlowError`."""
    pattern = compile_pattern(text)
    if choices(pattern.pattern) < 2:
        return partial(PatternFinder, pattern)
    return partial(_GuardedFinder, pattern)


class _GuardedFinder(PatternFinder):
    """A `PatternFinder` with a deadline."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        import regex  # 1 % of the dashboard's startup time, and few searches need it

        super().__init__(pattern)
        self._guarded = regex.compile(pattern.pattern, pattern.flags)
        self._deadline = 0.0

    def find(self, data: bytes) -> list[int]:
        self._deadline = time.monotonic() + SECONDS
        try:
            return super().find(data)
        except TimeoutError:
            raise TooSlowError(f"“{self._guarded.pattern}” takes too long", "simplify it") from None

    def _search(self, text: str, at: int = 0) -> tuple[int, int] | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        match = self._guarded.search(text, at, timeout=left, concurrent=True)
        return match.span() if match else None
