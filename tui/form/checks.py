"""Check the form's values shortly after each change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from textual.message import Message
from textual.widgets import Static
from textual.worker import get_current_worker

from jobs.backends.slurm.commands import ask_partitions, unknown_partition
from jobs.errors import SpecError, UserError
from jobs.hub.wanted import ask_sizes, find_missing
from jobs.machine.engine_tools import Cancelled
from jobs.service.replay import command_of, launch_facts, script_of
from tui.form import draft
from tui.form.beside import FitBars
from tui.form.fields import FieldRow
from tui.form.pages import PAGES, PATHS, first_of, page_of
from tui.widgets.bars import reveal, show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.screen import Screen
    from textual.timer import Timer

    from jobs.backends.slurm.commands import Partition
    from jobs.errors import Problem
    from jobs.queue.store import Store
    from jobs.spec.values.hub_names import HubName
    from tui.form.purpose import Purpose
    from tui.form.screen import NewJobScreen


_AFTER: Final = 0.25  # seconds without typing after which the values are checked
_AT_ONCE: Final = ("gpus", "strategy", "model_type")  # these are not typed letter by letter


class Checks:
    """Reads the fields, and shows beside each what is wrong with it.

    Args:
        form: The form.

    Attributes:
        reasons: Why fields do not apply, by key.
    """

    def __init__(self, form: NewJobScreen) -> None:
        self._form = form
        self._due: Timer | None = None
        self.reasons: dict[str, str] = {}
        self.revealed: set[str] = set()  # fields that the user went to, whether they apply or not
        self._tried = False  # an empty form has no errors before it is submitted
        self._noted: set[str] = set()  # of a resume: what is changed
        self._refused = ""  # why the job could not be queued

    def soon(self, changed: str) -> None:
        """Schedule a check for when the user stops typing."""
        if self._due is not None:
            self._due.stop()
        self._due = self._form.set_timer(0.01 if changed in _AT_ONCE else _AFTER, self.now)

    def now(self) -> None:
        """Show the values' result, and the errors beside their fields."""
        form = self._form
        reveal(form.query_one("#cascade", Static), form.fields.follow())
        values, self.reasons = draft.in_force(form.fields.values)
        form.looks.at_paths(values)
        form.looks.at_partitions(values)
        form.preview.tell("yaml", draft.as_yaml(values))
        if form.preview.kind == "command":
            form.looks.at_launch(values)
        problems = draft.find_problems(values)
        if not self._tried:
            problems = {k: each for k, each in problems.items() if values.get(k, "") != ""}
        if form.purpose.resumes:
            self._show_changes(values)
        self._hide_unsuited(problems)
        for name, row in form.fields.rows.items():
            row.turn_off(self.reasons.get(name, ""))
            problem = problems.get(name) or self._problem_in_list(row, values)
            row.complain(problem.text if problem else form.looks.bad_paths.get(name, ""))
        form.show_keys()
        form.fields.offer_partitions(form.looks.partitions)
        self.show_ranks(values)
        form.query_one(FitBars).look_at(values, form.snapshot, form.looks.partitions)
        self._show_tabs({**problems, **form.looks.bad_paths})
        hidden = draft.problems_beside(problems, PAGES[form.fields.page].fields)
        complaint = "; ".join(filter(None, [*hidden, self._refused]))
        unknown = unknown_partition(values.get("slurm_partition"), form.looks.partitions)
        warnings = filter(None, [unknown, *draft.warnings(values)])
        form.complain(complaint or "; ".join(warnings), warning=not complaint)
        carried = draft.carried_line(values) if form.fields.page == 0 else ""
        if not form.purpose.resumes:
            reveal(form.query_one("#carried", Static), carried)

    def _hide_unsuited(self, problems: Mapping[str, Problem]) -> None:
        """Hide fields that do nothing with this model, unless they are set, wrong or revealed."""
        form = self._form
        unsuited = draft.find_unsuited(form.fields.values) - {*problems} - self.revealed
        groups = {row.parent for row in form.fields.rows.values()}
        for name, row in form.fields.rows.items():
            fixed = form.purpose.resumes and form.purpose.is_fixed(name)
            row.display = not fixed and name not in unsuited
        for group in filter(None, groups):
            group.display = any(row.display for row in group.query(FieldRow))

    def _show_changes(self, values: Mapping[str, Any]) -> None:
        """Note beside the fields what their change means for a resume."""
        form, purpose = self._form, self._form.purpose
        try:
            changes = purpose.changes(values)
        except SpecError:  # shown beside the field
            return
        for name, row in form.fields.rows.items():
            if name in changes or name in self._noted:
                row.note(purpose.note(name) if name in changes else "")
        self._noted = {*changes}
        form.looks.at_resume(purpose, form.store, values)

    def show_meaning(self, text: str, problem: str) -> None:
        """Show the effect of the resume."""
        reveal(self._form.query_one("#carried", Static), text)
        if problem:
            self._form.complain(problem)

    async def complete(self) -> dict[str, Any] | None:
        """Return the values if they describe a job.

        Otherwise, focus the first invalid field.
        """
        form = self._form
        self._tried, self._refused = True, ""
        self.now()
        values = form.values
        problems = draft.find_problems(values)
        if not problems:
            return values
        if key := first_of({**problems, **form.looks.bad_paths}):
            await form.go_to(key)
        return None

    def refuse(self, problem: str) -> None:
        """Show why the job was not queued, until the next attempt."""
        self._refused = problem
        self._form.complain(problem)

    def show_ranks(self, values: Mapping[str, Any]) -> None:
        """Show the resolved strategy, and the number of ranks for the chosen GPUs."""
        rows = self._form.fields.rows
        rows["strategy"].note(self.strategy_note(values)[0])
        gpus = values.get("gpus")
        count = gpus if isinstance(gpus, int) else len(gpus or [])
        rows["num_processes"].turn_off(f"{count}, one per GPU" if count else "")

    def strategy_note(self, values: Mapping[str, Any]) -> tuple[str, str]:
        """Return the resolved strategy: as a few characters, and as a sentence."""
        return draft.strategy_note(values, self._form.query_one(FitBars).strategy_of(values))

    def _problem_in_list(self, row: FieldRow, values: Mapping[str, Any]) -> Problem | None:
        """Show how many jobs a list makes; return the first error in it."""
        if not row.listed:
            return None
        count = len(row.values)
        row.note(f"{count} values, a job each" if count > 1 else "values, with commas between")
        others = (draft.find_problems({**values, row.field: value}) for value in row.values[1:])
        return next(filter(None, (problems.get(row.field) for problems in others)), None)

    def _show_tabs(self, problems: Mapping[str, object]) -> None:
        wrong = {page_of(key) for key in problems if key}
        parts = []
        for n, page in enumerate(PAGES):
            here, bad = n == self._form.fields.page, n in wrong
            style = "b $primary reverse" if here else "b $error" if bad else "$foreground 75%"
            text = f" {n + 1} {page.name}{'!' if bad else ' '}"
            parts.append(f"[@click=screen.show_page({n})][{style}]{text}[/][/]")
        show(self._form.query_one("#form-tabs", Static), "".join(parts))


