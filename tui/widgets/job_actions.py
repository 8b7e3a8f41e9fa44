"""What a person does with a job, on the dashboard as on every screen of one job: the same keys."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from textual import on
from textual.message import Message
from textual.screen import Screen, ScreenResultType

from jobs import service
from jobs.queue.states import State
from jobs.service.plan import plan_resume
from tui.keys.actions import job_actions, job_bindings
from tui.keys.key_table import Key
from tui.text.checkpoint_text import resume_question, resumed

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.binding import BindingType

    from jobs.queue.store import Job, Store
    from jobs.service.plan import Plan
    from tui.app.app import FsdpTui
    from tui.look.snapshot import Snapshot


# -- stop job -------------------------------------------------------------------------------
# Stop a job from the dashboard: the key is pressed twice, and a kill is asked about.


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
        from tui.widgets.questions import ConfirmScreen

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


# -- job actions ----------------------------------------------------------------------------


class JobActions(Screen[ScreenResultType]):
    """A screen with a job that can be started, stopped and asked for something."""

    BINDINGS: ClassVar[list[BindingType]] = job_bindings()

    app: FsdpTui

    @dataclass
    class Planned(Message):
        """A job to be resumed would not continue exactly as it was."""

        plan: Plan

    @property
    def job_acted_on(self) -> Job | None:
        """The job that actions are about, as it was seen last."""
        raise NotImplementedError

    @property
    def acted_on(self) -> int | None:
        """Its number."""
        return job.id if (job := self.job_acted_on) is not None else None

    def job_keys(self, job: Job | None) -> list[Key]:
        """List what can be done with a job now, for the line of keys."""
        if self.app.settings.read_only:
            return []
        return [
            Key(action.name, action.keys, action.shown, action.label, action.help)
            for action in job_actions(job, self.app.own_keys)
        ]

    def act(self, act: Callable[[int], str]) -> None:
        """Do something with the job in a thread; what it returns is shown."""
        if (job := self.acted_on) is not None:
            self.app.act(partial(act, job))

    def action_start_job(self) -> None:
        def start(job: int) -> str:
            plan = plan_resume(self.app.store, job)
            if plan.changes:
                self.post_message(self.Planned(plan))
                return ""
            return resumed(service.carry_out(self.app.store, plan))

        self.act(start)

    @on(Planned)
    def _ask_once(self, message: Planned) -> None:
        from tui.widgets.questions import ConfirmScreen

        if not isinstance(self.app.screen, ConfirmScreen):
            self.ask_to_resume(message.plan)

    def ask_to_resume(self, plan: Plan, then: Callable[[], None] = lambda: None) -> None:
        """Ask whether a planned resume is to be done, and do it.

        Args:
            plan: What was planned; it is planned again when the answer comes.
            then: Called when the answer is yes.
        """
        from tui.widgets.questions import ConfirmScreen

        def answered(yes: bool | None) -> None:
            if yes and plan.job is not None:
                resume = partial(service.resume, self.app.store, plan.job.id, back_to=plan.back_to)
                self.app.act(lambda: resumed(resume()))
                then()

        question, detail = resume_question(plan)
        screen = ConfirmScreen(question, detail, "resume", refuse="cancel", harmful=False)
        self.app.push_screen(screen, answered)

    def action_stop_job(self) -> None:
        if (job := self.acted_on) is not None:
            stop_job(self.app, self.app.store, job)

    def action_save_now(self) -> None:
        self._request("save_now", "saves a checkpoint at the next step")

    def action_sample_now(self) -> None:
        self._request("sample_now", "samples its prompts at the next step")

    def _request(self, name: str, words: str) -> None:
        def ask(job: int) -> str:
            service.request(self.app.store, job, name)
            return f"job {job} {words}"

        self.act(ask)

    def action_switch_theme(self) -> None:
        self.app.switch_theme()


class OfOneJob(JobActions[ScreenResultType]):
    """Fills the screen with something of one job; its keys follow the state of the job.

    Args:
        job: As it was when the screen was opened.
    """

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.job_now = job

    @property
    def job_acted_on(self) -> Job:
        return self.job_now

    def on_mount(self) -> None:
        self.app.snapshots.subscribe(self, self._follow_state)

    def _follow_state(self, snapshot: Snapshot) -> None:
        view = snapshot.find(self.job.id)
        if view is not None and view.job.state is not self.job_now.state:
            self.job_now = view.job
            self.show_keys()

    def show_keys(self) -> None:
        """Fill the line of keys."""
        raise NotImplementedError
