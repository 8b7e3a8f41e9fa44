"""The GPU screen: each GPU's utilization and memory now and over time, and all its processes."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from textual.screen import Screen
from textual.widgets import Static

from jobs.errors import StateError
from jobs.machine.processes import ProcessId, run_id_of, wait_gone
from tui.dashboard import device_rows
from tui.dashboard.rank_lines import Target, process_rows, split_of
from tui.keys.key_table import Key, bindings_of, line_of
from tui.look.collector import EVERY
from tui.text.format import Row, Span
from tui.widgets.bars import Links
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


def gpus_rows(
    snapshot: Snapshot, width: int, height: int, selected: int | None
) -> list[tuple[Row, Target | None]]:
    """Return headings, the GPUs with graphs as high as they fit, then the processes.

    Args:
        snapshot: The snapshot to show.
        width: Cells of a line.
        height: Visible lines.
        selected: The selected job; its memory has its own color.

    Returns:
        Each row with its target; None if the cursor skips it.
    """
    if not snapshot.gpus:
        return [((Span("no GPUs on this machine", "dim"),), None)]
    seats = device_rows.seats_by_gpu(snapshot)
    active = [view for view in snapshot.jobs if view.job.state.active]
    shape = device_rows.columns(
        width, named=len({gpu.name for gpu in snapshot.gpus}) > 1, graphs=False
    )
    processes = process_rows(snapshot, seats, width)
    spare = height - 1 - len(snapshot.gpus) - (len(processes) + 1 if processes else 0)
    lines = max(0, min(_MOST_LINES, spare // len(snapshot.gpus)))
    rows: list[tuple[Row, Target | None]] = [(device_rows.gpu_head(shape), None)]
    for gpu in snapshot.gpus:
        hint = device_rows.hint_of(gpu, shape)
        tag = device_rows.tag_of(gpu, seats[gpu.uuid], active, shape.tag - 1 - len(hint))
        split = split_of(gpu, seats[gpu.uuid], selected, tag.role == "accent")
        history = device_rows.history_of(snapshot, gpu)
        holder = next((view.job.id for view in active if gpu.uuid in view.job.gpus), None)
        row = device_rows.gpu_row(gpu, hint, tag, split, history, shape)
        rows.append((row, Target(gpu.uuid, holder)))
        rows += [(row, None) for row in _graphs(history.busy, history.filled, width, lines)]
    return [*rows, ((), None), *processes] if processes else rows


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
    """Return the columns of one graph on a line of `width` cells."""
    return max(1, (width - len(_USE) - len(_BETWEEN) - len(_MEMORY)) // 2)


def graph(shares: Sequence[int | None], width: int, lines: int) -> list[str]:
    """Draw percentages as columns, `lines` high; the newest on the right."""
    newest = shares[max(0, len(shares) - width) :]
    steps = [0 if share is None else round(share * lines * 8 / 100) for share in newest]
    steps = [max(1, step) if share else step for step, share in zip(steps, newest, strict=True)]
    rows = []
    for line in range(lines - 1, -1, -1):
        marks = (_HEIGHTS[min(8, max(0, step - 8 * line))] for step in steps)
        rows.append("".join(marks).rjust(width))
    return rows


# -- screen ---------------------------------------------------------------------------------
# The GPU screen: each GPU's utilization and memory now and over time, and all its processes.


_MARGIN: Final = 2  # columns beside the keys
_PATIENCE: Final = 5.0  # seconds to wait for a process to end


class GpusPanel(Lines, can_focus=True):
    """The rows, with a cursor that stays on its GPU or process; the headings do not scroll."""

    def __init__(self) -> None:
        super().__init__(fixed=1, id="gpus")
        self._targets: list[Target | None] = []
        self._on: tuple[object, ...] | None = None  # what the cursor is on
        self._last = 0  # its last row

    @property
    def target(self) -> Target | None:
        """Return what the cursor is on."""
        return self._targets[self._last] if self._last < len(self._targets) else None

    def find_stray(self) -> int:
        """Move the cursor to the first process of this user without a job; count them."""
        strays = [
            place
            for place, target in enumerate(self._targets)
            if target is not None and target.is_stray and target.job is None
        ]
        if strays:
            self._put(strays[0])
        return len(strays)

    def show_all(self, rows: Sequence[tuple[Row, Target | None]]) -> None:
        """Replace the rows; the cursor stays on its target, or near its last row."""
        self._targets = [target for _, target in rows]
        self.show([row for row, _ in rows])
        places = self._places
        on = (place for place in places if _identity(self._targets[place]) == self._on)
        near = min(places, key=lambda place: abs(place - self._last), default=0)
        self._put(next(on, near))

    def go(self, by: int) -> None:
        """Move the cursor by a number of GPUs and processes."""
        if places := self._places:
            at = places.index(self._last) if self._last in places else 0
            self._put(places[max(0, min(len(places) - 1, at + by))])

    def is_marked(self, index: int) -> bool:
        return index == self._last and self.target is not None

    @property
    def _places(self) -> list[int]:
        return [place for place, target in enumerate(self._targets) if target is not None]

    def _put(self, place: int) -> None:
        before, self._last = self._last, place
        self._on = _identity(self.target)
        if before != place:
            width = range(self.size.width)
            self.repaint(dict.fromkeys((before, place), width))
        seen, top = self.size.height - self.fixed, self.scroll_offset.y
        at = place - self.fixed
        if not top <= at < top + seen:
            self.scroll_to(y=max(0, at if at < top else at - seen + 1), animate=False, force=True)


def _identity(target: Target | None) -> tuple[object, ...] | None:
    if target is None:
        return None
    return target.gpu, target.job, target.process and target.process.pid


def end_process(pid: int, *, kill: bool) -> str:
    """End a process of this user, in a thread; return a message with the result.

    Raises:
        StateError: The process is gone, or belongs to a job.
    """
    process = ProcessId.of(pid)
    if process is None:
        raise StateError(f"process {pid} has ended already")
    if run_id_of(pid):
        raise StateError(f"process {pid} belongs to a job", "stop the job instead")
    if not process.signal(signal.SIGKILL if kill else signal.SIGTERM):
        raise StateError(f"process {pid} cannot be signaled")
    if wait_gone([process], _PATIENCE):
        more = "the driver may still hold it" if kill else "K kills it"
        return f"process {pid} still runs {_PATIENCE:g} s after the signal; {more}"
    return f"process {pid} has ended"


class GpusScreen(Screen[None]):
    """Shows each new snapshot of the dashboard while it is open."""

    CSS_PATH = "gpus.tcss"
    AUTO_FOCUS = "#gpus"
    KEYS: ClassVar = (
        Key("go(1)", "j,down", "↑ ↓", "choose", "Next GPU or process"),
        Key("go(-1)", "k,up", "k ↑", "up", "Previous GPU or process", line=False),
        Key("go(10)", "ctrl+d,pagedown", "^d", "page down", "Move down by ten", line=False),
        Key("go(-10)", "ctrl+u,pageup", "^u", "page up", "Move up by ten", line=False),
        Key("go(-1000000)", "home,g", "g", "start", "First GPU", line=False),
        Key("go(1000000)", "end,G,shift+g", "G", "end", "Last process", line=False),
        Key("to_job", "enter", "enter", "job", "Select the job that is there"),
        Key(
            "end_process",
            "T,shift+t",
            "T",
            "end",
            "End your process without a job; on a GPU: find it",
        ),
        Key("kill_process", "K,shift+k", "K", "kill", "Kill it, if it does not end", line=False),
        Key("switch_theme", "t", "t", "theme", "Switch between dark and light theme", line=False),
        Key("show_help", "question_mark,f1", "?", "help", "Keys of this screen"),
        Key("dismiss", "escape,q,u", "esc", "close", "Back to the dashboard"),
    )
    BINDINGS: ClassVar = bindings_of("gpus_screen", KEYS)

    app: FsdpTui

    def __init__(self, snapshot: Snapshot, selected: int | None) -> None:
        """
        Args:
            snapshot: The newest snapshot.
            selected: The selected job; its memory has its own color.
        """
        super().__init__()
        self.panel = GpusPanel()
        self._snapshot = snapshot
        self._selected = selected
        self._title = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="gpus-title", markup=False)
        yield self.panel
        yield Links("", id="gpus-keys")

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
        title = device_rows.devices_title(snapshot, "GPUs")
        if snapshot.gpus:
            title += f" · graphs: last {graph_cells(width) * EVERY / 60:.0f} min"
        if title != self._title:
            self._title = title
            self.query_one("#gpus-title", Static).update(title)
        self.panel.show_all(gpus_rows(snapshot, width, height, self._selected))

    def action_go(self, by: int) -> None:
        self.panel.go(by)

    def action_to_job(self) -> None:
        """Return to the dashboard with the job under the cursor selected."""
        target = self.panel.target
        if target is None or target.job is None:
            self.app.say("no job of yours is here", "warning")
            return
        self.app.dashboard.jobs.awaited = target.job
        self.app.collector.wake()
        self.dismiss()

    def action_end_process(self) -> None:
        self._end(kill=False)

    def action_kill_process(self) -> None:
        self._end(kill=True)

    def _end(self, *, kill: bool) -> None:
        from tui.widgets.questions import ConfirmScreen

        target = self.panel.target
        if target is not None and target.process is None and (count := self.panel.find_stray()):
            if count > 1:
                self.app.say(f"{count} processes of yours belong to no job: choose one")
                return
            target = self.panel.target
        process = target.process if target is not None else None
        if target is None or process is None or not target.is_stray:
            owner = process.user if process is not None and process.user else ""
            why = f"it is {owner}'s" if owner else "it is no process of yours that has no job"
            hint = "; enter goes to the job" if target is not None and target.job else ""
            self.app.say(f"nothing to end: {why}{hint}", "warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.app.act(partial(end_process, process.pid, kill=kill))

        verb = "Kill" if kill else "End"
        what = "SIGKILL: nothing can be saved." if kill else "SIGTERM: it may save and end."
        detail = f"{process.command}\n\nIt belongs to no job, and gets {what}"
        question = f"{verb} process {process.pid}?"
        self.app.push_screen(ConfirmScreen(question, detail, verb.lower()), answered)

    def action_press(self, key: str) -> None:
        """Press the key of a clicked entry in the key line."""
        self.app.simulate_key(key)

    def action_switch_theme(self) -> None:
        self.app.switch_theme()

    def action_show_help(self) -> None:
        self.app.action_show_help()
