"""Queueing the job that the form describes, or changing the one it was opened for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from textual.message import Message

from jobs.errors import StateError, UserError
from tui.form.fields import draft
from tui.form.gate import Gate
from tui.form.purpose import Purpose

if TYPE_CHECKING:
    from tui.form.screen import NewJobScreen


class Submission:
    """Takes the values past the gate to the queue, in a thread; one at a time.

    Args:
        form: The form that describes the job.
        purpose: What it is for.
    """

    @dataclass
    class Ended(Message):
        """A thread submitted the job, or could not."""

        job: int | None
        problem: str = ""
        free_name: str = ""  # for a copy, where the job can be changed no more

    def __init__(self, form: NewJobScreen, purpose: Purpose) -> None:
        self._form = form
        self.purpose = purpose
        self.gate = Gate(form)
        self.busy = False

    async def begin(self) -> None:
        """Submit the job, unless something is wrong with it or has to be asked first."""
        form = self._form
        if self.busy or (values := await form.checks.complete()) is None:
            return
        if not self.gate.opens(values):
            return
        self.busy = True
        form.complain("")
        form.tell("checking …")
        work = partial(self._submit, self.purpose, values)
        form.run_worker(work, group="submit", exit_on_error=False, thread=True)

    def _submit(self, purpose: Purpose, values: dict[str, Any]) -> None:
        """In a thread."""
        form = self._form
        app = form.app  # a form that was left has none
        try:
            absent = self.gate.fetched_for(values)
            job, warnings = purpose.carry_out(form.store, draft.spec_of(values), absent)
            if not form.post_message(self.Ended(job)):  # left meanwhile, which stops nothing
                app.post_message(app.Said(f"job {job} {purpose.done}"))
            if warnings:
                app.post_message(app.Said("\n".join(warnings), "warning"))
        except UserError as error:
            late = isinstance(error, StateError) and purpose.job is not None
            name = purpose.copy_name(form.store, values) if late else ""
            form.post_message(self.Ended(None, str(error), name))
        except Exception as error:  # the edge: what was typed must not go with a crash
            form.post_message(self.Ended(None, f"{type(error).__name__}: {error}"))

    def take(self, message: Ended) -> None:
        """Close the form, or show why it stays."""
        self.busy = False
        if message.job is not None:
            self._form.dismiss(message.job)
            return
        self._form.tell_of_field()
        problem = message.problem
        if message.free_name:
            # The job can be changed no more: what was typed can still become another.
            self.purpose = Purpose(heading=f"copy of job {self.purpose.job}")
            self._form.fields.put({"name": message.free_name})
            self._form.show_heading()
            problem += "; ^r now queues your settings as a new job"
        self._form.checks.refuse(problem)
