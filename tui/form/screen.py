"""The form that describes a job and queues it. Whatever goes wrong, what was typed stays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import on
from textual.containers import Container
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, Static

from jobs.errors import StateError, UserError
from tui.form import files, subscreens
from tui.form.all_pages import Fields
from tui.form.beside.fit import FitBars
from tui.form.beside.lines import Links, reveal, show
from tui.form.beside.preview import KINDS, Preview
from tui.form.earlier import Earlier
from tui.form.fields import draft, field_texts
from tui.form.fields.field_row import FieldRow
from tui.form.fields.gpu_picker import GpuPicker, users_of
from tui.form.fields.pages import BLOCKS, PAGES, first_of, page_of
from tui.form.gate import Gate
from tui.form.keys import BINDINGS, last_line
from tui.form.lookups import Looks
from tui.form.purpose import Purpose
from tui.form.search import fields_palette, templates_palette
from tui.terminal import clipboard
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.events import DescendantFocus
    from textual.timer import Timer

    from jobs.queue.store import Store
    from jobs.spec.file.templates import Template
    from tui.app.app import FsdpTui
    from tui.look.snapshot import Snapshot
    from tui.text.block_text import Model

_CHECK_AFTER: Final = 0.25  # seconds of no typing after which the values are checked
_WIDE: Final = 110  # columns from which the preview has room beside the first page
_WIDEST: Final = 170  # and beside the others, whose help takes more
_CHOSEN_AT_ONCE: Final = ("gpus", "strategy", "model_type")  # nobody types these letter by letter


class NewJobScreen(Screen[int | None]):
    """Returns the id of the job that was queued or changed, or None.

    Args:
        store: The jobs.
        values: What the form begins with, by key.
        snapshot: The machine as it is.
        purpose: What it is for.
    """

    CSS_PATH = "form.tcss"
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide"), (_WIDEST, "-widest")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar = BINDINGS

    app: FsdpTui

    @dataclass
    class Submitted(Message):
        """A thread submitted the job, or could not."""

        job: int | None
        problem: str = ""
        free_name: str = ""  # for a copy, where the job can be changed no more

    def __init__(
        self, store: Store, values: Mapping[str, Any], snapshot: Snapshot, purpose: Purpose
    ) -> None:
        super().__init__()
        self.store = store
        self.snapshot = snapshot
        self._users = users_of(snapshot)
        self.purpose = purpose
        self.fields = Fields(values, snapshot)
        self.preview = Preview()
        self.looks = Looks(self, on_gpus=bool(snapshot.gpus))
        self.gate = Gate(self)
        self.earlier = Earlier(self, purpose.source)
        self._due: Timer | None = None
        self.opened: dict[str, Any] = {}  # what it said when it was opened
        self._reasons: dict[str, str] = {}  # why fields do not apply
        self._busy = False
        self._reading = False  # whether the preview is asked for where it has no room
        self._refused = ""
        self._tried = False  # an empty form is no mistake before someone submits it
        self.chosen_of: Model | None = None  # the model whose blocks were chosen

    @property
    def heading(self) -> str:
        """The title: what the form is for, and what can be taken from an earlier job."""
        return f"{self.purpose.heading}{self.earlier.offer}"

    # -- layout ----------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        set_size_classes(self)
        self._arrange()
        yield Static(self.heading, id="form-title", markup=False)
        yield Links("", id="form-tabs")
        with Container(id="form-body"):
            yield self.fields
            yield self.preview
        yield Static("", id="carried", markup=False)
        yield Static("", id="field-help", markup=False)
        yield Static("", id="form-error", markup=False)
        yield Links("", id="form-keys")

    def on_mount(self) -> None:
        self.fields.begin()
        self.opened = self.fields.said
        self.query_one("#field-name").focus()
        self._check()
        self.app.snapshots.subscribe(self, self._looked)

    def _looked(self, snapshot: Snapshot) -> None:
        """The machine as it is now. Nothing is redrawn while the GPUs have the same users."""
        users = users_of(snapshot)
        if users == self._users:
            return
        self._users, self.snapshot = users, snapshot
        if (row := self.fields.row("gpus")) and isinstance(row.control, GpuPicker):
            row.control.used_by(users)
        self.query_one(FitBars).look_again(snapshot)

    async def action_show_page(self, number: int) -> None:
        """Turn to a page, and to its first field."""
        await self._turn_to(number)
        self.fields.focus_first()

    async def action_turn(self, by: int) -> None:
        await self.action_show_page((self.fields.page + by) % len(PAGES))

    async def go_to(self, name: str) -> None:
        """Turn to a field; what does not apply is shown with the reason."""
        await self._turn_to(page_of(name))
        if row := self.fields.row(name):
            row.scroll_visible(animate=False)
            row.control.focus()
        if reason := self._reasons.get(name):
            self.tell(f"{field_texts.help_text(name)} Now: {reason}.")

    async def _turn_to(self, number: int) -> None:
        await self.fields.turn_to(number, self._reasons)
        self._arrange()
        self._check()

    def _show_tabs(self, problems: Mapping[str, str]) -> None:
        wrong = {page_of(key) for key in problems if key}
        parts = []
        for n, page in enumerate(PAGES):
            here, bad = n == self.fields.page, n in wrong
            style = "b $primary reverse" if here else "b $error" if bad else "$foreground 75%"
            text = f" {n + 1} {page.name}{'!' if bad else ' '}"
            parts.append(f"[@click=screen.show_page({n})][{style}]{text}[/][/]")
        show(self.query_one("#form-tabs", Static), "".join(parts))

    # -- values ----------------------------------------------------------------------------

    @property
    def values(self) -> dict[str, Any]:
        """The job that the form describes: what is said, without what would be refused unasked."""
        return draft.in_force(self.fields.said)[0]

    def fill(self, values: Mapping[str, Any]) -> None:
        """Show other values; nothing of them follows the family or the ranks."""
        self.fields.fill(values)
        self._check()

    def begin_with(self, template: Template) -> None:
        """Show a template's values, on the person's model, data and ranks unless it has its own."""
        self.fill(draft.begin_with(template.values, self.fields.said))
        self.notify(f"loaded {template.title}", markup=False)

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        row = next((node for node in event.widget.ancestors if isinstance(node, FieldRow)), None)
        text = field_texts.help_text(row.field) if row else ""
        if row is not None and row.field == "strategy":
            text = f"{text} {self._strategy_note(self.values)[1]}".rstrip()
        self.tell(text)

    @on(FieldRow.Changed)
    def _changed(self, message: FieldRow.Changed) -> None:
        if message.name in ("model_family", "model_flavour"):
            self.fields.adopt(message.name)
        if self._due is not None:
            self._due.stop()
        after = 0.01 if message.name in _CHOSEN_AT_ONCE else _CHECK_AFTER
        self._due = self.set_timer(after, self._check)

    # -- checking --------------------------------------------------------------------------

    def _check(self) -> None:
        """Show what the values come to, and what is wrong beside each field."""
        followed, cascade = self.fields.follow(), self.query_one("#cascade", Static)
        reveal(cascade, followed)
        values, self._reasons = draft.in_force(self.fields.said)
        self.looks.at_paths(values)
        self.preview.tell("yaml", draft.as_yaml(values))
        if self.preview.kind == "command":
            self.looks.at_launch(values)
        problems = draft.find_problems(values)
        if not self._tried:
            problems = {k: text for k, text in problems.items() if values.get(k, "") != ""}
        for name, row in self.fields.rows.items():
            row.turn_off(self._reasons.get(name, ""))
            row.complain(problems.get(name) or self.looks.bad_paths.get(name, ""))
        self._show_ranks(values)
        self.query_one(FitBars).look_at(values, self.snapshot)
        self._show_tabs({**problems, **self.looks.bad_paths})
        hidden = draft.problems_beside(problems, PAGES[self.fields.page].fields)
        told = "; ".join(filter(None, [*hidden, self._refused]))
        self.complain(told or "; ".join(draft.warnings(values)), warning=not told)
        self._show_carried(values)

    def _show_ranks(self, values: Mapping[str, Any]) -> None:
        """What the strategy comes to, and how many ranks chosen GPUs make."""
        self.fields.rows["strategy"].note(self._strategy_note(values)[0])
        gpus = values.get("gpus")
        count = gpus if isinstance(gpus, int) else len(gpus or [])
        self.fields.rows["num_processes"].turn_off(f"{count}, one per GPU" if count else "")

    def _strategy_note(self, values: Mapping[str, Any]) -> tuple[str, str]:
        return draft.strategy_note(values, self.query_one(FitBars).strategy_of(values))

    @on(FitBars.Found)
    def _predicted(self) -> None:
        self._show_ranks(self.values)
        self.gate.look_again()

    @on(Looks.Checked)
    def _path_checked(self, message: Looks.Checked) -> None:
        self.looks.take(message)
        found = f"✓ {message.text}" if message.good and message.text else ""
        self.fields.rows[message.field].note(found)
        self._check()
        self.gate.look_again()

    @on(Looks.Absent)
    def _hub_answered(self, message: Looks.Absent) -> None:
        self.gate.ask_to_fetch(message)

    @on(Looks.Launch)
    def _launch_made(self, message: Looks.Launch) -> None:
        self.preview.tell("command", message.command, message.script)

    # -- doing -----------------------------------------------------------------------------

    async def action_submit(self) -> None:
        if self._busy or (values := await self._complete()) is None:
            return
        if not self.gate.opens(values):
            return
        self._busy = True
        self.complain("")
        self.tell("checking …")
        work = partial(self._submit, self.purpose, values)
        self.run_worker(work, group="submit", exit_on_error=False, thread=True)

    async def _complete(self) -> dict[str, Any] | None:
        """The values, if they describe a job; else the first that is wrong gets the focus."""
        self._tried, self._refused = True, ""
        self._check()
        values = self.values
        problems = draft.find_problems(values)
        if not problems:
            return values
        if key := first_of({**problems, **self.looks.bad_paths}):
            await self.go_to(key)
        return None

    def _submit(self, purpose: Purpose, values: dict[str, Any]) -> None:
        """In a thread."""
        app = self.app  # a form that was left has none
        try:
            absent = self.gate.fetched_for(values)
            job, told = purpose.carry_out(self.store, draft.spec_of(values), absent)
            if not self.post_message(self.Submitted(job)):  # left meanwhile, which stops nothing
                app.post_message(app.Said(f"job {job} {purpose.done}"))
            if told:
                app.post_message(app.Said("\n".join(told), "warning"))
        except UserError as error:
            late = isinstance(error, StateError) and purpose.job is not None
            name = purpose.copy_name(self.store, values) if late else ""
            self.post_message(self.Submitted(None, str(error), name))
        except Exception as error:  # the edge: what was typed must not go with a crash
            self.post_message(self.Submitted(None, f"{type(error).__name__}: {error}"))

    def on_new_job_screen_submitted(self, message: Submitted) -> None:
        self._busy = False
        if message.job is not None:
            self.dismiss(message.job)
            return
        self.tell("")
        self._refused = message.problem
        if message.free_name:
            self._become_copy(message.free_name)
        self.complain(self._refused)

    def _become_copy(self, name: str) -> None:
        """The job can be changed no more: what was typed can still become another."""
        self.purpose = Purpose(heading=f"copy of job {self.purpose.job}")
        self.fields.put({"name": name})
        self.query_one("#form-title", Static).update(self.heading)
        self._show_keys()
        self._refused += "; ^r now queues your settings as a new job"

    def action_take_over(self) -> None:
        self.earlier.turn()

    async def action_data(self) -> None:
        if (values := await self._complete()) is not None:
            subscreens.show_data(self, values)

    @on(Input.Submitted, f"#field-{BLOCKS}")
    def action_blocks(self) -> None:
        subscreens.choose_blocks(self)

    def action_find(self) -> None:
        self.app.push_screen(fields_palette())

    def action_templates(self) -> None:
        self.app.push_screen(templates_palette())

    def action_load(self) -> None:
        files.load(self)

    def action_save(self) -> None:
        files.save(self)

    def save_as_template(self) -> None:
        files.save_as_template(self)

    def action_preview(self, kind: str = "") -> None:
        """The next of the texts; where they have no room beside the fields, in their place."""
        if kind or not self.preview.display:
            self._reading = True
            self.preview.turn_to(kind or KINDS[0])
        elif self.preview.kind == KINDS[-1]:
            self._reading = False
            self.preview.turn_to(KINDS[0])
        else:
            self.preview.turn_to(KINDS[-1])
        self._arrange()
        self._check()

    def action_copy(self) -> None:
        self.notify(clipboard.copy(self.app, self.preview.texts[self.preview.kind]), markup=False)

    def action_leave(self) -> None:
        if draft.same(self.fields.said, self.opened):
            self.dismiss(None)
        else:
            subscreens.ask_to_leave(self, busy=self._busy)

    # -- inside ----------------------------------------------------------------------------

    def on_resize(self) -> None:
        self._show_keys()
        self._arrange()

    def _arrange(self) -> None:
        """Fields and preview beside each other, or one of them. Classes would restyle them all."""
        width = self.app.size.width
        beside = width >= (_WIDE if self.fields.page == 0 else _WIDEST)
        self.preview.display = beside or self._reading
        self.fields.display = beside or not self._reading
        self.preview.set_class(not beside, "-alone")

    def _show_keys(self) -> None:
        width = self.size.width
        keys = last_line(self.purpose.verb, width - 2, narrow=width < _WIDE)
        self.query_one("#form-keys", Static).update(keys)

    def tell(self, text: str) -> None:
        """Say something below the fields."""
        show(self.query_one("#field-help", Static), text)

    def complain(self, problem: str, *, warning: bool = False) -> None:
        """Show what is wrong, or worth knowing, and belongs to no field in sight."""
        error = self.query_one("#form-error", Static)
        error.set_class(warning, "-warning")
        reveal(error, f"! {problem}" if problem else "")

    def _show_carried(self, values: Mapping[str, Any]) -> None:
        """On the first page: what the others say."""
        text = draft.carried_line(values) if self.fields.page == 0 else ""
        reveal(self.query_one("#carried", Static), text)
