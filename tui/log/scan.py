"""Search a log for lines, chunk by chunk, its end first. Independent of widgets."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from tui.log.finders import TooSlowError
from tui.log.log_model import Change

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.log.finders import Finder
    from tui.log.log_model import LogModel


# Small, so that a search that blocks the interpreter in C delays the screen only briefly.
_PIECE: Final = 256 << 10
TAIL: Final = 4 << 20


@dataclass(frozen=True, eq=False)
class Hits:
    """The lines found so far, as ascending offsets in the file; immutable.

    Attributes:
        share: How much of the file was searched, from 0 to 1.
        split: Where the end of the file begins that was searched first.
        generation: The log's generation that the offsets belong to.
    """

    older: array[int] = field(default_factory=lambda: array("Q"))
    newer: array[int] = field(default_factory=lambda: array("Q"))
    n_older: int = 0
    n_newer: int = 0
    unfinished: int | None = None  # the last line, while it has no newline
    share: float = 0.0
    generation: int = 0
    split: int = 0

    def __len__(self) -> int:
        return self.n_older + self.n_newer + (self.unfinished is not None)

    def __getitem__(self, index: int) -> int:
        if index < self.n_older:
            return self.older[index]
        if index < self.n_older + self.n_newer:
            return self.newer[index - self.n_older]
        if index < len(self) and self.unfinished is not None:
            return self.unfinished
        raise IndexError(index)

    @property
    def complete(self) -> bool:
        return self.share >= 1

    @property
    def state(self) -> tuple[object, ...]:
        """Return a value that changes whenever there is something to report."""
        counts = self.generation, self.n_older, self.n_newer, self.unfinished
        return *counts, round(self.share, 2), self.complete

    def at_or_after(self, offset: int) -> int:
        """Return the index of the first hit at or after `offset`; `len` if there is none."""
        if (index := bisect_left(self.older, offset, 0, self.n_older)) < self.n_older:
            return index
        index = bisect_left(self.newer, offset, 0, self.n_newer)
        if index < self.n_newer or self.unfinished is None or self.unfinished >= offset:
            return self.n_older + index
        return len(self)

    def before(self, offset: int) -> int:
        """Return the index of the last hit before `offset`; -1 if there is none."""
        return self.at_or_after(offset) - 1


class Scan:
    """One search through one log. A single thread works; results are handed over as `Hits`.

    The end of the file, which is on the screen, comes first, then the rest from the beginning;
    appended data is searched before the rest continues.

    Args:
        model: The log, all of whose lines are indexed.
        make: Makes finders: one for older lines, one for newer ones.
        tail: Bytes at the end to search first; 0 searches in file order.
    """

    def __init__(self, model: LogModel, make: Callable[[], Finder], tail: int = TAIL) -> None:
        self._model = model
        self.generation = model.generation
        _, end = model.extent
        start = 0
        if 0 < tail < end:
            start, _ = model.raw(model.index_of(end - tail))
        self._make = make
        self._split = start
        self._older = _Stretch(model, make(), 0, start)
        self._newer = _Stretch(model, make(), start, None)
        self._unfinished: int | None = None
        self._judged = (-1, -1)  # the unfinished line that was searched

    @property
    def hits(self) -> Hits:
        """Return what was found so far."""
        _, end = self._model.extent
        left = self._older.left(end) + self._newer.left(end)
        if self._judged == (self._newer.at, end):
            left -= end - self._newer.at
        older, newer = self._older.starts, self._newer.starts
        unfinished = self._unfinished if self._unfinished == self._newer.at else None
        return Hits(
            older,
            newer,
            len(older),
            len(newer),
            unfinished,
            1.0 if left <= 0 or not end else 1 - left / end,
            self.generation,
            self._split,
        )

    def work(self, seconds: float, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Search for about this long; return whether there is more to search."""
        deadline = time.monotonic() + seconds
        while not cancelled():
            if not (self._newer.step() or self._older.step()):
                self._look_at_the_unfinished()
                return False
            if time.monotonic() >= deadline:
                return True
        return False

    def _look_at_the_unfinished(self) -> None:
        """Search the unfinished last line, which stays unfinished if its writer was killed."""
        _, end = self._model.extent
        at = self._newer.at
        if (at, end) == self._judged:
            return
        self._judged, self._unfinished = (at, end), None
        if at < end:
            data = self._model.read(at, min(end - at, _PIECE), self.generation)
            if data and self._make().find(data):
                self._unfinished = at


class _Stretch:
    """A part of the file and the lines found in it."""

    def __init__(self, model: LogModel, finder: Finder, at: int, stop: int | None) -> None:
        self.starts = array("Q")
        self.at = at
        self._model = model
        self._generation = model.generation
        self._finder = finder
        self._stop = stop  # None: the end of the file, which moves
        self._inside = False  # within a line whose beginning was searched

    def left(self, end: int) -> int:
        return (end if self._stop is None else self._stop) - self.at

    def step(self) -> bool:
        """Search one more chunk of whole lines; return whether there was one."""
        left = self.left(self._model.extent[1])
        if left <= 0:
            return False
        data = self._model.read(self.at, min(left, _PIECE), self._generation)
        whole = data.rfind(b"\n") + 1
        if not whole:
            if len(data) < _PIECE:
                return False
            whole = len(data)  # one endless line: only its beginning is searched
        begin = data.find(b"\n") + 1 if self._inside else 0
        if self._inside and not begin:
            begin = whole
        lines = data[begin:whole]
        self._inside = data[whole - 1 : whole] != b"\n"
        if lines:
            base = self.at + begin
            self.starts.extend(base + start for start in self._finder.find(lines))
        self.at += whole
        return True


