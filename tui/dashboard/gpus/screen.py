"""The GPU screen: how busy and how full each GPU is and was, and every process on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual.screen import Screen
from textual.widgets import Static

from tui.dashboard.device_rows import devices_title
from tui.dashboard.gpus.rows import gpus_rows, graph_cells
from tui.keys.key_table import Key, bindings_of, line_of, scrolling
from tui.look.gpu_history import EVERY
from tui.widgets.lines import Lines

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Resize

    from tui.app.app import FsdpTui
    from tui.look.snapshot import Snapshot

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