# -- lookups --------------------------------------------------------------------------------
# Lookups of the form, in threads: paths, the cluster's partitions, the launch command.


class Looks:
    """Starts lookups for a screen and posts their results to it; only the newest of each counts.

    Args:
        screen: The form.
        on_gpus: Whether the machine has GPUs.
    """

    @dataclass
    class Checked(Message):
        """A thread checked a path."""

        field: str
        good: bool
        text: str
        doubt: str = ""  # what to ask before the job is queued

    @dataclass
    class Launch(Message):
        """A thread made the launch command: as displayed, and as copied."""

        command: str
        script: str

    @dataclass
    class Absent(Message):
        """A thread asked the hub about what is missing here."""

        values: dict[str, Any]
        sizes: dict[HubName, int]  # bytes to fetch
        problem: str = ""

    @dataclass
    class Resume(Message):
        """A thread planned a resume: its effect, or why it is impossible."""

        text: str
        problem: str

    @dataclass
    class Partitions(Message):
        """A thread asked Slurm."""

        partitions: tuple[Partition, ...]

    def __init__(self, screen: Screen[Any], *, on_gpus: bool) -> None:
        self._screen = screen
        self._on_gpus = on_gpus
        self._checked: dict[str, tuple[Any, ...]] = {}
        self._launched: dict[str, Any] = {}
        self._resumed: dict[str, Any] = {}
        self.bad_paths: dict[str, str] = {}  # errors by field
        self.doubts: dict[str, str] = {}  # possible errors by field
        self.under_way: set[str] = set()  # fields whose lookups are running
        # The cluster's partitions, if Slurm has reported them.
        self.partitions: tuple[Partition, ...] = ()
        self._asked_slurm = False

    def at_paths(self, values: Mapping[str, Any]) -> None:
        """Check whether the model and the datasets exist, unless that was just done."""
        for name in (*PATHS, "datasets"):
            key = _key(name, values)
            if self._checked.get(name) != key:
                self._checked[name] = key
                self.bad_paths.pop(name, None)
                self.doubts.pop(name, None)
                self.under_way.add(name)
                self._run(partial(self._look_at_path, name, dict(values)), f"path-{name}")

    def at_launch(self, values: Mapping[str, Any]) -> None:
        """Make the launch command, unless it was made for these values."""
        if values != self._launched:
            self._launched = dict(values)
            self._run(partial(self._make_launch, dict(values)), "launch")

    def at_resume(self, purpose: Purpose, store: Store, values: Mapping[str, Any]) -> None:
        """Plan a resume with these values, unless that was just done."""
        if values == self._resumed:
            return
        self._resumed = dict(values)

        def plan() -> None:
            text = problem = ""
            try:
                text = purpose.meaning(store, self._resumed)
            except UserError as error:
                problem = str(error)
            if values == self._resumed:
                self._screen.post_message(self.Resume(text, problem))

        self._run(partial(plan), "resume")

    def at_partitions(self, values: Mapping[str, Any]) -> None:
        """Ask Slurm for its partitions, once, if the job is for Slurm."""
        if values.get("launcher") == "slurm" and not self._asked_slurm:
            self._asked_slurm = True
            self._run(partial(self._ask_slurm), "partitions")

    def at_hub(self, values: Mapping[str, Any]) -> None:
        """Ask the hub for the size of what these values name."""
        self._run(partial(self._ask_hub, dict(values)), "hub")

    def take(self, checked: Checked) -> None:
        """Store a path's errors and doubts."""
        self.under_way.discard(checked.field)
        if not checked.good:
            self.bad_paths[checked.field] = checked.text
        if checked.doubt:
            self.doubts[checked.field] = checked.doubt

    def _run(self, look: partial[None], group: str) -> None:
        self._screen.run_worker(look, group=group, exclusive=True, exit_on_error=False, thread=True)

    def _look_at_path(self, name: str, values: dict[str, Any]) -> None:
        good, text = draft.check_path(name, values)
        doubt = draft.doubt_of(name, values) if good else ""
        if self._checked.get(name) == _key(name, values):
            self._screen.post_message(self.Checked(name, good, text, doubt))

    def _ask_slurm(self) -> None:
        self._screen.post_message(self.Partitions(ask_partitions()))

    def _ask_hub(self, values: dict[str, Any]) -> None:
        worker, sizes, problem = get_current_worker(), {}, ""
        try:
            missing = find_missing(draft.spec_of(values))
            sizes = ask_sizes(missing, lambda: worker.is_cancelled)
        except Cancelled:
            return
        except UserError as error:
            problem = str(error)
        self._screen.post_message(self.Absent(values, sizes, problem))

    def _make_launch(self, values: dict[str, Any]) -> None:
        try:
            spec = draft.spec_of(values)
            on_gpus = spec.device != "cpu" and (self._on_gpus or spec.gpus is not None)
            facts = launch_facts(spec, on_gpus=on_gpus)
            texts = command_of(facts), script_of(facts, f"Job “{spec.name}”")
        except UserError as error:
            texts = f"not yet: {error}", ""
        if values == self._launched:
            self._screen.post_message(self.Launch(*texts))


def _key(name: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that determine the result of a lookup."""
    return tuple(values.get(key) for key in (name, "model_family", *draft.OF_IMAGES))
