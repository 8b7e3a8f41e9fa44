"""Searching a log in the reader: filter, search, errors and times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from jobs.errors import UserError
from tui.log import finders
from tui.log.scan import TAIL, Hits, step_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.log.finders import Finder
    from tui.log.reader import LogReader
    from tui.log.scan import Answer


# -- places ---------------------------------------------------------------------------------
# What a user types to go to a place in a log, or to filter it. Pure.


_TIME: Final = re.compile(r"(\d\d?):(\d\d)(?::(\d\d))?")


@dataclass(frozen=True)
class Line:
    """A line by its number, from 1."""

    number: int


@dataclass(frozen=True)
class Share:
    """A position as a fraction of the log, from 0 to 1."""

    part: float


@dataclass(frozen=True)
class Time:
    """A time of day, in seconds since midnight."""

    seconds: int


Place = Line | Share | Time


def place_of(text: str) -> Place:
    """Parse a place: line `1200`, fraction `50%`, or time of day `14:05` or `14:05:30`.

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
    """Which lines to show: those that match a pattern, of a level or worse, or both."""

    pattern: str = ""
    least: finders.Level = finders.Level.PLAIN

    def __bool__(self) -> bool:
        return bool(self.pattern) or self.least > finders.Level.PLAIN

    @property
    def words(self) -> str:
        """Return `“loss” · warnings and errors`."""
        levels = {finders.Level.WARNING: "warnings and errors", finders.Level.ERROR: "errors"}
        parts = [f"“{self.pattern}”" if self.pattern else "", levels.get(self.least, "")]
        return " · ".join(part for part in parts if part)

    def more_serious(self) -> Filter:
        """Return the next choice of levels: all, warnings and errors, errors, all."""
        steps = {
            finders.Level.PLAIN: finders.Level.WARNING,
            finders.Level.WARNING: finders.Level.ERROR,
        }
        return Filter(self.pattern, steps.get(self.least, finders.Level.PLAIN))

    def finder(self) -> Callable[[], Finder] | None:
        """Return a factory of finders for the filter's lines; None if all lines are shown."""
        makes: list[Callable[[], Finder]] = []
        if self.least > finders.Level.PLAIN:
            makes.append(lambda: finders.LevelFinder(self.least))
        if self.pattern:
            makes.append(finders.pattern_finders(self.pattern))
        return both(*makes) if makes else None


def both(
    first: Callable[[], Finder], other: Callable[[], Finder] | None = None
) -> Callable[[], Finder]:
    """Return a factory of finders for lines that both find."""
    return first if other is None else lambda: finders.Both(first(), other())


# -- search ---------------------------------------------------------------------------------


Name = Literal["filter", "search", "errors", "time"]
_NOTHING = {
    "search": "no line contains “{}”",
    "errors": "no errors in this log",
    "time": "no line at or after that time",
    "filter": "",
}


@dataclass
class _Jump:
    """A pending jump. Forward, a hit at `offset` counts."""

    offset: int
    forward: bool


