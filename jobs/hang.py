"""Notice that a job stands still, and which rank holds it up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.rundir import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.rundir import RankStatus

# A heartbeat comes about once a second from a thread of its own, whatever the rank computes.
_SILENT: Final = 15.0


@dataclass(frozen=True)
class Hang:
    """A job that stands still: since when (seconds), which ranks hold it up, and how we know."""

    seconds: float
    late: tuple[int, ...]
    reason: str


def find_hang(statuses: Sequence[RankStatus], now: float, timeout: float) -> Hang | None:
    """Whether no rank has moved on for `timeout` seconds.

    While ranks wait for one of them in a collective, none of them moves on. The late one is the
    rank that does not even send heartbeats (it is suspended, or its interpreter is stuck), else
    the rank that is behind the others, else unknown.

    Args:
        statuses: What the ranks last wrote.
        now: Unix seconds.
        timeout: Seconds of stillness that count as a hang; 0 turns the check off.
    """
    if not statuses or timeout <= 0:
        return None
    still = now - max(status.progressed for status in statuses)
    if still < timeout:
        return None
    silent = [s for s in statuses if now - s.heartbeat > min(_SILENT, timeout)]
    if silent:
        return Hang(still, _ranks(silent), _words(silent, "gave no sign of life", still))
    furthest = max(status.step for status in statuses)
    behind = [s for s in statuses if s.step < furthest]
    if not behind:
        phases = {status.phase for status in statuses}
        usual = max(phases, key=lambda phase: sum(s.phase == phase for s in statuses))
        behind = [s for s in statuses if s.phase != usual]
    if not behind:
        first = min(statuses, key=lambda status: status.progressed)
        others = [s for s in statuses if s is not first]
        if others and min(s.progressed for s in others) - first.progressed > timeout / 2:
            behind = [first]
    if behind:
        return Hang(still, _ranks(behind), _words(behind, "stood still", still))
    return Hang(still, (), f"all ranks stood still for {still:.0f} s {_where(statuses[0])}")


def _ranks(statuses: Sequence[RankStatus]) -> tuple[int, ...]:
    return tuple(status.rank for status in statuses)


def _words(late: Sequence[RankStatus], what: str, seconds: float) -> str:
    names = ", ".join(str(status.rank) for status in late)
    plural = "s" if len(late) > 1 else ""
    return f"rank{plural} {names} {what} for {seconds:.0f} s {_where(late[0])}"


def _where(status: RankStatus) -> str:
    return f"at step {status.step} while {PHASES.get(status.phase, status.phase)}"
