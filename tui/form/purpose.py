"""The purpose of a form: a new job, a copy, an edit of a queued job, or a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobs import service
from jobs.errors import UserError
from jobs.service import edit
from jobs.service.plan import plan_resume, plan_submit, stage_notes
from jobs.service.sweep import advice, check_count, expand, plan_all, queue_all
from jobs.spec.job_spec import key_facts
from tui.form import draft
from tui.text.checkpoint_text import plan_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec
    from jobs.spec.values.field import Effect
    from jobs.spec.values.hub_names import HubName
    from tui.form.screen import NewJobScreen

_MEANS: Final[dict[Effect, str]] = {
    "same": "the result stays the same",
    "changes": "the result changes",
    "impossible": "not with this checkpoint",
    "ruled": "what that changes is said below",
}


@dataclass(frozen=True)
class Source:
    """An earlier job whose model, data and ranks a new one can reuse.

    Attributes:
        job: Its number.
        name: Its name.
        values: The values to reuse, by key.
    """

    job: int
    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Purpose:
    """What the form does with its values.

    Attributes:
        heading: Its title.
        verb: What its main key does.
        job: The queued job that is edited; None for a new one.
        before: That job when the form was opened.
        source: The newest job, if there is one.
        resumes: Whether that job has ended and resumes with other settings.
        fixed: Whether it has a checkpoint, which fixes some of them.
        followed: Jobs that had to complete before it when the form was opened.
        follows: Jobs that must complete before it starts.
    """

    heading: str = "new job"
    verb: str = "queue"
    job: int | None = None
    before: JobSpec | None = None
    source: Source | None = None
    resumes: bool = False
    fixed: bool = False
    followed: tuple[int, ...] = ()
    follows: tuple[int, ...] = ()

    @property
    def stages(self) -> str:
        """Return which jobs come first, for the title."""
        if not self.follows:
            return ""
        jobs = "jobs" if len(self.follows) > 1 else "job"
        return f" · starts after {jobs} {', '.join(map(str, self.follows))}"

    def changes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the form's changes to the job, by key.

        Raises:
            SpecError: Something is wrong with the values.
        """
        before = self.before.to_dict() if self.before is not None else {}
        after = draft.spec_of(values).to_dict()
        return {key: value for key, value in after.items() if value != before.get(key)}

    def keeps_memory(self, values: Mapping[str, Any]) -> bool:
        """Return whether the job has trained, and these values cannot change its memory."""
        return self.fixed and not any(key_facts(name).memory for name in self.changes(values))

    def is_fixed(self, name: str) -> bool:
        """Return whether the checkpoint fixes a key's value."""
        return self.fixed and key_facts(name).resume == "impossible"

    def note(self, name: str) -> str:
        """Describe a changed field's old value, and the effect of the change."""
        was = draft.as_text(name, getattr(self.before, name)) or "blank"
        return f"was {was}; {_MEANS[key_facts(name).resume] if self.fixed else _MEANS['same']}"

    def meaning(self, store: Store, values: Mapping[str, Any]) -> str:
        """Describe a resume with these values; reads the disk.

        Raises:
            UserError: It is impossible.
        """
        changes = self.changes(values)
        if self.job is None or not changes:
            return ""
        lines = plan_lines(plan_resume(store, self.job, changes))
        return "\n".join(lines) or "The result stays that of an uninterrupted run."

    def copy_name(self, store: Store, values: Mapping[str, Any]) -> str:
        """Return a free name for a copy, when the job itself can no longer be edited."""
        return edit.free_name(str(values.get("name", "job")), [job.name for job in store.all()])

    def carry_out(
        self, store: Store, spec: JobSpec, absent: Sequence[HubName] = ()
    ) -> tuple[int, list[str]]:
        """Queue or change the job; a queued job waits for missing downloads.

        Returns:
            Its number, and messages for the user, one per line.

        Raises:
            UserError: It failed; nothing has changed.
        """
        if self.job is None or self.before is None:
            plan = plan_submit(store, spec, absent, self.follows)
            return service.carry_out(store, plan).id, plan_lines(plan)
        if self.resumes:
            plan = plan_resume(store, self.job, self.changes(spec.to_dict()))
            return service.carry_out(store, plan).id, plan_lines(plan)
        follows = self.follows if self.follows != self.followed else None
        job, plan = edit.change(store, self.job, spec, self.before, absent, follows)
        return job.id, plan_lines(plan)

    def queue_sweep(
        self,
        store: Store,
        values: Mapping[str, Any],
        swept: Mapping[str, Sequence[Any]],
        absent: Sequence[HubName] = (),
    ) -> tuple[int, str, list[str]]:
        """Queue a job for each combination of values: all of them, or none.

        Returns:
            The first job's number, what was done, and messages for the user, one per line.

        Raises:
            UserError: One of them is invalid.
        """
        check_count(swept, "`fsdp-tui submit --sweep … --yes` queues them all")
        sweep = expand(store, values, swept, read=draft.spec_of)
        plans = plan_all(store, sweep, lambda spec: absent, self.follows)
        jobs = queue_all(store, plans, sweep.pairs)
        lines = [*advice(sweep), *(line for plan in plans for line in plan_lines(plan))]
        return (
            jobs[0].id,
            f"sweep {sweep.name}: {len(jobs)} jobs queued",
            list(dict.fromkeys(lines)),
        )

    @property
    def done(self) -> str:
        """Return the message that follows the job's number."""
        return "queued" if self.job is None else "resumes" if self.resumes else "changed"


