"""The form that describes a job and queues it. Whatever goes wrong, what was typed stays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on
from textual.binding import Binding
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from jobs import service
from jobs.errors import UserError
from jobs.look import NOT_NEEDED
from jobs.resume_plan import plan_submit
from jobs.specfile import load_spec
from jobs.spellings import as_list
from tui.checkpoints.words import plan_lines
from tui.modals.ask_path import AskPathScreen
from tui.newjob import draft
from tui.newjob.field_row import FieldRow

if TYPE_CHECKING:
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.events import DescendantFocus
    from textual.timer import Timer

    from jobs.store import Store
    from tui.app import FsdpTui
    from tui.detect.words import Model
    from tui.snapshot import Snapshot

_CHECK_AFTER = 0.25  # seconds of no typing after which the values are checked


class NewJobScreen(ModalScreen[int | None]):
    """Returns the id of the job that was queued, or None."""

    CSS_PATH = "newjob.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-two-columns")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar = [
        Binding("ctrl+r", "submit", "queue it"),
        Binding("ctrl+l", "data", "look at the data"),
        Binding("ctrl+b,f2", "blocks", "blocks to wrap"),  # tmux may keep ^b for itself
        Binding("ctrl+o", "load", "load YAML"),
        Binding("ctrl+s", "save", "save YAML"),
        Binding("escape", "leave", "cancel"),
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    app: FsdpTui

    @dataclass
    class Checked(Message):
        """A thread looked at a path."""

        field: str
        good: bool
        text: str

    @dataclass
    class Submitted(Message):
        """A thread submitted the job, or could not."""

        job: int | None
        problem: str = ""

    def __init__(self, store: Store, template: Path | None, snapshot: Snapshot) -> None:
        super().__init__()
        self.store = store
        self.snapshot = snapshot
        self.base: dict[str, Any] = draft.starting_values(template)
        self._due: Timer | None = None
        self._bad_paths: dict[str, str] = {}
        self._checked: dict[str, tuple[Any, Any]] = {}
        self._busy = False
        self._refused = ""
        self._tried = False  # an empty form is no mistake before someone submits it
        self._chosen_of: Model | None = None  # the model whose blocks were chosen

    # -- layout ----------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        with Vertical(id="form") as form:
            form.border_title = "new job"
            form.border_subtitle = (
                "^r queues it · ^l data · ^b blocks · ^o loads · ^s saves · esc leaves"
            )
            with VerticalScroll(id="fields", can_focus=False), Container(id="groups"):
                for heading, names in draft.ESSENTIAL.items():
                    with Vertical(classes="group", id=f"group-{names[0]}") as group:
                        group.border_title = heading
                        for name in names:
                            if name != "gpus" or self.snapshot.gpus:
                                yield FieldRow(name, self.base.get(name), self.snapshot)
            with VerticalScroll(id="preview", can_focus=False) as preview:
                preview.border_title = "job file: what differs from the defaults"
                yield Static("", id="yaml", markup=False)
            yield Static("", id="carried", markup=False)
            yield Static("", id="field-help", markup=False)
            yield Static("", id="form-error", markup=False)
            with Horizontal(id="buttons"):
                yield Button("Queue it  ^r", id="submit", variant="primary", compact=True)
                yield Button("Data  ^l", id="data", compact=True)
                yield Button("Blocks  ^b", id="blocks", compact=True)
                yield Button("Load  ^o", id="load", compact=True)
                yield Button("Save  ^s", id="save", compact=True)
                yield Button("Cancel  esc", id="leave", compact=True)

    def on_mount(self) -> None:
        self._offer_flavours(self.base.get("model_flavour"))
        self._defaults = draft.defaults_of(*self._model())
        self._show_carried()
        self.query_one("#field-name").focus()
        self._check()

    # -- values ----------------------------------------------------------------------------

    @property
    def values(self) -> dict[str, Any]:
        """What the form says, over what it carries along."""
        shown = {row.field: row.value for row in self.query(FieldRow)}
        return draft.merge(self.base, shown)

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        row = next((node for node in event.widget.ancestors if isinstance(node, FieldRow)), None)
        text = draft.help_text(row.field) if row else ""
        if row is not None and row.field == "strategy":
            text = f"{text} {draft.strategy_note(self.values)[1]}".rstrip()
        self.query_one("#field-help", Static).update(text)

    def _model(self) -> tuple[Any, Any]:
        """The family and flavour that the form says."""
        values = self.values
        return values.get("model_family"), values.get("model_flavour")

    def _offer_flavours(self, chosen: str | None) -> None:
        if self._has_row("model_flavour"):
            row = self.query_one("#row-model_flavour", FieldRow)
            row.offer(draft.flavours_of(self._model()[0]), chosen)

    def _adopt(self, field: str) -> None:
        """Another model was chosen: what was left at its default follows."""
        if field == "model_family":
            self._offer_flavours(self._model()[1])
        after = draft.defaults_of(*self._model())
        changes = draft.adopt(self.values, self._defaults, after)
        self._defaults = after
        self.base |= changes
        for key, value in changes.items():
            if self._has_row(key):
                self.query_one(f"#row-{key}", FieldRow).put(value)
        self._show_carried()

    @on(FieldRow.Changed)
    def _changed(self, message: FieldRow.Changed) -> None:
        if message.name in ("model_family", "model_flavour"):
            self._adopt(message.name)
        if self._due is not None:
            self._due.stop()
        self._due = self.set_timer(_CHECK_AFTER, self._check)

    def _check(self) -> None:
        """Show what is wrong beside each field; look at the paths in a thread."""
        values = self.values
        self._look_at_paths(values)
        self.query_one("#yaml", Static).update(draft.as_yaml(values) or "nothing yet")
        problems = draft.find_problems(values)
        if not self._tried:
            problems = {k: text for k, text in problems.items() if values.get(k, "") != ""}
        hidden = [text for key, text in problems.items() if not self._has_row(key)]
        for row in self.query(FieldRow):
            row.complain(problems.get(row.field) or self._bad_paths.get(row.field, ""))
        said = "; ".join(filter(None, [*hidden, self._refused]))
        self._complain(said or "; ".join(draft.warnings(values)), warning=not said)
        if self._has_row("strategy"):
            self.query_one("#row-strategy", FieldRow).note(draft.strategy_note(values)[0])
        gpus = values.get("gpus")
        if self._has_row("num_processes"):
            ranks = self.query_one("#row-num_processes", FieldRow)
            ranks.control.disabled = isinstance(gpus, list)
            ranks.note(f"{len(gpus)}, one per GPU" if isinstance(gpus, list) else "")

    def _look_at_paths(self, values: dict[str, Any]) -> None:
        for name in draft.PATHS:
            key = (values.get(name), values.get("model_family"))
            if self._checked.get(name) != key:
                self._checked[name] = key
                self._bad_paths.pop(name, None)
                self.run_worker(
                    partial(self._look_at_path, name, values), group=f"path-{name}",
                    exclusive=True, exit_on_error=False, thread=True,
                )  # fmt: skip

    def _look_at_path(self, name: str, values: dict[str, Any]) -> None:
        good, text = draft.check_path(name, values)
        if self._checked.get(name) == (values.get(name), values.get("model_family")):
            self.post_message(self.Checked(name, good, text))

    def on_new_job_screen_checked(self, message: Checked) -> None:
        row = self.query_one(f"#row-{message.field}", FieldRow)
        if not message.good:
            self._bad_paths[message.field] = message.text
        row.complain("" if message.good else message.text)
        row.note(f"✓ {message.text}" if message.good and message.text else "")

    # -- doing -----------------------------------------------------------------------------

    def on_button_pressed(self, event: Button.Pressed) -> None:
        getattr(self, f"action_{event.button.id}")()

    def action_submit(self) -> None:
        if self._busy or (values := self._complete()) is None:
            return
        self._busy = True
        self._complain("")
        self.query_one("#submit", Button).label = "checking …"
        self.run_worker(
            partial(self._submit, values), group="submit", exit_on_error=False, thread=True
        )

    def _complete(self) -> dict[str, Any] | None:
        """The values, if they describe a job; else the first that is wrong gets the focus."""
        self._tried, self._refused = True, ""
        self._check()
        values = self.values
        problems = draft.find_problems(values)
        if not problems:
            return values
        key = next(iter(problems))
        if self._has_row(key):
            self.query_one(f"#field-{key}").focus()
        return None

    def _submit(self, values: dict[str, Any]) -> None:
        try:
            plan = plan_submit(self.store, draft.spec_of(values))
            job = service.carry_out(self.store, plan)
            self.post_message(self.Submitted(job.id))
            if lines := plan_lines(plan):
                self.app.post_message(self.app.Said("\n".join(lines), "warning"))
        except UserError as error:
            self.post_message(self.Submitted(None, str(error)))
        except Exception as error:  # the edge: what was typed must not go with a crash
            self.post_message(self.Submitted(None, f"{type(error).__name__}: {error}"))

    def on_new_job_screen_submitted(self, message: Submitted) -> None:
        self._busy = False
        if message.job is not None:
            self.dismiss(message.job)
            return
        self.query_one("#submit", Button).label = "Queue it  ^r"
        self._refused = message.problem
        self._complain(message.problem)

    def action_data(self) -> None:
        if (values := self._complete()) is not None:
            from tui.data.screen import DataScreen

            heading = f"data of the new job “{values.get('name', '')}”"
            read = partial(draft.spec_of, values, ignoring=NOT_NEEDED)
            self.app.push_screen(DataScreen(heading, read))

    @on(Input.Submitted, f"#field-{draft.BLOCKS}")
    def action_blocks(self) -> None:
        """Choose which classes of the model become FSDP units."""
        from tui.detect.screen import DetectScreen

        values = self.values
        row = self.query_one(f"#row-{draft.BLOCKS}", FieldRow)
        model = draft.model_of(values)
        # A blank field is a choice as well, once it was made.
        names = as_list(row.value) or ([] if model == self._chosen_of else None)

        def chosen(names: list[str] | None) -> None:
            if names is not None:
                self._chosen_of = model
                row.put(names or None)
                row.control.focus()

        self.app.push_screen(DetectScreen(model, names, draft.ranks_of(values)), chosen)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_load(self) -> None:
        def chosen(path: Path | None) -> None:
            if path is None:
                return
            notes: list[str] = []
            try:
                self.base = load_spec(path, told=notes.append).to_dict()
            except UserError as error:
                self._complain(str(error))
                return
            for note in notes:
                self.notify(note, severity="warning", markup=False)
            for row in self.query(FieldRow):
                if row.field != "model_flavour":
                    row.put(self.base.get(row.field))
            self._offer_flavours(self.base.get("model_flavour"))
            # What the file says is said: nothing of it follows the family.
            self._defaults = draft.defaults_of(*self._model())
            self._show_carried()
            self._check()

        self.app.push_screen(AskPathScreen("load a job file", "job.yaml"), chosen)

    def action_save(self) -> None:
        def chosen(path: Path | None) -> None:
            if path is None:
                return
            try:
                saved = draft.save_yaml(self.values, path)
            except UserError as error:
                self._complain(str(error))
            else:
                self.notify(f"saved as {saved}", markup=False)

        name = self.values.get("name") or "job"
        self.app.push_screen(AskPathScreen("save as a job file", f"{name}.yaml"), chosen)

    # -- inside ----------------------------------------------------------------------------

    def _has_row(self, name: str) -> bool:
        return bool(name) and bool(self.query(f"#row-{name}"))

    def _complain(self, problem: str, *, warning: bool = False) -> None:
        error = self.query_one("#form-error", Static)
        error.set_class(warning, "-warning")
        error.update(f"! {problem}" if problem else "")
        error.set_class(bool(problem), "-shown")

    def _show_carried(self) -> None:
        family, flavour = self._model()
        carried = draft.carried(self.base | {"model_family": family, "model_flavour": flavour})
        text = "also set: " + ", ".join(f"{k}={draft.as_text(k, v)}" for k, v in carried.items())
        self.query_one("#carried", Static).update(text if carried else "")
        self.query_one("#carried", Static).set_class(bool(carried), "-shown")
