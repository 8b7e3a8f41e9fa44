"""What Slurm's list does not say: where waiting jobs stand in the queue, and jobs that it lacks.

A list may lack a job for many reasons (another cluster's controller, a filter, a broken answer), so
a job that is missing is asked for by its number, and only "Invalid job id" means that it is gone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.backends.slurm import commands
from jobs.errors import UserError
from jobs.supervise.port import AwayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jobs.backends.slurm.commands import Listed, Waiting
    from jobs.backends.slurm.records import HandedIn

EVERY: Final = 60.0  # seconds between queries: the answer is as long as the cluster's queue
_SOON: Final = 15.0  # the same, while the place of one of ours is unknown
# Jobs that wait for something other than a free node; they do not delay others.
_ASIDE: Final = ("JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime")


@dataclass
class Places:
    """Remembers the places of our jobs between two questions; asks nothing while none waits."""

    _asked_at: float = float("-inf")
    _by_id: dict[str, str] = field(default_factory=dict)

    def beside(self, listed: Mapping[str, Listed], now: float) -> dict[str, Listed]:
        """Add their places to the listed jobs.

        Args:
            listed: Our jobs, by id.
            now: Seconds, of a clock that never goes back.
        """
        waiting = {job.id for job in listed.values() if job.state == "PENDING"}
        all_placed = waiting <= self._by_id.keys()
        if waiting and now - self._asked_at >= (EVERY if all_placed else _SOON):
            self._asked_at = now
            with suppress(AwayError, UserError):  # keep the last answer
                answer = places(commands.waiting())
                self._by_id = {slurm_id: answer.get(slurm_id, "") for slurm_id in waiting}
        return {
            job.id: replace(job, place=self._by_id.get(job.id, "")) if job.id in waiting else job
            for job in listed.values()
        }


def places(waiting: Iterable[Waiting]) -> dict[str, str]:
    """Return job id → such as `3 of 41 in gpu`, by priority, in the first of its partitions."""
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


ASK_AFTER: Final = 10.0  # seconds for which a job is missing before it is asked for
_ASK_EVERY: Final = 15.0  # seconds between two questions about one job
_AT_ONCE: Final = 20  # questions in a minute; of 1,000 jobs, not all are asked for
_WINDOW: Final = 60.0  # seconds


@dataclass
class _Absence:
    since: float
    asked_at: float = float("-inf")
    gone: bool = False


@dataclass
class Missing:
    """What is known of each job that is missing, by its name in Slurm. Seconds, monotonic.

    Not by its number: a controller that has lost its newest jobs gives their numbers again.
    """

    _absent: dict[str, _Absence] = field(default_factory=dict)
    _asked: list[float] = field(default_factory=list)

    def look(
        self, record: HandedIn, listed: Listed | None, now: float, *, other: bool
    ) -> tuple[float, bool]:
        """Take note whether Slurm's list has a job, and ask for it by its number when it is time.

        Args:
            record: Which Slurm job it is.
            listed: The job in the list.
            now: The time.
            other: Whether the number is someone else's by now.

        Returns:
            For how long it has been missing, and whether Slurm says that it does not know it.
        """
        if listed is not None:
            self._absent.pop(record.name, None)
            return 0.0, False
        absence = self._absent.setdefault(record.name, _Absence(now))
        missing = now - absence.since
        if other:
            return missing, True
        self._asked = [t for t in self._asked if now - t < _WINDOW]
        due = missing >= ASK_AFTER and now - absence.asked_at >= _ASK_EVERY
        if due and len(self._asked) < _AT_ONCE:
            absence.asked_at = now
            self._asked.append(now)
            with suppress(AwayError):
                absence.gone = commands.state_of(record.id) == ""
        return missing, absence.gone
