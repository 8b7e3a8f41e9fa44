"""The curves of a run on the whole screen, compared with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.screen import Screen
from textual.widgets import Static

from tui.keys.key_table import Key, bindings_of, line_of
from tui.plots.panel import PlotsPanel

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Resize

    from jobs.queue.store import Job, Store
    from tui.app.app import FsdpTui


class PlotsScreen(Screen[None]):
    """Wires the panel of curves to the choice of what it compares."""

    CSS_PATH = "plots.tcss"
    AUTO_FOCUS = "#plots"
    KEYS: ClassVar = (
        Key("leave", "escape,q,v", "esc", "close", "Clear the cursor, or close the plots"),
        Key("compare", "c", "c", "compare", "Choose other runs to compare with"),
        Key("app.show_help", "question_mark", "?", "help", "Keys of this screen"),
    )
    BINDINGS: ClassVar = bindings_of("plots_screen", KEYS[:2])

    app: FsdpTui

    def __init__(self, store: Store, job: Job) -> None:
        """
        Args:
            store: Where the other jobs are.
            job: Whose curves.
        """
        super().__init__()
        self.store = store
        self.job = job
        self.panel = PlotsPanel([job], resting=self._is_covered)
        self.key_line = Static("", id="plots-keys")

    def compose(self) -> ComposeResult:
        yield Static(
            f"plots of job {self.job.id} “{self.job.name}”", id="plots-title", markup=False
        )
        yield self.panel
        self.key_line.auto_links = False  # they would all get one colour
        yield self.key_line

    def on_resize(self, event: Resize) -> None:
        keys = (*self.KEYS, *self.panel.KEYS)
        self.key_line.update(line_of(keys, event.size.width - 2))

    def _is_covered(self) -> bool:
        stack = self.app.screen_stack
        return self in stack and any(
            not screen.is_modal for screen in stack[stack.index(self) + 1 :]
        )

    def action_leave(self) -> None:
        if not self.panel.stop_reading():
            self.dismiss()

    def action_compare(self) -> None:
        from tui.plots.comparing import choose_runs

        work = choose_runs(self.panel, self.store, self.job)
        self.run_worker(work, group="compare", exclusive=True, exit_on_error=False)
