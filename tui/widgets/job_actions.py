"""Actions on a job, with the same keys on the dashboard and on every screen of one job."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import on
from textual.message import Message
from textual.screen import Screen, ScreenResultType

from jobs import service
from jobs.errors import UserError
from jobs.queue.states import State
from jobs.service.edit import copy_of
from jobs.service.plan import plan_resume
from jobs.spec.file.load import load_spec
from tui.keys.actions import fitting, job_actions, job_bindings
from tui.keys.key_table import Key
from tui.text.checkpoint_text import change_lines, resume_question, resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from textual.binding import BindingType

    from jobs.queue.store import Job, Store
    from jobs.service.plan import Plan
    from tui.app.app import FsdpTui
    from tui.look.snapshot import Snapshot


# -- stop job -------------------------------------------------------------------------------
# Stop jobs. The same key answers the question, so no timer is involved; a kill needs `y`.


_KILLS: Final = 3  # the level that the next request would reach
_ENDS_BY: Final = (
    "It ends after the current step, with a checkpoint.",
    "It was asked to stop. SIGTERM ends it now; steps since its last checkpoint may be lost.",
)  # by its current level
_one_at_a_time = threading.Lock()


def stop_jobs(app: FsdpTui, store: Store, jobs: Sequence[Job], then: Callable[[], None]) -> None:
    """Ask whether to stop these jobs, at the next level of force, and stop them.

    Args:
        app: The dashboard.
        store: The jobs.
        jobs: The displayed jobs. Jobs whose stop level has risen meanwhile are asked about again.
        then: Called if the user agrees.
    """
    from tui.widgets.questions import ConfirmScreen, StopScreen

    running = [job for job in jobs if not job.state.ended]
    if isinstance(app.screen, ConfirmScreen):
        return  # ask once, however often the key was pressed
    if not running:
        app.act(partial(_each, [partial(service.stop, store, job.id) for job in jobs]))
        return

    def stop(job: Job) -> str:
        """Stop in a thread; several keys start several, which must not all see the same level."""
        with _one_at_a_time:
            now = store.get(job.id)
            if now.stop_level <= job.stop_level:
                return service.stop(store, job.id)
        app.call_later(stop_jobs, app, store, [now], then)
        return ""

    def answered(yes: bool | None) -> None:
        if yes:
            then()
            app.act(partial(_each, [partial(stop, job) for job in running]))

    kills = any(job.stop_level + 1 >= _KILLS for job in running)
    which = f"job {running[0].id}" if kills else named(running)
    verb = "kill" if kills else "stop"
    question = f"{verb.title()} {which}?"
    ask = ConfirmScreen if kills else StopScreen
    detail = listed(running, _ends_by)
    app.push_screen(ask(question, detail, verb, refuse="wait" if kills else "keep"), answered)


def _ends_by(job: Job) -> str:
    if job.state is State.QUEUED:
        return "It leaves the queue."
    if job.stop_level + 1 >= _KILLS:
        return (
            "It was asked to stop and got SIGTERM. Killing it loses all steps since its last "
            "checkpoint."
        )
    return _ENDS_BY[min(job.stop_level, 1)]


def named(jobs: Sequence[Job]) -> str:
    """Return the object of a question: a single job's name, or the number of jobs."""
    return f"job {jobs[0].id} “{jobs[0].name}”" if len(jobs) == 1 else f"{len(jobs)} jobs"


def listed(jobs: Sequence[Job], tell: Callable[[Job], str]) -> str:
    """Return the effect on the jobs: a sentence for one, a line for each of several."""
    if len(jobs) == 1:
        return tell(jobs[0])
    return "\n".join(f"{job.id} {job.name}: {tell(job)}" for job in jobs)


def _each(acts: Sequence[Callable[[], str]]) -> str:
    """Apply to all jobs, in a thread; failures are reported together.

    Raises:
        UserError: All jobs failed, or the only one.
    """
    texts, failed = [], 0
    for act in acts:
        try:
            texts.append(act())
        except UserError as error:
            texts.append(str(error))
            failed += 1
    text = "\n".join(filter(None, texts))
    if failed == len(acts):
        raise UserError(text)
    return text


# -- job actions ----------------------------------------------------------------------------


