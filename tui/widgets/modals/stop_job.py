"""Stop a job from the dashboard: the key is pressed twice, and a kill is asked about."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs import service
from jobs.queue.states import State
from tui.keys.actions import job_actions

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store
    from tui.app.app import FsdpTui

WITHIN: Final = 3.0  # seconds between the two presses
_KILLS: Final = 3  # the level that the next request would reach
_ENDS_BY: Final = ("stop it after a checkpoint", "send it SIGTERM")  # by its level so far
_one_at_a_time = threading.Lock()


class TwoPresses:
    """Remembers which job was to be stopped last, and until when a second press means it."""

    def __init__(self) -> None:
        self._job: int | None = None
        self._until = 0.0

    def press(self, job: int, now: float) -> bool:
        """Whether this is the second press for the job; `now` is monotonic, in seconds."""
        second = job == self._job and now <= self._until
        self._job, self._until = (None, 0.0) if second else (job, now + WITHIN)
        return second


def stop_job(app: FsdpTui, store: Store, job_id: int) -> None:
    """Stop a job at the second press within three seconds, more firmly each time.

    A key that is pressed in haste, or in a terminal that nobody watches, must not cost hours of
    training.
    """
    second = app.stop_presses.press(job_id, time.monotonic())

    def stop() -> str:
        """In a thread; several keys make several, which must not all see the same level."""
        with _one_at_a_time:
            job = store.get(job_id)
            kills = not job.state.ended and job.stop_level + 1 >= _KILLS
            if (second or job.state.ended) and not kills:
                return service.stop(store, job_id)
        app.call_later(ask if kills else partial(tell, job))
        return ""

    def tell(job: Job) -> None:
        queued = job.state is State.QUEUED
        what = "remove it from the queue" if queued else _ENDS_BY[min(job.stop_level, 1)]
        key = next(
            action.shown for action in job_actions(job, app.own_keys) if action.name == "stop_job"
        )
        text = f"job {job.id} “{job.name}”: press {key} again within {WITHIN:g} s to {what}"
        app.notify(text, severity="warning", timeout=WITHIN, markup=False)

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
