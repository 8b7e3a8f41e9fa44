"""What a person typed to go to a place in a log, or to see a part of it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from tui.log.finders import Both, LevelFinder
from tui.log.guarded import pattern_finders
from tui.log.levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.log.finders import Finder

_TIME: Final = re.compile(r"(\d\d?):(\d\d)(?::(\d\d))?")


@dataclass(frozen=True)
class Line:
    """A line by its number, from 1."""

    number: int


@dataclass(frozen=True)
class Share:
    """A part of the way through the log, from 0 to 1."""

    part: float


@dataclass(frozen=True)
class Time:
    """A time of day, in seconds since midnight."""

    seconds: int


Place = Line | Share | Time


def place_of(text: str) -> Place:
    """`1200` a line, `50%` a part, `14:05` or `14:05:30` a time of day.

    Raises:
        UserError: It is not one of these.
    """
    text = text.strip()
    if text.isdecimal():
        return Line(int(text))
    if text.endswith("%") and text[:-1].strip().isdecimal() and int(text[:-1]) <= 100:
        return Share(int(text[:-1]) / 100)
    if match := _TIME.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        if hours < 24 and minutes < 60 and seconds < 60:
            return Time(hours * 3600 + minutes * 60 + seconds)
    raise UserError(
        f"“{text}” is not a position in a log; use a line (1200), a percentage (50%) or a time "
        "(14:05)"
    )


@dataclass(frozen=True)
class Filter:
    """Which lines are shown: those with a pattern, of a level or worse, or both."""

    pattern: str = ""
    least: Level = Level.PLAIN

    def __bool__(self) -> bool:
        return bool(self.pattern) or self.least > Level.PLAIN

    @property
    def words(self) -> str:
        """`“loss” · warnings and errors`."""
        levels = {Level.WARNING: "warnings and errors", Level.ERROR: "errors"}
        parts = [f"“{self.pattern}”" if self.pattern else "", levels.get(self.least, "")]
        return " · ".join(part for part in parts if part)

    def more_serious(self) -> Filter:
        """Return the next choice of levels: all, warnings and errors, errors, all."""
        steps = {Level.PLAIN: Level.WARNING, Level.WARNING: Level.ERROR}
        return Filter(self.pattern, steps.get(self.least, Level.PLAIN))

    def finder(self) -> Callable[[], Finder] | None:
        """Return a factory of finders of the filter's lines; None if all lines are shown."""
        makes: list[Callable[[], Finder]] = []
        if self.least > Level.PLAIN:
            makes.append(lambda: LevelFinder(self.least))
        if self.pattern:
            makes.append(pattern_finders(self.pattern))
        return both(*makes) if makes else None


def both(
    first: Callable[[], Finder], other: Callable[[], Finder] | None = None
) -> Callable[[], Finder]:
    """Return a factory of finders of the lines that both find."""
    return first if other is None else lambda: Both(first(), other())
