"""Split a GPU's used memory: selected job, our other jobs, other processes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobs.machine.devices import foreign_users
from tui.text.format import Row, Span, bar, load_role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.machine.devices import Gpu
    from tui.dashboard.rank_lines import Seat

SELECTED: Final = "━"
OURS: Final = "╍"
OTHERS: Final = "▒"
_FREE: Final = "┄"
LEGEND: Final = f"{SELECTED} this job  {OURS} our other jobs  {OTHERS} other processes"


class Split(NamedTuple):
    """Used bytes of a GPU, by owner."""

    selected: int
    ours: int
    others: int


def split_of(gpu: Gpu, seats: Sequence[Seat], selected: int | None, claimed: bool) -> Split:
    """Split the used memory by owner.

    The driver's word on a process counts where its pid is a rank's; where pids cannot be matched
    (in a container they may be the host's), what torch reserved does. What nobody can be named
    for belongs to whoever else is known to be there, else to our job.

    Args:
        gpu: The GPU.
        seats: Our ranks on it.
        selected: The job on the screen.
        claimed: Whether one of our jobs holds the GPU, with or without ranks on it yet.
    """
    used = gpu.memory_used or 0
    held = {process.pid: process.memory or 0 for process in gpu.processes}
    mine, ours = 0, 0
    for seat in seats:
        bytes_held = max(held.get(seat.rank.pid, 0), seat.rank.reserved or 0)
        if seat.view.job.id == selected:
            mine += bytes_held
        else:
            ours += bytes_held
    mine, ours = min(mine, used), min(ours, max(0, used - mine))
    rest = used - mine - ours
    strangers = foreign_users([gpu], {seat.rank.pid for seat in seats}).get(gpu.uuid)
    if not seats and not claimed:
        return Split(0, 0, used)
    visible = sum(
        process.memory or 0
        for process in gpu.processes
        if process.command is not None and process.pid not in {seat.rank.pid for seat in seats}
    )
    others = min(rest, visible) if strangers else 0
    rest -= others  # CUDA's own share beside what torch reserved
    if mine or not ours:
        return Split(mine + rest, ours, others)
    return Split(mine, ours + rest, others)


def split_bar(gpu: Gpu, split: Split, width: int) -> Row:
    """Draw a bar of `width` cells; parts differ in shape, not only in color."""
    if gpu.memory_used is None or not gpu.memory_total:
        return bar(None, width)
    share = gpu.memory_used / gpu.memory_total
    if not (split.ours or split.others):
        return bar(share, width, load_role(share))
    spans, end, reached = [], 0, 0
    for amount, glyph, role in (
        (split.selected, SELECTED, load_role(share)),
        (split.ours, OURS, "accent"),
        (split.others, OTHERS, "warn"),
    ):
        reached += amount
        cells = min(width, round(reached / gpu.memory_total * width)) - end
        if amount and not cells and end < width and amount > gpu.memory_total // 50:
            cells = 1  # small, but there
        if cells > 0:
            spans.append(Span(glyph * cells, role))
            end += cells
    if end < width:
        spans.append(Span(_FREE * (width - end), "faint"))
    return tuple(spans)
