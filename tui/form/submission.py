"""Queue the form's job, or change the one that the form was opened for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from textual.message import Message

from jobs.errors import StateError, UserError
from jobs.hub.wanted import question
from tui.form import draft
from tui.form.beside import FitBars
from tui.form.pages import first_of
from tui.form.purpose import Purpose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.values.hub_names import HubName
    from tui.form.checks import Looks
    from tui.form.screen import NewJobScreen


# -- gate -----------------------------------------------------------------------------------
# What can prevent queueing: an invalid path, a running lookup, an open question.


_ASKS: Final = "Not on this machine; asking how large it is …"
_WAITS: Final = "Checking model, data and memory … ^r again queues without waiting."


class Gate:
    """Lets a job into the queue once it has no errors, or the user confirms it.

    Args:
        form: The form.
    """

    def __init__(self, form: NewJobScreen) -> None:
        self._form = form
        self._accepted: Mapping[str, Any] | None = None  # values confirmed in spite of a doubt
        self._fetched: tuple[Mapping[str, Any], list[HubName]] = ({}, [])  # for these values
        self._waiting: Mapping[str, Any] | None = None  # values whose lookups are running

    def opens(self, values: Mapping[str, Any]) -> bool:
        """Return whether the job of these values may be queued now."""
        form, fit = self._form, self._form.query_one(FitBars)
        if not self._is_ready(values) and self._waiting != values:
            self._waiting = dict(values)
            form.tell(_WAITS)
            return False
        self._wait_no_longer()
        if form.looks.bad_paths and not self.fetched_for(values):
            if any(draft.names_hub(name, values) for name in form.looks.bad_paths):
                form.tell(_ASKS)
                form.looks.at_hub(values)
            else:
                form.call_later(form.go_to, first_of(form.looks.bad_paths))
            return False
        return values == self._accepted or not self._asks(values, fit)

    def look_again(self) -> None:
        """Submit the form if it was waiting for an answer that has arrived."""
        if (values := self._waiting) is None:
            return
        if values != self._form.values:  # typed on meanwhile
            self._wait_no_longer()
        elif self._is_ready(values):
            self._form.call_later(self._form.action_submit)

    def _is_ready(self, values: Mapping[str, Any]) -> bool:
        """Return whether all checks of these values have ended."""
        fits = self._form.query_one(FitBars).knows(values)
        checked = fits or self._form.purpose.keeps_memory(values)
        return checked and not self._form.looks.under_way

    def _wait_no_longer(self) -> None:
        if self._waiting is not None:
            self._waiting = None
            self._said_no_longer(_WAITS)

    def _said_no_longer(self, text: str) -> None:
        """Show the field's help again, unless another message has replaced ours."""
        if self._form.said_below == text:
            self._form.tell_of_field()

    def fetched_for(self, values: Mapping[str, Any]) -> list[HubName]:
        """Return what the user agreed to fetch for a job of these values."""
        return self._fetched[1] if values == self._fetched[0] else []

    def ask_to_fetch(self, answer: Looks.Absent) -> None:
        """Ask whether to fetch, once the hub has answered."""
        form = self._form
        self._said_no_longer(_ASKS)
        if answer.values != form.values:  # typed on meanwhile
            return
        if not answer.sizes:
            form.complain(answer.problem)
            form.call_later(form.go_to, first_of(form.looks.bad_paths))
            return
        from tui.widgets.questions import ConfirmScreen

        screen = ConfirmScreen(
            question(answer.sizes),
            "It is fetched in the background, also after you leave; the job waits in the queue.",
            "fetch it and queue the job",
            refuse="back",
            harmful=False,
        )
        form.app.push_screen(screen, partial(self._agreed, answer))

    def _agreed(self, answer: Looks.Absent, yes: bool | None) -> None:
        if yes:
            self._fetched = answer.values, list(answer.sizes)
            self._form.call_later(self._form.action_submit)

    def _asks(self, values: Mapping[str, Any], fit: FitBars) -> bool:
        doubts = list(self._form.looks.doubts.values())
        heading = "Queue it with this data?"
        if too_large := fit.doubt(values):
            heading, doubts = "It does not fit", [too_large, *doubts]
        if not doubts:
            return False
        from tui.widgets.questions import ConfirmScreen

        screen = ConfirmScreen(heading, "\n\n".join(doubts), "queue it anyway", refuse="back")
        self._form.app.push_screen(screen, partial(self._answered, dict(values)))
        return True

    def _answered(self, values: Mapping[str, Any], yes: bool | None) -> None:
        if yes:
            self._accepted = values
            self._form.call_later(self._form.action_submit)


# -- submission -----------------------------------------------------------------------------


class Submission:
    """Passes the values through the gate to the queue, in a thread; one at a time.

    Args:
        form: The form that describes the job.
        purpose: The form's purpose.
    """

    @dataclass
    class Ended(Message):
        """A thread submitted the job, or could not."""

        job: int | None
        done: str = ""
        problem: str = ""
        free_name: str = ""  # for a copy, if the job can no longer be edited

    def __init__(self, form: NewJobScreen, purpose: Purpose) -> None:
        self._form = form
        self.purpose = purpose
        self.gate = Gate(form)
        self.busy = False
        self.swept: dict[str, list[Any]] = {}  # values of fields that are lists
        self.done = ""  # the result, in words

    async def begin(self) -> None:
        """Submit the job, unless it has errors or a question has to be asked first."""
        form = self._form
        self.swept = form.fields.swept
        if self.busy or (values := await form.checks.complete()) is None:
            return
        if not self.gate.opens(values):
            return
        self.busy = True
        form.complain("")
        form.tell("checking …")
        work = partial(self._submit, self.purpose, values, self.swept)
        form.run_worker(work, group="submit", exit_on_error=False, thread=True)

    def _submit(
        self, purpose: Purpose, values: dict[str, Any], swept: Mapping[str, list[Any]]
    ) -> None:
        """Submit in a thread."""
        form = self._form
        app = form.app  # a form that was left has none
        try:
            absent = self.gate.fetched_for(values)
            if purpose.job is None and (swept or values.get("both_experts") is True):
                job, done, warnings = purpose.queue_sweep(form.store, values, swept, absent)
            else:
                job, warnings = purpose.carry_out(form.store, draft.spec_of(values), absent)
                done = f"job {job} {purpose.done}"
            form.drafts.delete()
            # The form was left; the job is queued anyway.
            if not form.post_message(self.Ended(job, done)):
                app.post_message(app.Said(done))
            if warnings:
                app.post_message(app.Said("\n".join(warnings), "warning"))
        except UserError as error:
            late = isinstance(error, StateError) and purpose.job is not None
            name = purpose.copy_name(form.store, values) if late else ""
            form.post_message(self.Ended(None, problem=str(error), free_name=name))
        except Exception as error:  # top level: input must not be lost in a crash
            form.post_message(self.Ended(None, problem=f"{type(error).__name__}: {error}"))

    def take(self, message: Ended) -> None:
        """Close the form, or show why it stays open."""
        self.busy = False
        self.done = message.done
        if message.job is not None:
            self._form.dismiss(message.job)
            return
        self._form.tell_of_field()
        problem = message.problem
        if message.free_name:
            # The job can no longer be edited. Offer to queue the form as a new job.
            follows = self.purpose.follows
            self.purpose = Purpose(heading=f"copy of job {self.purpose.job}", follows=follows)
            self._form.fields.put({"name": message.free_name})
            self._form.show_heading()
            problem += "; ^r now queues your settings as a new job"
        self._form.checks.refuse(problem)
