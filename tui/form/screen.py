"""The form that describes a job and queues it. Input is never lost, whatever fails."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import on
from textual.containers import Container
from textual.screen import Screen
from textual.widgets import Input, Static

from jobs.errors import NotFoundError
from jobs.queue.job import check_stages
from jobs.spec.data_tool import NOT_NEEDED
from jobs.spec.values.spellings import as_list
from tui.form import draft, files
from tui.form.beside import FitBars, Preview
from tui.form.checks import Checks, Looks
from tui.form.fields import FieldRow, GpuPicker, users_of
from tui.form.files import fields_palette, templates_palette
from tui.form.keys import BINDINGS, last_line
from tui.form.page_view import Fields
from tui.form.pages import BLOCKS, PAGES, page_of
from tui.form.purpose import Earlier, job_numbers, stages_text
from tui.form.submission import Submission
from tui.terminal import clipboard
from tui.text.block_text import Model
from tui.widgets.bars import Links, reveal, show
from tui.widgets.size_classes import set_size_classes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

    from jobs.queue.store import Store
    from jobs.spec.file.templates import Template
    from tui.app.app import FsdpTui
    from tui.form.purpose import Purpose
    from tui.look.snapshot import Snapshot


# -- subscreens -----------------------------------------------------------------------------
# What the form opens over itself: data, model blocks, the question before leaving.


def show_data(form: NewJobScreen, values: Mapping[str, Any]) -> None:
    """Show the data that a job of these values would train on."""
    from tui.form.data import DataScreen

    heading = f"data of the new job “{values.get('name', '')}”"
    read = partial(draft.spec_of, values, ignoring=NOT_NEEDED)
    form.app.push_screen(DataScreen(heading, read))


def choose_blocks(form: NewJobScreen) -> None:
    """Choose which classes of the model become FSDP units."""
    from tui.form.blocks import DetectScreen

    values = form.values
    row = form.fields.rows[BLOCKS]
    keys = ("model_family", "model_flavour", "pretrained_model_name_or_path")
    model = Model(*(str(values.get(key) or "").strip() or None for key in keys))
    # Once made, blank is a choice as well.
    names = as_list(row.value) or ([] if model == form.chosen_of else None)

    def chosen(names: list[str] | None) -> None:
        if names is not None:
            form.chosen_of = model
            row.put(names or None)
            row.control.focus()

    form.app.push_screen(DetectScreen(model, names, draft.ranks_of(values)), chosen)


def choose_stages(form: NewJobScreen) -> None:
    """Choose the jobs that must complete before this one starts."""
    from tui.widgets.questions import AskJobsScreen

    if form.purpose.resumes:
        form.notify("a job that resumes waits for no other; copy it instead", markup=False)
        return
    jobs = {view.job.id: view.job for view in form.snapshot.jobs}
    followed = form.purpose.followed  # may have been removed

    def read(text: str) -> tuple[tuple[int, ...], str]:
        numbers = job_numbers(text)
        for number in numbers:
            if number not in jobs and number not in followed:
                raise NotFoundError(f"no job {number}")
        if form.purpose.job is not None:
            check_stages(form.purpose.job, [n for n in numbers if n in jobs], jobs.__getitem__)
        return numbers, stages_text(numbers, jobs, form.purpose.job)

    def chosen(numbers: tuple[int, ...] | None) -> None:
        if numbers is not None:
            form.submission.purpose = replace(form.purpose, follows=numbers)
            form.show_heading()

    question = "Start when these jobs have completed"
    form.app.push_screen(AskJobsScreen(question, form.purpose.follows, read), chosen)


def ask_to_leave(form: NewJobScreen, *, busy: bool) -> None:
    """Close the form if the user agrees.

    Args:
        form: The form whose input would be lost.
        busy: Whether it is queueing the job.
    """
    from tui.widgets.questions import ConfirmScreen

    def answered(yes: bool | None) -> None:
        if yes:
            form.dismiss(None)

    screen = ConfirmScreen("Leave the form?", draft.leaving(busy), "leave", refuse="stay")
    form.app.push_screen(screen, answered)


# -- screen ---------------------------------------------------------------------------------


_WIDE: Final = 110  # columns from which the preview fits beside the first page
_WIDEST: Final = 170  # and beside the others, whose help is wider


class NewJobScreen(Screen[int | None]):
    """Returns the id of the job that was queued or changed, or None.

    Args:
        store: The jobs.
        values: The initial values, by key.
        snapshot: The machine's state.
        purpose: Its purpose.
    """

    CSS_PATH = "form.tcss"
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE, "-wide"), (_WIDEST, "-widest")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar = BINDINGS

    app: FsdpTui

    def __init__(
        self, store: Store, values: Mapping[str, Any], snapshot: Snapshot, purpose: Purpose
    ) -> None:
        super().__init__()
        self.store = store
        self.snapshot = snapshot
        self._users = users_of(snapshot)
        self.fields = Fields(values, snapshot)
        self.preview = Preview()
        self.looks = Looks(self, on_gpus=bool(snapshot.gpus))
        self.checks = Checks(self)
        self.submission = Submission(self, purpose)
        self.earlier = Earlier(self, purpose.source)
        self.drafts = files.Drafts(self, store.home / "drafts")
        self.opened: dict[str, Any] = {}  # its values when it was opened
        self.chosen_of: Model | None = None  # the model whose blocks were chosen

    @property
    def purpose(self) -> Purpose:
        """Return its current purpose."""
        return self.submission.purpose

    @property
    def heading(self) -> str:
        """Return the title: the form's purpose, and what can be reused from an earlier job."""
        purpose = self.purpose
        return f"{purpose.heading}{purpose.stages}{self.drafts.offer}{self.earlier.offer}"

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
        self.opened = self.fields.values
        self.query_one("#field-name").focus()
        self.checks.now()
        if self.purpose.resumes:
            self.fields.focus_first()
        self.drafts.look()
        self.app.snapshots.subscribe(self, self._looked)

    def _looked(self, snapshot: Snapshot) -> None:
        """Handle a new snapshot; nothing is redrawn while the GPUs have the same users."""
        users = users_of(snapshot)
        if users == self._users:
            return
        self._users, self.snapshot = users, snapshot
        if (row := self.fields.row("gpus")) and isinstance(row.control, GpuPicker):
            row.control.used_by(users, snapshot.gpus)
        self.query_one(FitBars).look_again(snapshot)

    async def action_show_page(self, number: int) -> None:
        """Show a page, and focus its first field."""
        await self._turn_to(number)
        self.fields.focus_first()
        if self.focused is None:
            self.tell("No field of this page applies to this job; each says why.")

    async def action_turn(self, by: int) -> None:
        await self.action_show_page((self.fields.page + by) % len(PAGES))

    async def go_to(self, name: str) -> None:
        """Go to a field; one that does not apply is shown with the reason."""
        self.checks.revealed.add(name)
        await self._turn_to(page_of(name))
        if row := self.fields.row(name):
            row.scroll_visible(animate=False)
            row.control.focus()
        if reason := self.checks.reasons.get(name):
            self.tell(f"{draft.help_text(name)} Now: {reason}.")

    async def _turn_to(self, number: int) -> None:
        await self.fields.turn_to(number, self.checks.reasons)
        self._arrange()
        self.checks.now()

    # -- values ----------------------------------------------------------------------------

    @property
    def values(self) -> dict[str, Any]:
        """Return the job's values, without defaults that would be rejected."""
        return draft.in_force(self.fields.values)[0]

    @property
    def holds_changes(self) -> bool:
        """Return whether it holds input that is not queued."""
        staged = self.purpose.follows != self.purpose.followed
        return staged or not draft.same(self.fields.values, self.opened)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Replace all values; none of them is adjusted to the family or the ranks."""
        self.fields.fill(values)
        self.checks.now()

    def begin_with(self, template: Template) -> None:
        """Apply a template, keeping the current model, data and ranks unless it sets them."""
        self.fill(draft.begin_with(template.values, self.fields.values))
        self.notify(f"loaded {template.title}", markup=False)

    def on_descendant_focus(self) -> None:
        self.tell_of_field()

    def tell_of_field(self) -> None:
        """Show the focused field's help below the fields."""
        path = self.focused.ancestors if self.focused else ()
        row = next((node for node in path if isinstance(node, FieldRow)), None)
        text = draft.help_text(row.field) if row else ""
        if row is not None and row.field == "strategy":
            text = f"{text} {self.checks.strategy_note(self.values)[1]}".rstrip()
        self.tell(text)

    @on(FieldRow.Changed)
    def _changed(self, message: FieldRow.Changed) -> None:
        if message.name in ("model_family", "model_flavour"):
            self.fields.adopt(message.name)
        self.checks.soon(message.name)
        self.drafts.soon()

    # -- what threads have found -----------------------------------------------------------

    @on(FitBars.Found)
    def _predicted(self) -> None:
        self.checks.show_ranks(self.values)
        self.submission.gate.look_again()

    @on(Looks.Checked)
    def _path_checked(self, message: Looks.Checked) -> None:
        self.looks.take(message)
        note = f"✓ {message.text}" if message.good and message.text else ""
        if row := self.fields.rows.get(message.field):  # of a page that was opened
            row.note(note)
        self.checks.now()
        self.submission.gate.look_again()

    @on(Looks.Resume)
    def _resume_planned(self, message: Looks.Resume) -> None:
        self.checks.show_meaning(message.text, message.problem)

    @on(Looks.Partitions)
    def _slurm_answered(self, message: Looks.Partitions) -> None:
        self.looks.partitions = message.partitions
        self.checks.now()

    @on(Looks.Absent)
    def _hub_answered(self, message: Looks.Absent) -> None:
        self.submission.gate.ask_to_fetch(message)

    @on(files.Drafts.Listed)
    def _drafts_listed(self, message: files.Drafts.Listed) -> None:
        self.drafts.take(message)

    @on(Submission.Ended)
    def _submitted(self, message: Submission.Ended) -> None:
        self.submission.take(message)

    @on(Looks.Launch)
    def _launch_made(self, message: Looks.Launch) -> None:
        self.preview.tell("command", message.command, message.script)

    # -- doing -----------------------------------------------------------------------------

    async def action_submit(self) -> None:
        await self.submission.begin()

    async def action_sweep(self) -> None:
        """Make the field a list of values, or one value again."""
        path = self.focused.ancestors_with_self if self.focused else ()
        row = next((node for node in path if isinstance(node, FieldRow)), None)
        if row is None:
            return
        if self.purpose.job is not None:
            self.notify("this form changes one job; copy it to queue several", markup=False)
        elif row.field in draft.UNLISTED:
            self.notify(f"{row.field} cannot be a list of values", markup=False)
        else:
            await row.turn_list()

    def action_stages(self) -> None:
        choose_stages(self)

    def action_take_over(self) -> None:
        self.earlier.turn()

    def action_restore(self) -> None:
        self.drafts.turn()

    async def action_data(self) -> None:
        if (values := await self.checks.complete()) is not None:
            show_data(self, values)

    @on(Input.Submitted, f"#field-{BLOCKS}")
    def action_blocks(self) -> None:
        choose_blocks(self)

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
        self.preview.turn(kind)
        self._arrange()
        self.checks.now()

    def action_copy(self) -> None:
        self.notify(clipboard.copy(self.app, self.preview.texts[self.preview.kind]), markup=False)

    def action_leave(self) -> None:
        if self.holds_changes or self.fields.swept:
            self.drafts.save()
            ask_to_leave(self, busy=self.submission.busy)
        else:
            self.dismiss(None)

    # -- inside ----------------------------------------------------------------------------

    def on_resize(self) -> None:
        self.show_keys()
        self._arrange()

    def _arrange(self) -> None:
        """Show fields and preview side by side, or one of them. Classes would restyle all."""
        width = self.app.size.width
        beside = width >= (_WIDE if self.fields.page == 0 else _WIDEST)
        self.preview.display = beside or self.preview.reading
        self.fields.display = beside or not self.preview.reading
        self.preview.set_class(not beside, "-alone")

    def show_keys(self) -> None:
        """Show the keys, and how many jobs the first of them queues."""
        width = self.size.width
        jobs = math.prod(map(len, self.fields.swept.values()))
        both = self.fields.values.get("both_experts") is True
        jobs *= 1 + (both and "both_experts" not in self.checks.reasons)
        verb = f"{self.purpose.verb} {jobs} jobs" if jobs > 1 else self.purpose.verb
        keys = last_line(verb, width - 2, narrow=width < _WIDE)
        self.query_one("#form-keys", Static).update(keys)

    def show_heading(self) -> None:
        """Update heading and keys after the form's purpose or its offer has changed."""
        self.query_one("#form-title", Static).update(self.heading)
        self.show_keys()

    def tell(self, text: str) -> None:
        """Say something below the fields."""
        show(self.query_one("#field-help", Static), text)

    @property
    def said_below(self) -> str:
        """Return the text below the fields."""
        return str(self.query_one("#field-help", Static).content)

    def complain(self, problem: str, *, warning: bool = False) -> None:
        """Show an error or message that belongs to no visible field."""
        error = self.query_one("#form-error", Static)
        error.set_class(warning, "-warning")
        reveal(error, f"! {problem}" if problem else "")
