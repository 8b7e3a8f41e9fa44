"""Detect that a job makes no progress, and which rank blocks it.

The watching process measures times without progress between its polls, on a monotonic clock. What
the ranks write is only compared with what they wrote before. So neither a step of the machine's
clock nor a time in which nothing was polled looks like a hang.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.run.rundir import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.run.rundir import RankStatus


# Ranks send a heartbeat about once a second from a separate thread, whatever they compute.
_SILENT: Final = 15.0
# Seconds between two polls after which the interval does not count: the machine was suspended, its
# container paused, or the watching process stopped. The ranks may have been stopped too.
_UNWATCHED: Final = 10.0
SAVE_STEP: Final = 60.0
"""Seconds within which a save that makes progress writes something."""


@dataclass(frozen=True)
class Stillness:
    """A rank, and the seconds for which it made no progress and for which it sent no heartbeat."""

    status: RankStatus
    still: float
    silent: float


@dataclass
class Watch:
    """Measure for how long each rank has made no progress while it was watched.

    Args:
        timeout: Seconds without progress that count as a hang. No single interval between two polls
            contributes more than half of them.
    """

    timeout: float = 0.0
    unwatched: float = 0.0  # seconds before the latest poll that do not count
    _looked_at: float | None = None
    _seen: dict[int, Stillness] = field(default_factory=dict)

    def observe(self, statuses: Sequence[RankStatus], now: float) -> list[Stillness]:
        """Compare the ranks' latest statuses with the previous ones.

        Args:
            statuses: The statuses.
            now: Monotonic seconds.
        """
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        longest = min(_UNWATCHED, self.timeout / 2) if self.timeout > 0 else _UNWATCHED
        self.unwatched = elapsed if elapsed > longest else 0.0
        before = {} if self.unwatched else self._seen
        self._looked_at = now
        self._seen = {s.rank: _since(before.get(s.rank), s, elapsed) for s in statuses}
        return [self._seen[status.rank] for status in statuses]

    def restart_interval(self, now: float) -> None:
        """Start the next interval now, because the watching process itself was busy."""
        self._looked_at = now


def _since(before: Stillness | None, status: RankStatus, elapsed: float) -> Stillness:
    if before is None:
        return Stillness(status, 0.0, 0.0)
    moved = _work(status) != _work(before.status)
    beats = moved or status.heartbeat != before.status.heartbeat
    return Stillness(
        status, 0.0 if moved else before.still + elapsed, 0.0 if beats else before.silent + elapsed
    )


def _work(status: RankStatus) -> tuple[object, ...]:
    return status.pid, status.started, status.phase, status.step, status.progressed


def by_clock(statuses: Sequence[RankStatus], now: float) -> list[Stillness]:
    """Estimate times without progress from the ranks' own clocks, without having watched them.

    Good enough for display, but not for ending a job, since a clock step looks the same.

    Args:
        statuses: The latest statuses.
        now: Unix seconds.
    """
    return [Stillness(s, now - s.progressed, now - s.heartbeat) for s in statuses]


@dataclass(frozen=True)
class Hang:
    """A hanging job: for how many seconds, which ranks block it, and the evidence."""

    seconds: float
    late: tuple[int, ...]
    reason: str


def find_hang(ranks: Sequence[Stillness], timeout: float) -> Hang | None:
    """Return the hang if no rank has made progress for `timeout` seconds, else None. Pure.

    While ranks wait for another one in a collective, none makes progress. The late one is the rank
    without heartbeats (it is suspended, or its interpreter is stuck), or else the rank behind the
    others, or else unknown.

    Args:
        ranks: All ranks.
        timeout: Seconds without progress that count as a hang; 0 disables the check.
    """
    if not ranks or timeout <= 0:
        return None
    still = min(rank.still for rank in ranks)
    if still < timeout:
        return None
    statuses = [rank.status for rank in ranks]
    silent = [rank.status for rank in ranks if rank.silent > min(_SILENT, timeout)]
    if silent:
        return Hang(still, _ranks(silent), _words(silent, "sent no heartbeat", still))
    furthest = max(status.step for status in statuses)
    behind = [s for s in statuses if s.step < furthest]
    if not behind:
        ((usual, count),) = Counter(status.phase for status in statuses).most_common(1)
        behind = [s for s in statuses if s.phase != usual and 2 * count > len(statuses)]
    if not behind:
        first, *others = sorted(ranks, key=lambda rank: rank.still, reverse=True)
        if others and first.still - others[0].still > timeout / 2:
            behind = [first.status]
    if behind:
        return Hang(still, _ranks(behind), _words(behind, "made no progress", still))
    return Hang(still, (), f"no rank made progress for {still:.0f} s {_where(statuses[0])}")


def _ranks(statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(status.rank for status in statuses)


def _words(late: Sequence[RankStatus], what: str, seconds: float) -> str:
    names = ", ".join(str(status.rank) for status in late)
    plural = "s" if len(late) > 1 else ""
    return f"rank{plural} {names} {what} for {seconds:.0f} s {_where(late[0])}"


def _where(status: RankStatus) -> str:
    return f"at step {status.step} while {PHASES.get(status.phase, status.phase)}"


def is_saving(ranks: Sequence[Stillness]) -> bool:
    """Return whether a checkpoint or an export is being written and makes progress."""
    return any(r.status.phase in ("copy", "save", "export") and r.still < SAVE_STEP for r in ranks)
