"""One line of the form: label, control, and below it what is wrong with the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from textual import on
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, Label, Select, Static

from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec, is_switch, takes_number
from tui.form.fields import field_texts, pages
from tui.form.fields.choice import Choice, DropDown, width_of
from tui.form.fields.gpu_picker import GpuPicker, users_of
from tui.widgets.path_input import PathInput, PathSuggester

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from tui.look.snapshot import Snapshot


_WIDEST_CHOICE: Final = 24  # columns; longer ones drop down
_NO_FLAVOUR: Final = "unknown"


class FieldRow(Vertical):
    """Shows one field of the job. `value` is None while it is blank.

    Args:
        name: The job's key.
        value: What it holds.
        snapshot: The machine as it is.
        off: Why it does not apply, if it does not.
        detailed: Whether its help, or why it does not apply, stands beside it.
    """

    @dataclass
    class Changed(Message):
        """The person changed the value."""

        name: str

    def __init__(
        self, name: str, value: Any, snapshot: Snapshot, *, off: str = "", detailed: bool = False
    ) -> None:
        super().__init__(id=f"row-{name}", classes="field")
        self.set_class(detailed, "-detailed")
        self.set_class(bool(off), "-off")
        self.field = name
        self.control = _control(name, value, snapshot)
        self.control.tooltip = field_texts.help_text(name)
        self.control.disabled = bool(off)
        self._detailed = detailed
        self._remark, self._off = "", off
        self._note = Static(self._beside(), classes="note", markup=False)
        self._error = Static("", classes="error", markup=False)

    def compose(self) -> ComposeResult:
        with Horizontal(classes="line"):
            yield Label(pages.label(self.field), classes="label")
            yield self.control
            yield self._note
        yield self._error

    @property
    def value(self) -> Any:
        match self.control:
            case Select() as select:
                return None if select.is_blank() else select.value
            case GpuPicker() | Choice() as control:
                return control.value
            case Input() as text:
                return field_texts.from_text(self.field, text.value)
        return None

    def put(self, value: Any) -> None:
        """Show another value."""
        match self.control:
            case Select() as select:
                if takes_number(self.field):
                    select.set_options(_yes_or_no(value))
                if value is None:
                    select.clear()
                else:
                    select.value = value
            case GpuPicker() | Choice() as control:
                control.value = value
            case Input() as text:
                text.value = field_texts.as_text(self.field, value)

    def offer(self, words: Sequence[str], chosen: str | None) -> None:
        """Let a choice be one of these, or blank."""
        if isinstance(self.control, Select):
            self.control.set_options((word, word) for word in words)
            if chosen in words:
                self.control.value = chosen

    def complain(self, problem: str) -> None:
        """Show what is wrong below the control; nothing when the text is empty."""
        text = problem and f"! {problem}"
        if self._error.content != text:
            self._error.update(text)
            self.set_class(bool(problem), "-wrong")

    def note(self, text: str) -> None:
        """Show a remark beside the control."""
        self._remark = text
        self._show_beside()

    def turn_off(self, reason: str) -> None:
        """Say why the field does not apply, and let nobody fill it in; "" if it does."""
        if reason != self._off:
            self._off = reason
            self.control.disabled = bool(reason)
            self.set_class(bool(reason), "-off")
            self._show_beside()

    def _beside(self) -> str:
        usual = JobSpec.model_fields[self.field].description if self._detailed else ""
        return self._off or self._remark or usual or ""

    def _show_beside(self) -> None:
        if self._note.content != self._beside():
            self._note.update(self._beside())
            self.set_class(bool(self._remark), "-found")

    @on(Input.Changed)
    @on(Select.Changed)
    @on(GpuPicker.Changed)
    @on(Choice.Changed)
    def _changed(self) -> None:
        self.post_message(self.Changed(self.field))


def _control(name: str, value: Any, snapshot: Snapshot) -> Widget:
    identity = f"field-{name}"
    usual = JobSpec.model_fields[name].default
    if name == "gpus":
        return GpuPicker(snapshot.gpus, users_of(snapshot), value)
    if name == "model_flavour":
        # Which there are depends on the family: `offer` says.
        return DropDown([], prompt=_NO_FLAVOUR, id=identity, compact=True)
    if words := field_texts.choices(name):
        if width_of(words) <= _WIDEST_CHOICE:
            return Choice([(w, w) for w in words], value if value in words else usual, id=identity)
        return DropDown(
            [(word, word) for word in words],
            value=value if value in words else usual,
            allow_blank=False,
            id=identity,
            compact=True,
        )
    if takes_number(name):
        return DropDown(
            _yes_or_no(value), value=value, allow_blank=False, id=identity, compact=True
        )
    if is_switch(name):
        options: list[tuple[str, bool | None]] = [("yes", True), ("no", False)]
        return Choice([*options, ("auto", None)] if usual is None else options, value, id=identity)
    return _input(name, value, identity)


def _input(name: str, value: Any, identity: str) -> Input:
    text, hint = field_texts.as_text(name, value), field_texts.placeholder(name)
    if name == "slurm_partition":  # the form knows later what to propose
        return PathInput(text, placeholder=hint, id=identity, compact=True)
    if name not in (*pages.PATHS, "cache_dir", "logging_dir"):
        return Input(text, placeholder=hint, id=identity, compact=True)
    words = _hub_ids if name == "pretrained_model_name_or_path" else tuple
    suggester = PathSuggester(words=words)
    return PathInput(text, placeholder=hint, id=identity, compact=True, suggester=suggester)


def _hub_ids() -> list[str]:
    """Where the families' models are published."""
    return [flavour.hub_id for family in FAMILIES.values() for flavour in family.flavours.values()]


def _yes_or_no(value: bool | int) -> list[tuple[str, bool | int]]:
    """Return a switch's options, and the number that a job file set, if it is one."""
    numbers = [(str(value), value)] if type(value) is int else []
    return [("yes", True), ("no", False), *numbers]
