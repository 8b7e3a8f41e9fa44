"""Jobs that Slurm's list does not have: whether Slurm itself says that it does not know them.

A list may lack a job for many reasons (another cluster's controller, a filter, a broken answer), so
a job that is missing is asked for by its number, and only "Invalid job id" means that it is gone.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.slurm import commands
from jobs.slurm.commands import AwayError

if TYPE_CHECKING:
    from jobs.slurm.commands import Listed

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
    """What is known of each job that is missing, by our id. Seconds of a monotonic clock."""

    _absent: dict[int, _Absence] = field(default_factory=dict)
    _asked: list[float] = field(default_factory=list)

    def look(
        self, job_id: int, slurm_id: str, listed: Listed | None, now: float, *, other: bool
    ) -> tuple[float, bool]:
        """Take note whether Slurm's list has a job, and ask for it by its number when it is time.

        Args:
            job_id: Ours.
            slurm_id: Slurm's.
            listed: The job in the list.
            now: The time.
            other: Whether the number is someone else's by now.

        Returns:
            For how long it has been missing, and whether Slurm says that it does not know it.
        """
        if listed is not None:
            self._absent.pop(job_id, None)
            return 0.0, False
        absence = self._absent.setdefault(job_id, _Absence(now))
        missing = now - absence.since
        if other:
            return missing, True
        self._asked = [t for t in self._asked if now - t < _WINDOW]
        due = missing >= ASK_AFTER and now - absence.asked_at >= _ASK_EVERY
        if due and len(self._asked) < _AT_ONCE:
            absence.asked_at = now
            self._asked.append(now)
            with suppress(AwayError):
                absence.gone = commands.state_of(slurm_id) == ""
        return missing, absence.gone
