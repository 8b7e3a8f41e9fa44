"""Notice that a job stands still, and which rank holds it up.

How long ranks stand still is measured by whoever watches them, between two looks, by a clock that
nobody sets. What the ranks write is only compared with what they wrote before: a step of the
machine's clock is no stillness, and neither is a pause in which nobody could look.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.run.rundir import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.run.rundir import RankStatus


# A heartbeat comes about once a second from a thread of its own, whatever the rank computes.
_SILENT: Final = 15.0
# Seconds between two looks after which nobody was watching: the machine was suspended, its
# container paused, or the watcher stopped. The ranks may have been stopped along with it.
_UNWATCHED: Final = 10.0
SAVE_STEP: Final = 60.0
"""Seconds within which a save that makes progress writes something."""


@dataclass(frozen=True)
class Stillness:
    """A rank, and how many seconds it has made no progress and given no sign of life."""

    status: RankStatus
    still: float
    silent: float


@dataclass
class Watch:
    """How long each rank has stood still while someone watched it.

    Args:
        timeout: Seconds of stillness that will count as a hang. No single interval between two
            looks makes up more than half of them.
    """

    timeout: float = 0.0
    unwatched: float = 0.0  # seconds before the latest look in which nobody watched
    _looked_at: float | None = None
    _seen: dict[int, Stillness] = field(default_factory=dict)

    def look(self, statuses: Sequence[RankStatus], now: float) -> list[Stillness]:
        """Take note of what the ranks wrote last.

        Args:
            statuses: What they wrote.
            now: Seconds of a monotonic clock.
        """
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        longest = min(_UNWATCHED, self.timeout / 2) if self.timeout > 0 else _UNWATCHED
        self.unwatched = elapsed if elapsed > longest else 0.0
        before = {} if self.unwatched else self._seen
        self._looked_at = now
        self._seen = {s.rank: _since(before.get(s.rank), s, elapsed) for s in statuses}
        return [self._seen[status.rank] for status in statuses]

    def look_again(self, now: float) -> None:
        """Start the next interval now, because the watcher itself was busy until now."""
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
    """How long ranks have stood still as far as they say, for who has not watched them.

    Good enough to tell a person; not to end a job, since a step of the clock looks the same.

    Args:
        statuses: What the ranks wrote last.
        now: Unix seconds.
    """
    return [Stillness(s, now - s.progressed, now - s.heartbeat) for s in statuses]


@dataclass(frozen=True)
class Hang:
    """A job that stands still: since when (seconds), which ranks hold it up, and how we know."""

    seconds: float
    late: tuple[int, ...]
    reason: str


def find_hang(ranks: Sequence[Stillness], timeout: float) -> Hang | None:
    """Whether no rank has moved on for `timeout` seconds. Pure.

    While ranks wait for one of them in a collective, none of them moves on. The late one is the
    rank that does not even send heartbeats (it is suspended, or its interpreter is stuck), else
    the rank that is behind the others, else unknown.

    Args:
        ranks: All of them.
        timeout: Seconds of stillness that count as a hang; 0 turns the check off.
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


def saves_on(ranks: Sequence[Stillness]) -> bool:
    """Whether a checkpoint or an export is being written and makes progress."""
    return any(r.status.phase in ("copy", "save", "export") and r.still < SAVE_STEP for r in ranks)
