"""How far a phase is: of one rank, or of all that share its work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from jobs.run.events import PhaseEvent

if TYPE_CHECKING:
    from engine.ranks.telemetry import Telemetry

_EVERY: Final = 0.5  # seconds


class Progress:
    """Called with the number of things done; reports it in the events, a few times a second.

    Attributes:
        total: What is counted up to, if known; may become known later.
        ranks: What each rank has done of shared work, as far as known.

    Args:
        telemetry: The rank's.
        name: The phase.
        total: What the ranks together count up to, if known.
        shared: Whether ranks share the work, so that each counts its own part.
    """

    def __init__(self, telemetry: Telemetry, name: str, total: int | None, *, shared: bool) -> None:
        self._telemetry = telemetry
        self._name = name
        self.total = total
        self._shared = shared
        self._last_event = 0.0
        self._first: tuple[float, int] | None = None
        self.ranks: list[int] | None = None

    def __call__(self, done: int) -> None:
        """Report how many are done, in shared work: by this rank. The work has moved on."""
        self._telemetry.moved()
        if self._shared:
            self._telemetry.done = done
        self.say(done)

    def say(self, done: int) -> None:
        """Report how far all ranks are, while this rank waits for the others.

        Waiting is not progress and is not recorded as such: the other ranks record their own, and
        when none of them does, the job makes no progress.
        """
        if time.monotonic() - self._last_event < _EVERY:
            return
        self._last_event = time.monotonic()
        if self._shared and self._telemetry.rank == 0:
            self.ranks = self._of_all(done)
            done = sum(self.ranks)
        self._telemetry.emit(
            PhaseEvent(
                self._name,
                "progress",
                done,
                self.total,
                seconds_left=self._left(done),
                ranks=self.ranks,
            )
        )

    def _of_all(self, mine: int) -> list[int]:
        """Return the count of each rank; the others report theirs about once a second."""
        others = {
            status.rank: status.done or 0
            for status in self._telemetry.run_dir.rank_statuses()
            if status.phase == self._name
        }
        return [mine] + [others.get(rank, 0) for rank in range(1, max(others, default=0) + 1)]

    def _left(self, done: int) -> float | None:
        """Seconds to go at the pace so far, counted from the first thing done: loading a model
        comes before it.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done) if done else None
            return None
        begun, at = self._first
        if self.total is None or done <= at:
            return None
        return round((self.total - done) * (now - begun) / (done - at), 1)
