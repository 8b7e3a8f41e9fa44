"""What the form's values come to and what is wrong with them, checked a moment after a change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from textual.widgets import Static

from jobs.backends.slurm.partitions import unknown_partition
from tui.form.beside.fit import FitBars
from tui.form.beside.lines import reveal, show
from tui.form.fields import draft
from tui.form.fields.pages import PAGES, first_of, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.timer import Timer

    from tui.form.screen import NewJobScreen

_AFTER: Final = 0.25  # seconds of no typing after which the values are checked
_AT_ONCE: Final = ("gpus", "strategy", "model_type")  # nobody types these letter by letter


class Checks:
    """Reads what the fields say, and shows beside each what is wrong with it.

    Args:
        form: Whose fields they are.

    Attributes:
        reasons: Why fields do not apply, by key.
    """

    def __init__(self, form: NewJobScreen) -> None:
        self._form = form
        self._due: Timer | None = None
        self.reasons: dict[str, str] = {}
        self._tried = False  # an empty form is no mistake before someone submits it
        self._refused = ""  # why the job could not be queued

    def soon(self, changed: str) -> None:
        """Schedule a check after a field has changed and the user has stopped typing."""
        if self._due is not None:
            self._due.stop()
        self._due = self._form.set_timer(0.01 if changed in _AT_ONCE else _AFTER, self.now)

    def now(self) -> None:
        """Show what the values come to, and what is wrong beside each field."""
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
        for name, row in form.fields.rows.items():
            row.turn_off(self.reasons.get(name, ""))
            problem = problems.get(name)
            row.complain(problem.text if problem else form.looks.bad_paths.get(name, ""))
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
        reveal(form.query_one("#carried", Static), carried)

    async def complete(self) -> dict[str, Any] | None:
        """Return the values, if they describe a job.

        Otherwise the first wrong field gets the focus.
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
        """Show the resolved strategy, and how many ranks the chosen GPUs make."""
        rows = self._form.fields.rows
        rows["strategy"].note(self.strategy_note(values)[0])
        gpus = values.get("gpus")
        count = gpus if isinstance(gpus, int) else len(gpus or [])
        rows["num_processes"].turn_off(f"{count}, one per GPU" if count else "")

    def strategy_note(self, values: Mapping[str, Any]) -> tuple[str, str]:
        """Return the resolved strategy: as a few characters, and as a sentence."""
        return draft.strategy_note(values, self._form.query_one(FitBars).strategy_of(values))

    def _show_tabs(self, problems: Mapping[str, object]) -> None:
        wrong = {page_of(key) for key in problems if key}
        parts = []
        for n, page in enumerate(PAGES):
            here, bad = n == self._form.fields.page, n in wrong
            style = "b $primary reverse" if here else "b $error" if bad else "$foreground 75%"
            text = f" {n + 1} {page.name}{'!' if bad else ' '}"
            parts.append(f"[@click=screen.show_page({n})][{style}]{text}[/][/]")
        show(self._form.query_one("#form-tabs", Static), "".join(parts))
