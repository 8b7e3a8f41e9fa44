"""Choose the runs that a panel of curves compares."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tui.plots.pick_runs import PickRunsScreen

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store
    from tui.plots.panel import PlotsPanel


async def choose_runs(panel: PlotsPanel, store: Store, job: Job) -> None:
    """Ask which runs are shown beside a job's, in a worker.

    Args:
        panel: What shows them.
        store: Where they are; read in a thread, since someone may hold it.
        job: The one that stays.
    """
    jobs = {listed.id: listed for listed in await asyncio.to_thread(store.all)}
    shown = [listed.id for listed in panel.jobs]

    def show(chosen: list[int] | None) -> None:
        if chosen is not None:
            panel.compare([job, *(jobs[job_id] for job_id in chosen)])

    # Not `push_screen_wait`: docs/upstream.md says why.
    panel.app.push_screen(PickRunsScreen(list(jobs.values()), shown, job), show)
