"""Times that ranks on other machines write, by the clock of whoever watches.

Clocks of machines differ by seconds or hours. What a rank of another machine says about its
heartbeat is only compared with what it said before: when it changes, it has just happened.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.job import Job
    from jobs.run.rundir import RankStatus

_HERE: Final = socket.gethostname()


@dataclass
class Clocks:
    """Remembers when what each rank says has changed.

    Args:
        here: The name of this machine, whose ranks have the same clock.
    """

    here: str = _HERE
    _seen: dict[int, dict[int, tuple[RankStatus, RankStatus]]] = field(default_factory=dict)

    def of(self, job: Job, now: float) -> Sequence[RankStatus]:
        """Return what a job's ranks wrote last.

        Times are by this machine's clock; `now` is in Unix seconds.
        """
        statuses = job.run_dir.rank_statuses()
        return self.translate(job.id, statuses, now) if not job.here else statuses

    def translate(
        self, job: int, statuses: Sequence[RankStatus], now: float
    ) -> Sequence[RankStatus]:
        """Translate the times of ranks that may be on other machines to this machine's clock.

        Args:
            job: Whose ranks they are.
            statuses: What they wrote last.
            now: Unix seconds, of this machine.
        """
        before = self._seen.get(job, {})
        after = {s.rank: (s, self._here(s, before.get(s.rank), now)) for s in statuses}
        self._seen[job] = after
        return [after[status.rank][1] for status in statuses]

    def forget(self, jobs: set[int]) -> None:
        """Drop all but these jobs."""
        self._seen = {job: seen for job, seen in self._seen.items() if job in jobs}

    def _here(
        self, status: RankStatus, before: tuple[RankStatus, RankStatus] | None, now: float
    ) -> RankStatus:
        if status.host == self.here:
            return status
        if before is None or before[0].pid != status.pid:
            return replace(status, heartbeat=now, progressed=now)
        earlier, ours = before
        return replace(
            status,
            heartbeat=now if status.heartbeat != earlier.heartbeat else ours.heartbeat,
            progressed=now if status.progressed != earlier.progressed else ours.progressed,
        )
