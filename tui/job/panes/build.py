"""Which pane lies behind which tab."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tui.job.checkpoints.pane import CheckpointsPane
from tui.job.panes.config import ConfigPane
from tui.job.panes.history import HistoryPane
from tui.job.panes.logs import LogsPane
from tui.job.panes.overview import OverviewPane
from tui.job.panes.plots import PlotsPane
from tui.job.panes.ranks import RanksPane

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store
    from tui.widgets.pane import Pane


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
            from tui.job.samples.pane import SamplesPane  # images take a while to import

            return SamplesPane(job)
        case "checkpoints":
            return CheckpointsPane(store, job)
        case "config":
            return ConfigPane(store)
        case "history":
            return HistoryPane(id="history")
    raise ValueError(f"no tab {name!r}")