def step_from(hits: Hits, offset: int, forward: bool) -> int | None:
    """Return the number of the next hit from a line.

    Args:
        hits: The hits.
        offset: Where the line begins. A hit there counts forward, not backward.
        forward: The direction.

    Returns:
        The number; -1 if there is none in that direction; None while unknown.
    """
    if forward:
        number = hits.at_or_after(offset)
        sure = number < hits.n_older or offset >= hits.split
        index = number if number < len(hits) else -1
    else:
        index = hits.before(offset)
        sure = index >= hits.n_older
    return index if sure or hits.complete else None


def nearest(hits: Hits, offset: int) -> int:
    """Return the index of the hit at `offset`, or else the last before it, or the first."""
    number = hits.at_or_after(offset)
    if number < len(hits) and hits[number] == offset:
        return number
    return max(0, number - 1)


# -- watch ----------------------------------------------------------------------------------
# Follow and search a log in one thread. Independent of widgets.


_WORK: Final = 0.05  # seconds of searching before the end of the file is read again
_TELL_EVERY: Final = 4  # of these


@dataclass(frozen=True)
class Looked:
    """The end of the file was read. `added`: lines that are new at the front."""

    change: Change
    added: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """Hits of a search so far. `number` is the value that `ask` returned.

    `problem` says why the search ended.
    """

    name: str
    number: int
    hits: Hits
    problem: str = ""


@dataclass
class _Question:
    number: int
    make: Callable[[], Finder]
    tail: int
    scan: Scan | None = None
    posted: tuple[object, ...] = ()
    turns: int = 0  # turns since its last answer


class Watch:
    """The thread that follows one open log.

    Args:
        model: The log; closed when the watch ends.
        every: Seconds between refreshes.
        resting: Whether nobody can see the log; called in the thread.
    """

    def __init__(
        self, model: LogModel, every: float, resting: Callable[[], bool] = lambda: False
    ) -> None:
        self.model = model
        self._every = every
        self._resting = resting
        self._closed = Event()
        self._wake = Event()
        self._lock = Lock()
        self._questions: dict[str, _Question] = {}
        self._asked = 0

    def ask(self, name: str, make: Callable[[], Finder] | None, tail: int = TAIL) -> int:
        """Start a search under this name, replacing the previous one; None stops it.

        Args:
            name: The search's name.
            make: Makes the finders.
            tail: Bytes at the end to search first; 0 searches in file order.

        Returns:
            The number of the search, which its answers carry.
        """
        with self._lock:
            self._asked += 1
            self._questions.pop(name, None)
            if make is not None:
                self._questions[name] = _Question(self._asked, make, tail)
        self._wake.set()
        return self._asked

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wake.set()

    def run(self, post: Callable[[Looked | Answer], None]) -> None:
        """Post changes and search results until closed."""
        failed = ""
        while not self._closed.is_set():
            more = False
            try:
                if not self._resting():
                    self._look(post)
                    more = self._look_through(post)
                failed = ""
            except OSError as error:
                if failed != str(error):
                    failed = str(error)
                    post(Looked(Change.NOTHING, problem=failed))
            if not more:
                self._wake.wait(self._every)
                self._wake.clear()
        self.model.close()

    def _drop(self, name: str, number: int) -> None:
        """Stop this search, unless another one has replaced it."""
        with self._lock:
            if (now := self._questions.get(name)) is not None and now.number == number:
                del self._questions[name]

    # -- inside ----------------------------------------------------------------------------

    def _look(self, post: Callable[[Looked | Answer], None]) -> None:
        change = polled = self.model.poll()
        while polled is Change.GREW and not self._closed.is_set():
            polled = self.model.poll()
        if polled is Change.REPLACED:
            change = polled
        if change is not Change.NOTHING:
            post(Looked(change))
        if not self.model.complete and (added := self.model.index_older(self._closed.is_set)):
            post(Looked(Change.NOTHING, added))

    def _look_through(self, post: Callable[[Looked | Answer], None]) -> bool:
        """Work on each search for a short time; return whether there is more to do."""
        with self._lock:
            questions = dict(self._questions)
        more = False
        for name, question in questions.items():
            scan = question.scan
            if scan is None or scan.generation != self.model.generation:
                scan = question.scan = Scan(self.model, question.make, question.tail)
                question.turns = -1

            def cancelled(name: str = name, number: int = question.number) -> bool:
                now = self._questions.get(name)
                return self._closed.is_set() or now is None or now.number != number

            try:
                goes_on = scan.work(_WORK, cancelled)
            except TooSlowError as error:
                self._drop(name, question.number)
                post(Answer(name, question.number, scan.hits, str(error)))
                continue
            hits = scan.hits
            more = more or goes_on
            # Reporting every bit of a long search would keep the screen busy.
            question.turns = (question.turns + 1) % _TELL_EVERY if goes_on else 0
            if question.turns == 0 and hits.state != question.posted:
                question.posted = hits.state
                post(Answer(name, question.number, hits))
        return more
