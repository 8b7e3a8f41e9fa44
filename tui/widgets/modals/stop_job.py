"""Stop a job from the dashboard; before it is killed, the person is asked."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs import service

if TYPE_CHECKING:
    from jobs.queue.store import Store
    from tui.app.app import FsdpTui

_KILLS: Final = 3  # the level that the next request would reach
_one_at_a_time = threading.Lock()


def stop_job(app: FsdpTui, store: Store, job_id: int) -> None:
    """Stop a job, more firmly each time.

    A key that is pressed three times in haste must not cost hours of training.
    """

    def stop() -> str:
        """In a thread; several keys make several, which must not all see the same level."""
        with _one_at_a_time:
            job = store.get(job_id)
            if job.state.ended or job.stop_level + 1 < _KILLS:
                return service.stop(store, job_id)
        app.call_later(ask)
        return ""

    def ask() -> None:
        from tui.widgets.modals.confirm import ConfirmScreen

        def answered(yes: bool | None) -> None:
            if yes:
                app.act(partial(service.stop, store, job_id))

        if isinstance(app.screen, ConfirmScreen):
            return  # asked once, however often the key was pressed
        detail = (
            "It was asked to stop and got SIGTERM. Killing it loses all steps since its last "
            "checkpoint."
        )
        question = f"Kill job {job_id}?"
        app.push_screen(ConfirmScreen(question, detail, "kill", refuse="wait"), answered)

    app.act(stop)
