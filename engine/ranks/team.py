"""The ranks of an attempt, as far as they meet outside of collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.ranks.control import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.ranks.file_barrier import FileBarrier
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of an attempt, as far as they share work.

    Attributes:
        world: The ranks.
        barrier: Where they meet.
        telemetry: This rank's.
        wants_stop: Whether this rank was asked to stop; once true, it stays true.
    """

    world: World
    barrier: FileBarrier
    telemetry: Telemetry
    wants_stop: Callable[[], bool] = lambda: False

    def arrive(self, place: str, word: dict[str, Any]) -> None:
        """Go to a meeting point; the word also says whether this rank wants to stop."""
        self.barrier.arrive(place, word | {"stop": self.wants_stop()})

    def words(self, place: str) -> list[dict[str, Any]]:
        """Return the messages left at a meeting point, once every rank has arrived.

        Raises:
            StoppedError: A rank wants to stop. All ranks read the same words, so all leave here or
                none does, and no rank enters a collective alone.
        """
        words: list[dict[str, Any]] = self.barrier.words(place)
        if any(word["stop"] for word in words):
            raise StoppedError(place)
        return words
