"""The rows of the GPU screen. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tui.dashboard.device_rows import (
    columns,
    gpu_head,
    gpu_row,
    hint_of,
    history_of,
    seats_by_gpu,
)
from tui.dashboard.gpu_tags import tag_of
from tui.dashboard.memory_split import split_of
from tui.dashboard.process_rows import process_rows
from tui.text.format import Row, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tui.look.snapshot import Snapshot

_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
_MOST_LINES: Final = 6  # of a graph
_USE, _MEMORY = "    use ", "mem "
_BETWEEN: Final = "  "


def gpus_rows(snapshot: Snapshot, width: int, height: int, selected: int | None) -> list[Row]:
    """Headings, each GPU with graphs as high as there is room for, then the processes.

    Args:
        snapshot: What to show.
        width: Cells of a line.
        height: Lines that can be seen.
        selected: The selected job, whose memory has its own color.
    """
    if not snapshot.gpus:
        return [(Span("no GPUs on this machine", "dim"),)]
    seats = seats_by_gpu(snapshot)
    active = [view for view in snapshot.jobs if view.job.state.active]
    shape = columns(width, named=len({gpu.name for gpu in snapshot.gpus}) > 1, graphs=False)
    processes = process_rows(snapshot, seats, width)
    spare = height - 1 - len(snapshot.gpus) - (len(processes) + 1 if processes else 0)
    lines = max(0, min(_MOST_LINES, spare // len(snapshot.gpus)))
    rows: list[Row] = [gpu_head(shape)]
    for gpu in snapshot.gpus:
        hint = hint_of(gpu, shape)
        tag = tag_of(gpu, seats[gpu.uuid], active, shape.tag - 1 - len(hint))
        split = split_of(gpu, seats[gpu.uuid], selected, tag.role == "accent")
        history = history_of(snapshot, gpu)
        rows.append(gpu_row(gpu, hint, tag, split, history, shape))
        rows += _graphs(history.busy, history.filled, width, lines)
    return [*rows, (), *processes] if processes else rows


def _graphs(
    busy: Sequence[int | None], filled: Sequence[int | None], width: int, lines: int
) -> list[Row]:
    """Draw a GPU's utilization on the left, and its memory in use on the right."""
    left, right, cells = _USE, _MEMORY, graph_cells(width)
    rows: list[Row] = []
    both = zip(graph(busy, cells, lines), graph(filled, cells, lines), strict=True)
    for number, (use, other) in enumerate(both):
        rows.append(
            (
                Span(left if not number else " " * len(left), "dim"),
                Span(use, "bar"),
                Span(_BETWEEN + (right if not number else " " * len(right)), "dim"),
                Span(other, "raw"),
            )
        )
    return rows


def graph_cells(width: int) -> int:
    """Columns of one graph on a line of `width` cells."""
    return max(1, (width - len(_USE) - len(_BETWEEN) - len(_MEMORY)) // 2)


def graph(shares: Sequence[int | None], width: int, lines: int) -> list[str]:
    """Return the newest percentages as columns, `lines` high; the newest on the right."""
    newest = shares[max(0, len(shares) - width) :]
    steps = [0 if share is None else round(share * lines * 8 / 100) for share in newest]
    steps = [max(1, step) if share else step for step, share in zip(steps, newest, strict=True)]
    rows = []
    for line in range(lines - 1, -1, -1):
        marks = (_HEIGHTS[min(8, max(0, step - 8 * line))] for step in steps)
        rows.append("".join(marks).rjust(width))
    return rows
