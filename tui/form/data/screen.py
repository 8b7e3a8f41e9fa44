"""The screen that shows what a job would train on, before it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.binding import Binding
from textual.containers import Container
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Static
from textual.worker import get_current_worker

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.preflight.data_look import DataLook, look_at_data
from jobs.run.rundir import read_json
from tui.form.data.buckets_panel import BucketsPanel
from tui.form.data.findings_panel import FindingsPanel
from tui.form.data.images_panel import PicturesPanel
from tui.form.data.rows import looking_row
from tui.keys.key_line import key_line
from tui.text.data_text import changes, headlines
from tui.widgets.lines import Lines
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.events import DescendantFocus

    from jobs.spec.job_spec import JobSpec
    from tui.app.app import FsdpTui

_KEYS: Final = (  # action, keys as people read them, what it does
    ("go(1)", "↑ ↓", "bucket"),
    ("turn(1)", "← →", "images"),
    ("app.focus_next", "tab", "findings"),
    ("look_again", "r", "refresh"),
    ("dismiss", "esc", "close"),
)
_KEYS_WITHOUT: Final = _KEYS[-2:]  # what can be done while there is nothing to see
_MARGIN: Final = 2  # columns beside the keys
_STATES: Final = ("-looking", "-failed", "-looked")


class DataScreen(Screen[None]):
    """Checks the data in a separate process, which ends with the screen."""

    CSS_PATH = "data.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (160, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = ""
    BINDINGS: ClassVar = [
        Binding(
            "escape,q,d", "dismiss", "close", id="data.close", tooltip="Back to the previous screen"
        ),
        Binding("j,down", "go(1)", "next bucket", id="data.down"),
        Binding("k,up", "go(-1)", "previous bucket", id="data.up"),
        Binding("ctrl+d,pagedown", "go(10)", "ten buckets down", id="data.page_down"),
        Binding("ctrl+u,pageup", "go(-10)", "ten buckets up", id="data.page_up"),
        Binding("home,g", "first", "first bucket", id="data.first"),
        Binding("end,G,shift+g", "last", "last bucket", id="data.last"),
        Binding(
            "l,right",
            "turn(1)",
            "next images",
            id="data.next_pictures",
            tooltip="Next images of the bucket",
        ),
        Binding(
            "h,left",
            "turn(-1)",
            "previous images",
            id="data.previous_pictures",
            tooltip="Previous images of the bucket",
        ),
        Binding("r", "look_again", "refresh", id="data.look_again", tooltip="Read the data again"),
        Binding(
            "t",
            "switch_theme",
            "theme",
            id="data.switch_theme",
            tooltip="Switch between the dark and light theme",
        ),
    ]

    app: FsdpTui

    @dataclass
    class Progressed(Message):
        """The look has come so far."""

        done: int
        total: int

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, DataScreen.Progressed)

    @dataclass
    class Looked(Message):
        """The data has been read."""

        look: DataLook
        changed: str

    @dataclass
    class Failed(Message):
        """The data could not be read."""

        problem: str

    def __init__(
        self, heading: str, job: Callable[[], JobSpec], earlier: Path | None = None
    ) -> None:
        """
        Args:
            heading: Whose data it is.
            job: Reads the job; called in a thread.
            earlier: The file with the report from when the job read its data; None if it has not.
        """
        super().__init__()
        self.heading = heading
        self.look: DataLook | None = None
        self._job = job
        self._earlier = earlier
        self.buckets = BucketsPanel()
        self.pictures = PicturesPanel()
        self.findings = FindingsPanel()
        self.looking = Lines(id="looking")
        self.key_line = Static("", id="data-keys")

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        yield Static(Content(self.heading), id="data-title")
        yield self.looking
        yield Static("", id="data-problem", markup=False)
        yield Static("", id="data-totals", markup=False)
        yield Static("", id="data-changed", markup=False)
        with Container(id="data-body"):
            yield self.buckets
            yield self.pictures
            yield self.findings
        self.key_line.auto_links = False  # they would all get one colour
        yield self.key_line

    def on_mount(self) -> None:
        self.action_look_again()

    # -- looking ---------------------------------------------------------------------------

    def action_look_again(self) -> None:
        self._become("-looking")
        self.looking.show([looking_row(0, 0, 0)])
        self.run_worker(self._look, group="data", exclusive=True, exit_on_error=False, thread=True)

    def _look(self) -> None:
        """In a thread. When the screen closes, its worker is cancelled, and with it the process."""
        worker = get_current_worker()

        def report_progress(done: int, total: int) -> None:
            self.post_message(self.Progressed(done, total))

        try:
            job = self._job()
            look = look_at_data(
                job, report_progress, cancelled=lambda: worker.is_cancelled, strips=True
            )
            before = read_json(self._earlier) if self._earlier else None
            changed = changes(before, look.report)
            self.post_message(self.Looked(look, changed))
        except Cancelled:
            return
        except (UserError, ToolError) as error:
            self.post_message(self.Failed(str(error)))
        except Exception as error:  # the edge: a screen that waits forever tells nothing
            self.post_message(self.Failed(f"{type(error).__name__}: {error}"))

    def on_data_screen_progressed(self, message: Progressed) -> None:
        if self.has_class("-looking"):
            width = self.looking.size.width
            self.looking.show([looking_row(message.done, message.total, width)])

    def on_data_screen_failed(self, message: Failed) -> None:
        self.query_one("#data-problem", Static).update(f"! {message.problem}")
        self._become("-failed")

    def on_data_screen_looked(self, message: Looked) -> None:
        self.look = message.look
        report = message.look.report
        self.query_one("#data-totals", Static).update("\n".join(headlines(report)))
        changed = self.query_one("#data-changed", Static)
        changed.set_class(bool(message.changed), "-shown")
        changed.update(f"The data has changed since the job read it: {message.changed}.")
        self._become("-looked")
        self.buckets.update_from(report)
        self.findings.update_from(report)
        self._show_pictures()
        self.buckets.focus()

    def _become(self, state: str) -> None:
        for name in _STATES:
            self.set_class(name == state, name)
        self._show_keys()

    def on_resize(self) -> None:
        self._show_keys()

    def _show_keys(self) -> None:
        """As many as there is room for."""
        keys = _KEYS if self.has_class("-looked") else _KEYS_WITHOUT
        self.key_line.update(key_line(keys, self.size.width - _MARGIN))

    # -- moving ----------------------------------------------------------------------------

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        # On a low screen, the findings take the place of the images while they are read.
        self.set_class(event.widget is self.findings, "-reading")

    def action_go(self, by: int) -> None:
        self.buckets.go(by)

    def action_first(self) -> None:
        self.buckets.go(-self.buckets.index)

    def action_last(self) -> None:
        self.buckets.go(self.buckets.count)

    def action_turn(self, by: int) -> None:
        self.pictures.turn(by)

    @on(BucketsPanel.Highlighted)
    def _show_pictures(self) -> None:
        if self.look is not None:
            index = self.buckets.index
            self.pictures.show(self.look.report["buckets"][index], self.look.strips[index])

    def action_switch_theme(self) -> None:
        self.app.switch_theme()
