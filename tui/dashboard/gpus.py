"""The GPU screen: how busy and how full each GPU is and was, and every process on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual.screen import Screen
from textual.widgets import Static

from tui.dashboard.device_rows import (
    columns,
    devices_title,
    gpu_head,
    gpu_row,
    hint_of,
    history_of,
    seats_by_gpu,
    tag_of,
)
from tui.dashboard.rank_lines import process_rows, split_of
from tui.keys.key_table import Key, bindings_of, line_of, scrolling
from tui.look.collector import EVERY
from tui.text.format import Row, Span
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.events import Resize

    from tui.app.app import FsdpTui
    from tui.look.snapshot import Snapshot


# -- rows -----------------------------------------------------------------------------------
# The rows of the GPU screen. Pure.


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


# -- screen ---------------------------------------------------------------------------------
# The GPU screen: how busy and how full each GPU is and was, and every process on it.


_MARGIN: Final = 2  # columns beside the keys


class GpusPanel(Lines, can_focus=True):
    """The rows; the headings do not scroll."""


class GpusScreen(Screen[None]):
    """Shows each snapshot of the dashboard, while it is open."""

    CSS_PATH = "gpus.tcss"
    AUTO_FOCUS = "#gpus"
    KEYS: ClassVar = (
        *scrolling(),
        Key("switch_theme", "t", "t", "theme", "Switch between dark and light theme", line=False),
        Key("show_help", "question_mark,f1", "?", "help", "Keys of this screen"),
        Key("dismiss", "escape,q,u", "esc", "close", "Back to the dashboard"),
    )
    BINDINGS: ClassVar = bindings_of("gpus_screen", KEYS)

    app: FsdpTui

    def __init__(self, snapshot: Snapshot, selected: int | None) -> None:
        """
        Args:
            snapshot: The newest one.
            selected: The selected job, whose memory has its own color.
        """
        super().__init__()
        self.panel = GpusPanel(fixed=1, id="gpus")
        self._snapshot = snapshot
        self._selected = selected
        self._title = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="gpus-title", markup=False)
        yield self.panel
        keys = Static("", id="gpus-keys")
        keys.auto_links = False  # they would all get one colour
        yield keys

    def on_mount(self) -> None:
        self.app.snapshots.subscribe(self, self.update_from)
        self.call_after_refresh(self.update_from, self._snapshot)

    def on_resize(self, event: Resize) -> None:
        self.query_one("#gpus-keys", Static).update(line_of(self.KEYS, self.size.width - _MARGIN))
        self.call_after_refresh(self.update_from, self._snapshot)

    def update_from(self, snapshot: Snapshot) -> None:
        """Show another snapshot."""
        self._snapshot = snapshot
        width, height = self.panel.scrollable_content_region.size
        if not width or not self.is_current:
            return
        title = devices_title(snapshot, "GPUs")
        if snapshot.gpus:
            title += f" · graphs: last {graph_cells(width) * EVERY / 60:.0f} min"
        if title != self._title:
            self._title = title
            self.query_one("#gpus-title", Static).update(title)
        self.panel.show(gpus_rows(snapshot, width, height, self._selected))

    def action_scroll_by(self, lines: int) -> None:
        self.panel.scroll_relative(y=lines, animate=False)

    def action_press(self, key: str) -> None:
        """Press the key of a clicked entry in the key line."""
        self.app.simulate_key(key)

    def action_switch_theme(self) -> None:
        self.app.switch_theme()

    def action_show_help(self) -> None:
        self.app.action_show_help()
