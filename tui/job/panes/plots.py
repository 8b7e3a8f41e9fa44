"""The plots tab: everything measured at each step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from tui.keys.key_table import Key, bindings_of
from tui.plots.panel import NUMBER_KEYS, PlotsPanel
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from jobs.queue.store import Job, Store


class TabPlots(PlotsPanel, inherit_bindings=False):
    """The curves without their number keys, which switch tabs here."""

    KEYS: ClassVar = tuple(
        replace(key, shown="n") if key.action == "turn(1)" else key
        for key in PlotsPanel.KEYS
        if key not in NUMBER_KEYS
    )
    BINDINGS: ClassVar = bindings_of("plots", KEYS)


class PlotsPane(Pane):
    """The curves of the job and of others that it is compared with."""

    KEYS: ClassVar = (
        Key("compare", "c", "c", "compare", "Choose other runs to compare with"),
        Key("leave", "escape", "esc", "close", "Clear the cursor, or close", line=False),
    )
    BINDINGS: ClassVar = bindings_of("plots_tab", KEYS)

    def __init__(self, store: Store, job: Job) -> None:
        super().__init__(id="plots-tab")
        self.store = store
        self.job = job
        self.panel = TabPlots([job], resting=self._unseen)

    def compose(self) -> ComposeResult:
        yield self.panel

    @property
    def keys(self) -> Sequence[Key]:
        return [*self.KEYS, *self.panel.KEYS]

    def _unseen(self) -> bool:
        return not self.display or not self.screen.is_current

    def action_leave(self) -> None:
        if not self.panel.stop_reading():
            self.screen.dismiss()

    def action_compare(self) -> None:
        from tui.plots.screen import choose_runs

        work = choose_runs(self.panel, self.store, self.job)
        self.run_worker(work, group="compare", exclusive=True, exit_on_error=False)
