"""Follow a log and look through it, in one thread. Knows no widgets."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from tui.log.guarded import TooSlowError
from tui.log.log_model import Change
from tui.log.scan import TAIL, Scan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.log.finders import Finder
    from tui.log.log_model import LogModel
    from tui.log.scan import Hits

_WORK: Final = 0.05  # seconds of searching, after which the end of the file is read again
_TELL_EVERY: Final = 4  # of these


@dataclass(frozen=True)
class Looked:
    """The end of the file was read. `added`: lines that are new at the front."""

    change: Change
    added: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """The hits of a search so far. `number` is the one that `ask` returned.

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
    turns: int = 0  # since its last answer


class Watch:
    """The life of one open log.

    Args:
        model: The log; closed when the watch ends.
        every: Seconds between two looks.
        resting: Whether nobody can see the log now; asked in the thread.
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
        """Look for other lines under this name from now on; None for none.

        Args:
            name: Of what is asked.
            make: Makes what finds the lines.
            tail: Bytes at the end to begin with; 0 for all in the order of the file.

        Returns:
            The number of the question, which its answers carry.
        """
        with self._lock:
            self._asked += 1
            self._questions.pop(name, None)
            if make is not None:
                self._questions[name] = _Question(self._asked, make, tail)
        self._wake.set()
        return self._asked

    def close(self) -> None:
        """Let the thread end."""
        self._closed.set()
        self._wake.set()

    def run(self, post: Callable[[Looked | Answer], None]) -> None:
        """Post what changes and what searches find, until closed."""
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
        """Look for it no more, unless something else is asked for by now."""
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
        """Work on each question for a short time; return whether there is more to do."""
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
            # While much is looked through, telling each bit of it would keep the screen busy.
            question.turns = (question.turns + 1) % _TELL_EVERY if goes_on else 0
            if question.turns == 0 and hits.state != question.posted:
                question.posted = hits.state
                post(Answer(name, question.number, hits))
        return more
