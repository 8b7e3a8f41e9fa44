"""The tabs of the job screen, and the line that shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from textual.content import Content

from tui.job.checkpoints import CheckpointsPane
from tui.job.panes.config import ConfigPane
from tui.job.panes.history import HistoryPane
from tui.job.panes.logs import LogsPane
from tui.job.panes.overview import OverviewPane
from tui.job.panes.plots import PlotsPane
from tui.job.panes.ranks import RanksPane
from tui.widgets.bars import Links

if TYPE_CHECKING:
    from textual.events import Resize

    from jobs.queue.store import Job, Store
    from tui.widgets.pane import Pane


# -- build ----------------------------------------------------------------------------------
# The pane of each tab.


def build_pane(name: str, store: Store, job: Job) -> Pane:
    """Return a new pane for a tab.

    Raises:
        ValueError: There is no such tab.
    """
    match name:
        case "overview":
            return OverviewPane(id="overview")
        case "ranks":
            return RanksPane()
        case "logs":
            return LogsPane()
        case "plots":
            return PlotsPane(store, job)
        case "samples":
            from tui.job.samples import SamplesPane  # importing image libraries takes a while

            return SamplesPane(job)
        case "checkpoints":
            return CheckpointsPane(store, job)
        case "config":
            return ConfigPane(store)
        case "history":
            return HistoryPane(id="history")
    raise ValueError(f"no tab {name!r}")


# -- tabs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tab:
    """A tab.

    Attributes:
        name: Its name in code.
        title: Its displayed name.
        help: A sentence.
        short: The title for narrow screens.
    """

    name: str
    title: str
    help: str
    short: str = ""


TABS: Final = (
    Tab("overview", "overview", "State, progress, memory, files"),
    Tab("ranks", "ranks", "Each rank's progress and memory"),
    Tab("logs", "logs", "Logs of the ranks, launcher and supervisor"),
    Tab("plots", "plots", "Loss and other curves"),
    Tab("samples", "samples", "Images from the validation prompts"),
    Tab("checkpoints", "checkpoints", "Resume from one, verify, export, delete", "ckpts"),
    Tab("config", "config", "Job file, launch command, comparison with another job"),
    Tab("history", "history", "Attempts, restarts, events"),
)
NAMES: Final = tuple(tab.name for tab in TABS)
_SHORT_BELOW: Final = 96  # columns


class TabLine(Links):
    """The tabs on one line, clickable; each tab's number is its key."""

    def __init__(self) -> None:
        super().__init__("", id="job-tabs")
        self._shown = ("", 0)

    def show(self, active: str) -> None:
        """Show which tab is open."""
        narrow = self.size.width < _SHORT_BELOW
        if (active, narrow) != self._shown:
            self._shown = (active, narrow)
            self.update(tab_line(active, narrow=narrow))

    def on_resize(self, event: Resize) -> None:
        self.show(self._shown[0])


def tab_line(active: str, *, narrow: bool) -> Content:
    """Return every tab after its number, with the open one in colored brackets."""
    parts = []
    for number, tab in enumerate(TABS, 1):
        title = (tab.short if narrow else "") or tab.title
        words = f" [$foreground 55%]{number}[/] {title} "
        if tab.name == active:
            words = f"[b $primary reverse] {number} {title} [/]"
        parts.append(f"[@click=screen.show_tab('{tab.name}')]{words}[/]")
    return Content.from_markup(("" if narrow else " ").join(parts))