class Finding:
    """Sends searches to the thread that watches a reader's log, and moves the reader to results.

    Args:
        reader: The reader.
        tell: Shows a transient message.

    Attributes:
        filter: Which lines are shown.
        pattern: The current search.
        hits: Results by the name of the search.
    """

    def __init__(self, reader: LogReader, tell: Callable[[str], None]) -> None:
        self.reader = reader
        self.filter = Filter()
        self.pattern = ""
        self.hits: dict[Name, Hits] = {}
        self._tell = tell
        self._numbers: dict[Name, int] = {}
        self._jumps: dict[Name, _Jump] = {}
        self._keep: int | None = None  # the line to stay at while the filter is applied

    # -- asking ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Repeat the searches in a newly opened log."""
        self.hits.clear()
        self._jumps.clear()
        self._numbers.clear()
        self._keep = None
        self.reader.only = None
        if self.filter:
            self.show_only(self.filter)
        else:
            self._ask_search()

    def show_only(self, chosen: Filter) -> None:
        """Apply a filter, and stay near the current line."""
        reader = self.reader
        where = reader.offset_of(reader.row)
        self.filter = chosen
        self._ask("filter", chosen.finder())
        self._keep = where if chosen else None
        reader.show_only(Hits() if chosen else None, where)
        self._ask_search()
        if "errors" in self._numbers:
            self._ask_errors()

    def search(self, text: str) -> None:
        """Search from the current line, or backward from a followed end. "" clears the search."""
        self.pattern = text
        pattern = finders.compile_pattern(text)
        self.reader.mark(pattern if text else None, finders.marked_up_to(pattern.pattern))
        self._ask_search()
        if text:
            self._jump("search", self._here(forward=not self.reader.following, stay=True))

    def next_match(self, forward: bool) -> None:
        """Go to the next match, or the previous one."""
        if self.pattern:
            self._jump("search", self._here(forward))
        else:
            self._tell("no search text; press / to search")

    def next_error(self, forward: bool) -> None:
        """Go to the next error, skipping warnings, or the previous one."""
        if "errors" not in self._numbers:
            self._ask_errors()
        self._jump("errors", self._here(forward and not self.reader.following))

    def go_to(self, place: Place) -> None:
        """Go to a line, a fraction of the log, or a time."""
        reader, model = self.reader, self.reader.model
        if model is None or not reader.count:
            return
        if isinstance(place, Share):
            reader.go_to(round(place.part * (reader.count - 1)))
        elif isinstance(place, Line):
            line = max(0, min(place.number, len(model)) - 1)
            reader.go_to(reader.row_of(model.raw(line)[0]))
        else:
            self._ask("time", partial(finders.TimeFinder, place.seconds), tail=0)
            self._jump("time", self._here(forward=not reader.following))

    def _ask_search(self) -> None:
        make = None
        if self.pattern:
            make = both(finders.pattern_finders(self.pattern), self.filter.finder())
        self._ask("search", make)

    def _ask_errors(self) -> None:
        heads = partial(finders.LevelFinder, finders.Level.ERROR, heads=True)
        self._ask("errors", both(heads, self.filter.finder()))

    def _ask(self, name: Name, make: Callable[[], Finder] | None, tail: int = TAIL) -> None:
        self.hits.pop(name, None)
        self._jumps.pop(name, None)
        self._numbers.pop(name, None)
        if self.reader.watching is not None:
            number = self.reader.watching.ask(name, make, tail)
            if make is not None:
                self._numbers[name] = number

    # -- answers ---------------------------------------------------------------------------

    def take(self, answer: Answer) -> None:
        """Handle search results; more may follow."""
        name: Name = answer.name  # type: ignore[assignment]  # only we ask
        model = self.reader.model
        if self._numbers.get(name) != answer.number or model is None:
            return  # from a search that has been replaced
        if answer.problem:
            self._give_up(name, answer.problem)
            return
        if answer.hits.generation != model.generation:
            return
        self.hits[name] = answer.hits
        if name == "filter":
            self._show(answer.hits)
        elif jump := self._jumps.get(name):
            self._jump(name, jump)

    def _give_up(self, name: Name, problem: str) -> None:
        """Stop a search that takes too long, and say so."""
        self._tell(problem)
        if name == "filter" or self.filter.pattern:
            self.show_only(Filter(least=self.filter.least))
        if name == "search":
            self.search("")

    def _show(self, hits: Hits) -> None:
        keep = self._keep
        self.reader.show_only(hits, keep)
        if keep is not None and step_from(hits, keep, forward=False) is not None:
            self._keep = None

    def _here(self, forward: bool, *, stay: bool = False) -> _Jump:
        """Return a jump from the current line. `stay`: a hit on that line counts."""
        reader = self.reader
        if reader.following and not forward:
            _, end = reader.model.extent if reader.model is not None else (0, 0)
            return _Jump(end + 1, forward=False)
        return _Jump(reader.offset_of(reader.row) + (forward and not stay), forward)

    def _jump(self, name: Name, jump: _Jump) -> None:
        """Jump now if the target is known, else once it is."""
        self._jumps.pop(name, None)
        hits = self.hits.get(name)
        number = step_from(hits, jump.offset, jump.forward) if hits is not None else None
        if hits is None or number is None or (number < 0 and not hits.complete):
            self._jumps[name] = jump
        elif not len(hits):
            self._tell(_NOTHING[name].format(self.pattern))
        else:
            if number < 0:
                number = 0 if jump.forward else len(hits) - 1
                self._tell(f"{'end' if jump.forward else 'beginning'} reached; wrapped around")
            self.reader.go_to(self.reader.row_of(hits[number]))
        if name == "time" and name not in self._jumps:
            self._ask("time", None)

    # -- words -----------------------------------------------------------------------------

    @property
    def is_looking(self) -> float | None:
        """Return how much of the file the slowest search has covered; None when all are done."""
        shares = [
            self.hits[name].share if name in self.hits else 0.0
            for name in self._numbers
            if name not in self.hits or not self.hits[name].complete
        ]
        return min(shares, default=None)

    @property
    def words(self) -> list[str]:
        """Describe the search and its results."""
        words = []
        if self.filter:
            words.append(f"only {self.filter.words}")
        if self.pattern:
            words.append(f"“{self.pattern}” {self._matches()}")
        if (looking := self.is_looking) is not None:
            words.append(f"searching {looking:.0%}")
        return words

    def _matches(self) -> str:
        hits = self.hits.get("search")
        if hits is None:
            return "…"
        more = "" if hits.complete else "+"
        here = self.reader.offset_of(self.reader.row)
        number = hits.at_or_after(here)
        countable = hits.complete or number < hits.n_older  # its number is known
        if countable and not self.reader.following and number < len(hits) and hits[number] == here:
            return f"{number + 1:,} of {len(hits):,}{more}"
        return f"{len(hits):,}{more} line{'s' * (len(hits) != 1)}"
