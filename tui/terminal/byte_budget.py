"""How many bytes may go to the terminal now. Pure: time is given, nothing is waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE: Final = 50_000.0  # bytes a second; half of a slow link, so that nothing queues up in it
SAVED: Final = 25_000.0  # bytes that may be spent at once after a rest: about a whole screen
BORROWED: Final = 50_000.0  # bytes by which what answers a key may run ahead
ANSWERS_WITHIN: Final = 0.4  # seconds after a key in which what is painted counts as its answer
MOST_BYTES_BEHIND: Final = 16_384  # with more, the terminal takes nothing just now
MOST_WRITES_BEHIND: Final = 12  # three make a frame; Textual blocks its loop at thirty
_LOOK_AGAIN: Final = 0.05  # seconds until a terminal that takes nothing is tried again


@dataclass
class ByteBudget:
    """Decides whether painting waits. All times are seconds of one clock.

    Attributes:
        now: When it was last asked.
        left: Bytes that may be sent at once; below zero there is a debt to wait off.
        asked_at: When a person last did something.
    """

    now: float
    left: float = SAVED
    asked_at: float = float("-inf")

    def spend(self, now: float, count: int) -> None:
        """Count bytes that are on their way."""
        self._earn(now)
        self.left -= count

    def wait(self, now: float, bytes_behind: int = 0, writes_behind: int = 0) -> float:
        """Seconds until something may be painted; 0 when it may be now.

        Args:
            now: The time.
            bytes_behind: What was sent and the terminal has not taken.
            writes_behind: The same, in calls.
        """
        self._earn(now)
        if bytes_behind > MOST_BYTES_BEHIND or writes_behind > MOST_WRITES_BEHIND:
            return _LOOK_AGAIN
        answers = now - self.asked_at < ANSWERS_WITHIN
        least = -BORROWED if answers else 0.0
        return max(0.0, (least - self.left) / RATE)

    def _earn(self, now: float) -> None:
        self.left = min(SAVED, self.left + max(0.0, now - self.now) * RATE)
        self.now = now
