"""The fleet screen: all machines of machines.yaml, and visits to each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.app import SuspendNotSupported
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static

from jobs.errors import UserError
from jobs.fleet.config import EXAMPLE, config_file, read_fleet
from jobs.fleet.watch import FleetWatch
from tui.fleet.rows import about_rows, box_rows, totals
from tui.fleet.visit import visit
from tui.keys.key_table import Key, bindings_of, line_of, moving
from tui.widgets.bars import Links
from tui.widgets.lines import Lines, PickList
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.fleet.watch import BoxView
    from tui.app.app import FsdpTui
    from tui.text.format import Row


# -- panel ----------------------------------------------------------------------------------
# The list of the fleet screen.


class BoxesPanel(PickList):
    """The boxes in the order of machines.yaml, one of them highlighted."""

    def __init__(self) -> None:
        super().__init__(id="boxes")
        self.views: tuple[BoxView, ...] = ()

    @property
    def count(self) -> int:
        return len(self.views)

    @property
    def highlighted(self) -> BoxView | None:
        return self.views[self.index] if self.views else None

    def update_from(self, views: tuple[BoxView, ...]) -> None:
        self.views = views
        self.fill()

    def table(self, width: int) -> Sequence[Row]:
        return box_rows(self.views, time.monotonic(), width)


# -- screen ---------------------------------------------------------------------------------


_MARGIN: Final = 2  # columns beside the keys
_EVERY: Final = 1.0  # seconds between updates of ages


class FleetScreen(Screen[None]):
    """Connects when it opens, and closes its connections when it closes."""

    CSS_PATH = "fleet.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = "#boxes"
    KEYS: ClassVar = (
        *moving("machine"),
        Key("visit", "enter", "enter", "open", "Open the machine's own dashboard, and come back"),
        Key(
            "scroll_about(5)",
            "J,shift+j,shift+down",
            "J",
            "scroll",
            "Scroll its jobs down",
            line=False,
        ),
        Key("scroll_about(-5)", "K,shift+k,shift+up", "K", "up", "Scroll its jobs up", line=False),
        Key("retry", "r", "r", "retry", "Connect again to machines that are away"),
        Key("switch_theme", "t", "t", "theme", "Switch between dark and light theme", line=False),
        Key("show_help", "question_mark,f1", "?", "help", "Keys of this screen"),
        Key("dismiss", "escape,q,F,shift+f", "esc", "close", "Back to the dashboard"),
    )
    BINDINGS: ClassVar = bindings_of("fleet", KEYS)

    app: FsdpTui

    @dataclass
    class Heard(Message):
        """The current boxes; only the newest message counts."""

        views: tuple[BoxView, ...]

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, FleetScreen.Heard)

    def __init__(self) -> None:
        super().__init__()
        self.panel = BoxesPanel()
        self.about = Lines(fixed=1, id="box-about")
        self.watch_boxes: FleetWatch | None = None
        self._title = ""

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        yield Static("fleet", id="fleet-title", markup=False)
        yield Static("", id="fleet-problem", markup=False)
        yield self.panel
        yield self.about
        yield Links("", id="fleet-keys")

    def on_mount(self) -> None:
        try:
            fleet = read_fleet()
        except UserError as error:
            self._complain(str(error))
            return
        if not fleet.machines:
            self._complain(f"No machines yet. Write them into {config_file()}:\n\n{EXAMPLE}")
            return
        self.watch_boxes = FleetWatch(fleet)
        self.run_worker(
            self._watch, group="fleet", exclusive=True, exit_on_error=False, thread=True
        )
        self.set_interval(_EVERY, self.draw)

    def on_unmount(self) -> None:
        if self.watch_boxes is not None:
            self.watch_boxes.close()

    def on_resize(self) -> None:
        self.query_one("#fleet-keys", Static).update(line_of(self.KEYS, self.size.width - _MARGIN))
        self.call_after_refresh(self.draw)

    def _watch(self) -> None:
        """Watch the boxes in a thread until the screen closes."""
        assert self.watch_boxes is not None

        def publish(views: tuple[BoxView, ...]) -> None:
            self.post_message(self.Heard(views))

        self.watch_boxes.run(publish)

    def _complain(self, problem: str) -> None:
        self.query_one("#fleet-problem", Static).update(problem)
        self.add_class("-failed")

    # -- showing ---------------------------------------------------------------------------

    def on_fleet_screen_heard(self, message: Heard) -> None:
        self.panel.views = message.views
        self.draw()

    @on(BoxesPanel.Highlighted)
    def draw(self) -> None:
        """Show the current boxes."""
        if not self.is_current:
            return
        now = time.monotonic()
        self.panel.fill()
        title = f"fleet · {totals(self.panel.views, now)}" if self.panel.views else "fleet"
        if title != self._title:
            self._title = title
            self.query_one("#fleet-title", Static).update(title)
        view = self.panel.highlighted
        width = self.about.scrollable_content_region.width
        if view is not None and width:
            self.about.show(about_rows(view, now, width))

    # -- keys ------------------------------------------------------------------------------

    def action_go(self, by: int) -> None:
        self.panel.go(by)

    def action_scroll_about(self, lines: int) -> None:
        self.about.scroll_relative(y=lines, animate=False)

    def action_press(self, key: str) -> None:
        """Press the key of a clicked entry in the key line."""
        self.app.simulate_key(key)

    def action_retry(self) -> None:
        if self.watch_boxes is not None:
            self.watch_boxes.retry()

    def action_visit(self) -> None:
        """Give the terminal to ssh, and take it back when the user quits the other dashboard."""
        view = self.panel.highlighted
        if view is None:
            return
        words = ["--read-only"] if self.app.settings.read_only else []
        try:
            with self.app.suspend():
                status = visit(view.box, words, stay=True)
        except SuspendNotSupported:
            self.app.say("a browser cannot open another machine's dashboard", "warning")
            return
        self.app.action_redraw()
        if status:
            self.app.say(f"{view.box.name}: ssh ended with status {status}", "warning")
        self.action_retry()

    def action_switch_theme(self) -> None:
        self.app.switch_theme()

    def action_show_help(self) -> None:
        self.app.action_show_help()