# -- stages ---------------------------------------------------------------------------------
# Jobs that must complete before the form's job starts.


_LISTED: Final = 6  # jobs that are offered


def job_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers of jobs, as in `3, 4`, dropping duplicates.

    Raises:
        UserError: Something else is in the text.
    """
    parts = [part.removeprefix("#") for part in text.replace(",", " ").split()]
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise UserError(f'"{part}" is not a job id')
    return tuple(dict.fromkeys(map(int, parts)))


def stages_text(numbers: Sequence[int], jobs: Mapping[int, Job], own: int | None) -> str:
    """Describe the chosen jobs, and list those that have not ended.

    Args:
        numbers: The chosen jobs.
        jobs: All jobs, by number.
        own: The form's job, if it is queued already.
    """

    def line(number: int) -> str:
        job = jobs.get(number)
        return f"  {number:>3}  {job.name}, {job.state}" if job else f"  {number:>3}  removed"

    lines = ["after:", *map(line, numbers)] if numbers else ["waits for no job"]
    lines += stage_notes([jobs[number] for number in numbers if number in jobs])
    others = [
        number
        for number, job in sorted(jobs.items())
        if not job.state.ended and number not in numbers and number != own
    ]
    if others:
        lines += ["not ended yet:", *map(line, others[:_LISTED])]
    if more := len(others) - _LISTED:
        lines += [f"  and {more} more"] if more > 0 else []
    return "\n".join(lines)


# -- earlier --------------------------------------------------------------------------------
# Reuse the newest job's model, data and ranks in a blank form, and undo that.


class Earlier:
    """One key takes the values, the same key restores the form.

    Args:
        form: The form.
        source: The newest job, if there is one.
    """

    def __init__(self, form: NewJobScreen, source: Source | None) -> None:
        self._form = form
        self._source = source
        self._before: dict[str, Any] | None = None  # the form's values before they were replaced

    @property
    def offer(self) -> str:
        """Return what the key does, for the title."""
        if self._source is None:
            return ""
        which = f"#{self._source.job} “{self._source.name}”"
        if self._before is not None:
            return f" · from {which} · F4 undoes that"
        return f" · F4 takes model and data from {which}"

    def turn(self) -> None:
        """Take the values, or restore the form; what was typed since stays."""
        if self._source is None:
            return
        fields, taken = self._form.fields, dict(self._source.values)
        untouched = draft.same(fields.values, self._form.opened)
        now = draft.non_default(fields.values)
        if self._before is None:
            self._before, values = now, now | taken
        else:
            values = draft.give_back(now, taken, self._before)
            self._before = None
        self._form.fill(values)
        if untouched:
            self._form.opened = fields.values
        self._form.show_heading()
