"""Where waiting jobs stand in the queue of their partition, among everyone's jobs."""

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
    _by_id: dict[str, str] = field(default_factory=dict)

    def beside(self, listed: Mapping[str, Listed], now: float) -> dict[str, Listed]:
        """The same jobs with their places.

        Args:
            listed: Our jobs, by id.
            now: Seconds, of a clock that never goes back.
        """
        waiting = {job.id for job in listed.values() if job.state == "PENDING"}
        all_placed = waiting <= self._by_id.keys()
        if waiting and now - self._asked_at >= (EVERY if all_placed else _SOON):
            self._asked_at = now
            with suppress(commands.AwayError, UserError):  # keep the last answer
                answer = places(commands.waiting())
                self._by_id = {slurm_id: answer.get(slurm_id, "") for slurm_id in waiting}
        return {
            job.id: replace(job, place=self._by_id.get(job.id, "")) if job.id in waiting else job
            for job in listed.values()
        }


def places(waiting: Iterable[Waiting]) -> dict[str, str]:
    """Job id → such as `3 of 41 in gpu`, by priority; of several partitions in the first."""
    queues: dict[str, list[Waiting]] = {}
    for job in waiting:
        if not job.reason.startswith(_ASIDE):
            for name in job.partitions:
                queues.setdefault(name, []).append(job)
    texts = {}
    for name, queue in queues.items():
        # Slurm takes the one that was handed in first where priorities are the same.
        queue.sort(key=lambda job: (-job.priority, len(job.id), job.id))
        for place, job in enumerate(queue, start=1):
            if job.partitions[0] == name:
                texts[job.id] = f"{place} of {len(queue)} in {name}"
    return texts
