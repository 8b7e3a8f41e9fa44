"""Where waiting jobs stand in the queue of their partition, among everybody's jobs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.slurm import commands

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs.slurm.commands import Listed, Waiting

EVERY: Final = 60.0  # seconds between two questions: the answer is as long as the cluster's queue
_SOON: Final = 15.0  # the same, while the place of one of ours is unknown
# These wait for something else than a free node, and hold nobody up.
_ASIDE: Final = ("JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime")


@dataclass
class Places:
    """Remembers the places of our jobs between two questions; asks nothing while none waits."""

    _asked_at: float = float("-inf")
    _said: dict[str, str] = field(default_factory=dict)

    def beside(self, listed: Mapping[str, Listed], now: float) -> dict[str, Listed]:
        """The same jobs with their places.

        Args:
            listed: Our jobs, by id.
            now: Seconds, of a clock that never goes back.
        """
        waiting = {one.id for one in listed.values() if one.state == "PENDING"}
        known = waiting <= self._said.keys()
        if waiting and now - self._asked_at >= (EVERY if known else _SOON):
            self._asked_at = now
            with suppress(commands.AwayError, UserError):  # what was said stays
                found = places(commands.waiting())
                self._said = {one: found.get(one, "") for one in waiting}
        return {
            one.id: replace(one, place=self._said.get(one.id, "")) if one.id in waiting else one
            for one in listed.values()
        }


def places(waiting: Iterable[Waiting]) -> dict[str, str]:
    """Job id → such as `3 of 41 in gpu`, by priority; of several partitions in the first."""
    queues: dict[str, list[Waiting]] = {}
    for one in waiting:
        if not one.reason.startswith(_ASIDE):
            for name in one.partitions:
                queues.setdefault(name, []).append(one)
    found = {}
    for name, queue in queues.items():
        # Slurm takes the one that was handed in first where priorities are the same.
        queue.sort(key=lambda one: (-one.priority, len(one.id), one.id))
        for place, one in enumerate(queue, start=1):
            if one.partitions[0] == name:
                found[one.id] = f"{place} of {len(queue)} in {name}"
    return found
