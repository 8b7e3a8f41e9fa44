"""Who sits on a GPU, in few words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.machine.devices import foreign_users
from tui.text.format import Span, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.machine.devices import Gpu
    from tui.dashboard.rank_lines import Seat
    from tui.look.snapshot import JobView

_ROOMY: Final = 26  # cells with room for the memory of another user's process too


def tag_of(gpu: Gpu, seats: Sequence[Seat], jobs: Sequence[JobView], room: int = 40) -> Span:
    """Who sits on a GPU, in `room` cells; a name is cut before a rank."""
    if seats:
        fixed = sum(len(f"#{s.view.job.id}  r{s.rank.rank} ") for s in seats) - 1
        each = max(1, (room - fixed) // len(seats))
        words = (f"#{s.view.job.id} {cut(s.view.job.name, each)} r{s.rank.rank}" for s in seats)
        return Span(" ".join(words), "accent")
    for view in jobs:
        if view.job.state.active and gpu.uuid in view.job.gpus:
            return Span(f"#{view.job.id} {view.job.name} …", "accent")
    if gpu.unusable:
        return Span(gpu.unusable, "bad")
    if stranger := foreign_users([gpu], (), brief=room < _ROOMY).get(gpu.uuid):
        return Span(stranger, "warn")
    return Span("free", "dim")


def heat_role(celsius: int | None) -> str:
    """Return the color role of a temperature; "" if it is normal."""
    if celsius is None or celsius < 80:
        return ""
    return "warn" if celsius < 88 else "bad"
