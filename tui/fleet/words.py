"""What a fleet says of its boxes in words. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from jobs.queue.states import ACTIVE, ENDED, State
from tui.text.format import eta, spent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jobs.fleet.lines import BoxGpu, BoxJob
    from jobs.fleet.watch import BoxView, Status

_ACTIVE: Final = frozenset(map(str, ACTIVE))
_ENDED: Final = frozenset(map(str, ENDED))
_BAD: Final = frozenset({str(State.FAILED), str(State.LOST)})


def age(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h`: it changes less often the older it is."""
    if seconds < 60:
        return spent(seconds)
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h" if seconds < 172800 else f"{seconds // 86400:.0f} d"


def status_text(view: BoxView, now: float) -> str:
    """Return `here`, or the age of what is shown: `away, seen 12 s ago`.

    Args:
        view: The box.
        now: By our monotonic clock.
    """
    status: Status = view.status_at(now)
    if status == "here":
        return status
    if view.heard is None:
        return status if status == "connecting" else f"{status}, never seen"
    return f"{status}, seen {age(now - view.heard)} ago"


def brief_status(view: BoxView, now: float) -> str:
    """`away 3 min`, where there is no room for more."""
    seen = "" if view.heard is None else f" {age(now - view.heard)}"
    return f"{view.status_at(now)}{seen}"


def gpus_text(view: BoxView) -> str:
    """`3 of 8 free`, or what the box has instead."""
    if view.snapshot is None:
        return ""
    gpus = view.snapshot.gpus
    if not gpus:
        return f"CPU, {view.snapshot.head.cores} cores"
    return f"{sum(map(is_free, gpus))} of {len(gpus)} free"


def is_free(gpu: BoxGpu) -> bool:
    """Whether a job could have it."""
    return gpu.job is None and not gpu.others and not gpu.problem


def counts_text(view: BoxView) -> str:
    """`2 running, 1 queued, 1 failed`."""
    if view.snapshot is None:
        return ""
    running, queued, failed = counts(view.snapshot.jobs)
    parts = [f"{running} running"] if running else []
    parts += [f"{queued} queued"] if queued else []
    parts += [f"{failed} failed"] if failed else []
    return ", ".join(parts) + (" (queue paused)" if view.snapshot.paused else "") or "idle"


def counts(jobs: Iterable[BoxJob]) -> tuple[int, int, int]:
    """Active, queued and failed ones."""
    states = Counter(job.state for job in jobs)
    return (
        sum(count for state, count in states.items() if state in _ACTIVE),
        states[str(State.QUEUED)],
        sum(count for state, count in states.items() if state in _BAD),
    )


def order_of(jobs: Iterable[BoxJob]) -> Sequence[BoxJob]:
    """Active jobs first, then those that wait, then ended ones, the newest first."""

    def key(job: BoxJob) -> tuple[int, int]:
        if job.state in _ENDED:
            return 2, -job.id
        return int(job.state not in _ACTIVE), job.id

    return sorted(jobs, key=key)


def eta_of(job: BoxJob) -> str:
    """Say when a job is done or, if it waits, when it starts."""
    if job.starts_in is not None:
        return f"starts in {eta(job.starts_in, job.eta_at_least)}"
    return eta(job.eta, job.eta_at_least)