class JobActions(Screen[ScreenResultType]):
    """A screen with a job that can be started, stopped and sent requests."""

    BINDINGS: ClassVar[list[BindingType]] = job_bindings()

    app: FsdpTui

    @dataclass
    class Planned(Message):
        """A resume is planned that would not continue exactly as before."""

        plan: Plan

    @property
    def job_acted_on(self) -> Job | None:
        """Return the job that actions apply to, as displayed last."""
        raise NotImplementedError

    @property
    def acted_on(self) -> int | None:
        """Return its id."""
        return job.id if (job := self.job_acted_on) is not None else None

    @property
    def all_acted_on(self) -> list[Job]:
        """Return all jobs that actions apply to: the marked ones, or the current one."""
        return [job] if (job := self.job_acted_on) is not None else []

    def acted(self) -> None:
        """Handle the end of an action on all of them."""

    def job_keys(self, job: Job | None) -> list[Key]:
        """Return the actions available for the job now, for the key line."""
        if self.app.settings.read_only:
            return []
        return [
            Key(action.name, action.keys, action.shown, action.label, action.help)
            for action in job_actions(job, self.app.own_keys)
        ]

    def act(self, act: Callable[[int], str]) -> None:
        """Apply an action to the job in a thread; show what it returns."""
        if (job := self.acted_on) is not None:
            self.app.act(partial(act, job))

    def act_on_all(self, name: str, act: Callable[[int], str], about: str) -> None:
        """Apply an action to the job, or after one question to all marked ones.

        Args:
            name: The action; marked jobs in whose state it makes no sense are skipped.
            act: Called with a job, in a thread; what it returns is shown.
            about: A verb for the question, such as "hold".
        """
        jobs = self.all_acted_on
        if len(jobs) < 2:
            self.act(act)
            return
        self.ask_about_all(name, jobs, about, lambda job: str(job.state), act)

    def ask_about_all(
        self,
        name: str,
        jobs: Sequence[Job],
        verb: str,
        tell: Callable[[Job], str],
        act: Callable[[int], str],
        *,
        harmful: bool = False,
    ) -> None:
        """Ask once about all jobs in whose state an action makes sense, and apply it."""
        from tui.widgets.questions import ConfirmScreen

        fit = fitting(name, jobs)
        if not fit:
            states = ", ".join(sorted({str(job.state) for job in jobs}))
            problem = f"nothing to {verb}: the {len(jobs)} marked jobs are {states}"
            self.app.say(problem, "warning")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.acted()
                self.app.act(partial(_each, [partial(act, job.id) for job in fit]))

        left = len(jobs) - len(fit)
        detail = listed(fit, tell) + (f"\n{left} other marked jobs are left alone." if left else "")
        question = f"{verb.capitalize()} {named(fit)}?"
        self.app.push_screen(
            ConfirmScreen(question, detail, verb, refuse="cancel", harmful=harmful), answered
        )

    def action_start_job(self) -> None:
        if len(jobs := self.all_acted_on) > 1:
            resume = partial(service.resume, self.app.store)
            newest = "resumes from its newest checkpoint"
            self.ask_about_all(
                "start_job", jobs, "resume", lambda _: newest, lambda job: resumed(resume(job))
            )
            return

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

    def ask_to_resume(
        self,
        plan: Plan,
        then: Callable[[], None] = lambda: None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask whether to carry out a planned resume, and do it.

        Args:
            plan: The plan; it is made again when the user answers.
            then: Called if the user agrees.
            changes: Settings to change, by key.
        """
        from tui.widgets.questions import ConfirmScreen

        def answered(yes: bool | None) -> None:
            if yes and plan.job is not None:
                resume = partial(
                    service.resume, self.app.store, plan.job.id, changes, back_to=plan.back_to
                )
                self.app.act(lambda: resumed(resume()))
                then()

        question, detail = resume_question(plan, changes)
        screen = ConfirmScreen(question, detail, "resume", refuse="cancel", harmful=False)
        self.app.push_screen(screen, answered)

    def action_resume_with(self) -> None:
        """Open the form with the settings that a resume allows to change."""
        from tui.form.opening import open_resume

        if (job := self.acted_on) is not None:
            open_resume(self.app.dashboard, job)

    def resume_with(self, changes: Mapping[str, Any]) -> None:
        """Ask whether to resume the job with other settings, or to copy it if it cannot resume."""

        def plan(job: int) -> str:
            try:
                made = plan_resume(self.app.store, job, changes)
            except UserError as error:
                self.app.call_later(self._ask_to_copy, job, changes, str(error))
            else:
                self.app.call_later(self.ask_to_resume, made, changes=changes)
            return ""

        self.act(plan)

    def _ask_to_copy(self, job: int, changes: Mapping[str, Any], why: str) -> None:
        from tui.widgets.questions import ConfirmScreen

        def copy() -> str:
            taken = [other.name for other in self.app.store.all()]
            values = copy_of(self.app.store.get(job), taken) | dict(changes)
            return f"job {service.submit(self.app.store, load_spec(None, values)).id} queued"

        def answered(yes: bool | None) -> None:
            if yes:
                self.app.act(copy)

        listed = "\n".join(change_lines(changes))
        detail = (
            f"It cannot resume with these values: {why}.\n\nThe copy starts at step 0:\n{listed}"
        )
        screen = ConfirmScreen(
            f"Start a copy of job {job}?", detail, "copy", refuse="cancel", harmful=False
        )
        self.app.push_screen(screen, answered)

    def action_stop_job(self) -> None:
        if jobs := self.all_acted_on:
            stop_jobs(self.app, self.app.store, jobs, self.acted)

    def action_save_now(self) -> None:
        self._request("save_now", "saves a checkpoint at the next step", "save now")

    def action_sample_now(self) -> None:
        self._request("sample_now", "samples its prompts at the next step", "sample now")

    def _request(self, name: str, words: str, verb: str) -> None:
        def ask(job: int) -> str:
            service.request(self.app.store, job, name)
            return f"job {job} {words}"

        self.act_on_all(name, ask, verb)

    def action_switch_theme(self) -> None:
        self.app.switch_theme()


class OfOneJob(JobActions[ScreenResultType]):
    """A full screen about one job; its keys follow the job's state.

    Args:
        job: The job when the screen was opened.
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
        """Show the key line."""
        raise NotImplementedError
