"""Two GPUs on a line, for screens with fewer lines than GPUs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tui.dashboard.gpu_tags import heat_role, tag_of
from tui.look.snapshot import is_late
from tui.text.format import MISSING, Row, Span, cut, percent, right

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu
    from tui.dashboard.rank_lines import Seat
    from tui.look.snapshot import JobView, Snapshot

PAIRS_FROM: Final = 60  # cells of a line
_BETWEEN: Final = " │ "
_FIXED: Final = 21  # cells before who sits there


def pair_head(width: int) -> Row:
    """Return the headings of both columns of GPUs."""
    half = _half(width)
    words = cut(" #  use temp     GiB used by", half).ljust(half)
    return Span(words, "title"), Span(_BETWEEN, "faint"), Span(words, "title")


def pair_rows(
    snapshot: Snapshot,
    seats: Mapping[str, Sequence[Seat]],
    active: Sequence[JobView],
    width: int,
) -> list[Row]:
    """Return rows with the first half of the GPUs on the left, the others on the right.

    Args:
        snapshot: What to show.
        seats: Our ranks on each GPU, by its UUID.
        active: The jobs that run.
        width: Cells of a line.
    """
    half = _half(width)
    cells = [_cell(gpu, seats[gpu.uuid], active, snapshot.t, half) for gpu in snapshot.gpus]
    lines = -(-len(cells) // 2)
    rows: list[Row] = []
    for line in range(lines):
        beside = cells[line + lines] if line + lines < len(cells) else ()
        rows.append((*cells[line], Span(_BETWEEN, "faint"), *beside))
    return rows


def _half(width: int) -> int:
    return (width - len(_BETWEEN)) // 2


def _cell(
    gpu: Gpu, seats: Sequence[Seat], active: Sequence[JobView], now: float, width: int
) -> Row:
    """` 0  97%  60°  34/140 #2 cats-and-s… r0`."""
    calm = "" if (gpu.utilisation or 0) >= 5 else "dim"
    heat = MISSING if gpu.temperature is None else f"{gpu.temperature}°"
    room = width - _FIXED
    late = next((s for s in seats if is_late(s.rank, now)), None)
    tag = tag_of(gpu, seats, active, room)
    if late is not None:
        tag = Span(f"! #{late.view.job.id} r{late.rank.rank} late", "bad")
    return (
        Span(f"{gpu.index:>2} {right(percent(gpu.utilisation), 4)}", calm),
        Span(f" {right(heat, 4)}", heat_role(gpu.temperature) or calm),
        Span(f" {right(f'{_whole(gpu.memory_used)}/{_whole(gpu.memory_total)}', 7)} "),
        Span(cut(tag.text, room).ljust(room), tag.role),
    )


def _whole(count: int | None) -> str:
    return MISSING if count is None else f"{count / 2**30:.0f}"
