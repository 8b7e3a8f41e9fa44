"""Jobs by the GPUs they use or wait for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jobs.backends import backend
from jobs.queue.states import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu
    from tui.look.snapshot import JobView

_ENDED = "ended"


class Group(NamedTuple):
    """Jobs that share GPUs: running ones first, then waiting ones in queue order."""

    title: str
    views: tuple[JobView, ...]


def job_groups(views: Sequence[JobView], gpus: Sequence[Gpu]) -> list[Group]:
    """Group jobs in the order of their GPUs, then jobs that take any GPUs, then ended jobs.

    Args:
        views: Jobs as `tui.look.snapshot.in_order` puts them.
        gpus: The machine's GPUs, for their indices.
    """
    index = {gpu.uuid: gpu.index for gpu in gpus}
    views_of: dict[str, list[JobView]] = {}
    places: dict[str, int] = {}  # title → first GPU
    owners: dict[str, str] = {}  # GPU → title of the group that runs on it
    for view in views:
        job = view.job
        names = job.gpus or (job.wanted if isinstance(job.wanted, list) else [])
        if job.state.ended:
            title, place = _ENDED, 1 << 30
        elif not job.here:
            title, place = backend(job.backend).title, 1 << 21
        elif job.wanted is None and not names:
            title, place = "CPU", -1
        elif not names:
            title, place = "any GPUs", 1 << 20
        else:
            shared = next((owners[name] for name in names if name in owners), None)
            title = shared if shared and job.state is State.QUEUED else f"GPU {view.where}"
            place = min(index.get(name, 1 << 10) for name in names)
            for name in names:
                owners.setdefault(name, title)
        views_of.setdefault(title, []).append(view)
        places.setdefault(title, place)
    order = sorted(views_of, key=lambda title: places[title])
    return [Group(title, tuple(views_of[title])) for title in order]


def queue_places(views: Sequence[JobView]) -> Mapping[int, str]:
    """Job → `1st`, `2nd`, … for what waits here and is not held, as it is served."""
    waiting = [
        view.job.id
        for view in views
        if view.job.state is State.QUEUED and not view.job.held and view.job.here
    ]
    return {job: ordinal(place) for place, job in enumerate(waiting, 1)}


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
