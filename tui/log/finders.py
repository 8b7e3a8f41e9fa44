"""Find lines in pieces of a log, by pattern, level or time. Know no files and no widgets.

A finder is given whole lines as bytes, piece after piece in their order, and may remember how the
last one ended.
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
# How serious a log line is, by its words. Pure.


class Level(IntEnum):
    """From what can be overlooked to what cannot. `PLAIN` is a line that says nothing of it."""

    DEBUG = 0
    PLAIN = 1
    WARNING = 2
    ERROR = 3

    @property
    def mark(self) -> str:
        """The letter that stands before such a line, so that colour is not all that tells."""
        return "D WE"[self]

    @property
    def role(self) -> str:
        """The role its colour follows from."""
        return ("dim", "", "warn", "bad")[self]


# torch's launcher puts the rank before what a rank wrote: `[rank0]: Traceback …`.
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
# A line without any of these is neither a warning nor an error; bytes, to pass over much quickly.
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
    """Whether the lines after this one, to the first that is not indented, belong to it."""
    return _TRACEBACK in text


def goes_on(text: str) -> bool:
    """Whether a line within a traceback is not its last."""
    return _INDENTED.match(text) is not None


# -- finders --------------------------------------------------------------------------------


DAY: Final = 24 * 3600
_STAMP: Final = re.compile(
    rb"^(?:\[?\d{4}-\d\d-\d\d[ T])?\[?([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?(?!\d)", re.MULTILINE
)
_SPECIAL: Final = re.compile(r"[\\^$.|?*+()\[\]{}]")
_NEAR_END: Final = 16 << 10  # bytes at the end of a piece among which its last time is


class Finder(Protocol):
    """Finds lines of a kind."""

    def find(self, data: bytes) -> list[int]:
        """Return the starts of the matching lines, ascending."""
        ...


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression that is case-sensitive only if it has capital letters.

    What is no regular expression, such as `loss (`, is looked for as it stands.
    """
    flags = re.MULTILINE | (re.NOFLAG if any(char.isupper() for char in text) else re.IGNORECASE)
    try:
        return re.compile(text, flags)
    except (re.error, OverflowError, RecursionError):  # `a{99999999999}`, a thousand brackets
        return re.compile(re.escape(text), flags)


class PatternFinder:
    """Lines whose printed text a pattern matches."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._folded = bool(pattern.flags & re.IGNORECASE)
        # Text that means itself is found ten times as fast without the pattern.
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
        """First and last character of the next match."""
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
            # A pattern may reach over the end of a line, which is none in what is printed.
            if first < len(text) and (last <= stop or self._search(text[start:stop])):
                yield start
            at = stop + 1


class LevelFinder:
    """Lines of a level or worse, tracebacks as a whole.

    Args:
        least: `WARNING` or `ERROR`.
        heads: Only the first of lines that follow each other: what to jump to.
    """

    def __init__(self, least: Level, *, heads: bool = False) -> None:
        self._least = least
        self._heads = heads
        self._needles = [n for level, some in NEEDLES.items() if level >= least for n in some]
        self._inside = False  # a traceback
        self._adjacent = False  # the line before was found

    def find(self, data: bytes) -> list[int]:
        starts: list[int] = []
        expected = 0  # where the line begins that follows the last found one
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
        """Take the lines of a traceback from `at` on; where the next other line begins."""
        self._inside = True
        while self._inside and at < len(data):
            stop = _end_of(data, at)
            self._inside = goes_on(plain(data[at:stop]))
            if not self._heads:
                starts.append(at)
            at = stop + 1
        return min(at, len(data))


class TimeFinder:
    """The first line at or after a time of day, for each day that the log has.

    Args:
        seconds: Since midnight.
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
    """Lines that two finders find."""

    def __init__(self, first: Finder, other: Finder) -> None:
        self._first = first
        self._other = other

    def find(self, data: bytes) -> list[int]:
        there = set(self._other.find(data))
        return [start for start in self._first.find(data) if start in there]


def plain(line: bytes) -> str:
    """Return a line as printed, without colors; of a very long one, its beginning."""
    return without_colours(clean(line[:LONGEST_LINE]))


def lines_of(data: bytes) -> Iterator[tuple[int, int]]:
    """First byte of each line, and its newline."""
    at = 0
    while at < len(data):
        stop = _end_of(data, at)
        yield at, stop
        at = stop + 1


def candidates(data: bytes, needles: list[bytes]) -> list[int]:
    """Find the starts of lines that contain one of these, ascending."""
    starts = set()
    for needle in needles:
        at = data.find(needle)
        while at >= 0:
            starts.add(data.rfind(b"\n", 0, at) + 1)
            at = data.find(needle, _end_of(data, at))
    return sorted(starts)


def seconds_of(stamp: re.Match[bytes]) -> int:
    """Seconds since midnight."""
    hours, minutes, seconds = (int(part or 0) for part in stamp.groups())
    return hours * 3600 + minutes * 60 + seconds


def _end_of(data: bytes, at: int) -> int:
    stop = data.find(b"\n", at)
    return len(data) if stop < 0 else stop


# -- guarded --------------------------------------------------------------------------------
# Regular expressions that may take forever get a deadline.
#
# `(a|aa)+$` needs longer than the universe for a line of a hundred letters, and Python's `re`
# lets no other thread run meanwhile: the screen would freeze. The `regex` library lets go of
# the interpreter while it searches, and stops when it is asked to.


SECONDS: Final = 2.0  # for one piece of a log, which takes milliseconds otherwise
_QUOTED: Final = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_CHOICES: Final = re.compile(r"[*+?{|]")
_GROUP_AGAIN: Final = re.compile(r"\)[*+?{]")
# Characters of a line in which a pattern with that number of choices is always found soon.
_MARKED_UP_TO: Final = {0: 1 << 20, 1: 1 << 20, 2: 200, 3: 60}


class TooSlowError(UserError):
    """A pattern took longer than it may."""


def choices(text: str) -> int:
    """Count the places where a pattern can continue in several ways. Pure."""
    return len(_CHOICES.findall(_QUOTED.sub("", text)))


def marked_up_to(text: str) -> int:
    """Characters of the longest line in which matches may be looked for at once. Pure."""
    if _GROUP_AGAIN.search(_QUOTED.sub("", text)):
        return 0
    return _MARKED_UP_TO.get(choices(text), 0)


def pattern_finders(text: str) -> Callable[[], Finder]:
    """Return a factory of finders of the lines that match; one may raise `TooSlowError`."""
    pattern = compile_pattern(text)
    if choices(pattern.pattern) < 2:
        return partial(PatternFinder, pattern)
    return partial(_GuardedFinder, pattern)


class _GuardedFinder(PatternFinder):
    """Finds what a `PatternFinder` does, or gives up."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        import regex  # 1 % of the dashboard's start, and few searches need it

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
