"""What a person does with a job, on the dashboard as on the screen of one job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from textual import on
from textual.message import Message
from textual.screen import Screen

from jobs import service
from jobs.service.plan import plan_resume
from tui.text.checkpoint_text import resume_question, resumed
from tui.widgets.modals.stop_job import stop_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.store import Store
    from jobs.service.plan import Plan
    from tui.app.app import FsdpTui


class JobActions(Screen[None]):
    """A screen with a job that can be started, stopped and asked for something."""

    app: FsdpTui
    store: Store

    @dataclass
    class Planned(Message):
        """A job that was to be started would go on in another way than it was going."""

        plan: Plan

    @property
    def acted_on(self) -> int | None:
        """The job that actions are about."""
        raise NotImplementedError

    def act(self, act: Callable[[int], str]) -> None:
        """Do something with the job in a thread; what it returns is shown."""
        if (job := self.acted_on) is not None:
            self.app.act(partial(act, job))

    def action_start_job(self) -> None:
        def start(job: int) -> str:
            plan = plan_resume(self.store, job)
            if plan.changes:
                self.post_message(self.Planned(plan))
                return ""
            return resumed(service.carry_out(self.store, plan))

        self.act(start)

    @on(Planned)
    def _ask_once(self, message: Planned) -> None:
        from tui.widgets.modals.confirm import ConfirmScreen

        if not isinstance(self.app.screen, ConfirmScreen):
            self.ask_to_resume(message.plan)

    def ask_to_resume(self, plan: Plan, then: Callable[[], None] = lambda: None) -> None:
        """Ask whether a planned resume is to be done, and do it.

        Args:
            plan: What was planned; it is planned again when the answer comes.
            then: Called when the answer is yes.
        """
        from tui.widgets.modals.confirm import ConfirmScreen

        def answered(yes: bool | None) -> None:
            if yes and plan.job is not None:
                resume = partial(service.resume, self.store, plan.job.id, back_to=plan.back_to)
                self.app.act(lambda: resumed(resume()))
                then()

        question, detail = resume_question(plan)
        screen = ConfirmScreen(question, detail, "go on", refuse="do not", harmful=False)
        self.app.push_screen(screen, answered)

    def action_stop_job(self) -> None:
        if (job := self.acted_on) is not None:
            stop_job(self.app, self.store, job)

    def action_save_now(self) -> None:
        self._request("save_now", "saves a checkpoint at the next step")

    def action_sample_now(self) -> None:
        self._request("sample_now", "samples its prompts at the next step")

    def _request(self, name: str, words: str) -> None:
        def ask(job: int) -> str:
            service.request(self.store, job, name)
            return f"job {job} {words}"

        self.act(ask)

    def action_switch_theme(self) -> None:
        self.app.switch_theme()
