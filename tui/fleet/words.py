"""Descriptions of a fleet's boxes. Pure."""

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
    """Return `12 s`, `3 min`, `2 h`: the older, the less often it changes."""
    if seconds < 60:
        return spent(seconds)
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3600:.0f} h" if seconds < 172800 else f"{seconds // 86400:.0f} d"


def status_text(view: BoxView, now: float) -> str:
    """Return `here`, or the age of the data: `away, seen 12 s ago`.

    Args:
        view: The box.
        now: Our monotonic clock.
    """
    status: Status = view.status_at(now)
    if status == "here":
        return status
    if view.heard is None:
        return status if status == "connecting" else f"{status}, never seen"
    return f"{status}, seen {age(now - view.heard)} ago"


def brief_status(view: BoxView, now: float) -> str:
    """Return a short status: `away 3 min`."""
    seen = "" if view.heard is None else f" {age(now - view.heard)}"
    return f"{view.status_at(now)}{seen}"


def gpus_text(view: BoxView) -> str:
    """Return `3 of 8 free`, or the box's devices if it has no GPUs."""
    if view.snapshot is None:
        return ""
    gpus = view.snapshot.gpus
    if not gpus:
        return f"CPU, {view.snapshot.head.cores} cores"
    return f"{sum(map(is_free, gpus))} of {len(gpus)} free"


def is_free(gpu: BoxGpu) -> bool:
    """Return whether a job could use the GPU."""
    return gpu.job is None and not gpu.others and not gpu.problem


def counts_text(view: BoxView) -> str:
    """Return `2 running, 1 queued, 1 failed`."""
    if view.snapshot is None:
        return ""
    running, queued, failed = counts(view.snapshot.jobs)
    parts = [f"{running} running"] if running else []
    parts += [f"{queued} queued"] if queued else []
    parts += [f"{failed} failed"] if failed else []
    return ", ".join(parts) + (" (queue paused)" if view.snapshot.paused else "") or "idle"


def counts(jobs: Iterable[BoxJob]) -> tuple[int, int, int]:
    """Count active, queued and failed jobs."""
    states = Counter(job.state for job in jobs)
    return (
        sum(count for state, count in states.items() if state in _ACTIVE),
        states[str(State.QUEUED)],
        sum(count for state, count in states.items() if state in _BAD),
    )


def order_of(jobs: Iterable[BoxJob]) -> Sequence[BoxJob]:
    """Sort jobs: active, then queued, then ended ones, the newest first."""

    def key(job: BoxJob) -> tuple[int, int]:
        if job.state in _ENDED:
            return 2, -job.id
        return int(job.state not in _ACTIVE), job.id

    return sorted(jobs, key=key)


def eta_of(job: BoxJob) -> str:
    """Return when a job ends or, if it is queued, when it starts."""
    if job.starts_in is not None:
        return f"starts in {eta(job.starts_in, job.eta_at_least)}"
    return eta(job.eta, job.eta_at_least)
