"""One line of the form: label, control, and below it what is wrong with the value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.suggester import Suggester
from textual.widgets import Input, Label, Select, Static

from jobs.spec import JobSpec, is_switch, takes_number
from tui.newjob import draft
from tui.newjob.gpu_picker import GpuPicker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from tui.snapshot import Snapshot


class PathSuggester(Suggester):
    """Completes the last part of a path from what is on the disk."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        head, _, tail = value.rpartition("/")
        folder = Path((head + "/") if "/" in value else ".").expanduser()
        try:
            with os.scandir(folder) as entries:
                names = sorted(e.name for e in entries if e.name.startswith(tail) and e.is_dir())
        except OSError:
            return None
        names = [name for name in names if tail or not name.startswith(".")]
        return f"{value[: len(value) - len(tail)]}{names[0]}" if names else None


class FieldRow(Vertical):
    """Shows one field of the job. `value` is None while it is blank."""

    @dataclass
    class Changed(Message):
        """The person changed the value."""

        name: str

    def __init__(self, name: str, value: Any, snapshot: Snapshot) -> None:
        super().__init__(id=f"row-{name}", classes="field")
        self.field = name
        self.control = _control(name, value, snapshot)
        self.control.tooltip = draft.help_text(name)

    def compose(self) -> ComposeResult:
        with Horizontal(classes="line"):
            yield Label(draft.label(self.field), classes="label")
            yield self.control
            yield Static("", classes="note", markup=False)
        yield Static("", classes="error", markup=False)

    @property
    def value(self) -> Any:
        match self.control:
            case Select() as select:
                return None if select.is_blank() else select.value
            case GpuPicker() as picker:
                return list(picker.chosen) or None
            case Input() as text:
                return draft.from_text(self.field, text.value)
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
            case GpuPicker() as picker:
                picker.choose([v for v in value if isinstance(v, int)] if isinstance(value, list)
                              else [])  # fmt: skip
            case Input() as text:
                text.value = draft.as_text(self.field, value)

    def offer(self, words: Sequence[str], chosen: str | None) -> None:
        """Let a choice be one of these, or blank."""
        if isinstance(self.control, Select):
            self.control.set_options((word, word) for word in words)
            if chosen in words:
                self.control.value = chosen

    def complain(self, problem: str) -> None:
        """Show what is wrong below the control; nothing when the text is empty."""
        error = self.query_one(".error", Static)
        text = problem and f"! {problem}"
        if str(error.content) != text:
            error.update(text)
            self.set_class(bool(problem), "-wrong")

    def note(self, text: str) -> None:
        """Show what was found, beside the control."""
        self.query_one(".note", Static).update(text)

    def on_input_changed(self) -> None:
        self.post_message(self.Changed(self.field))

    def on_select_changed(self) -> None:
        self.post_message(self.Changed(self.field))

    def on_gpu_picker_changed(self) -> None:
        self.post_message(self.Changed(self.field))


def _control(name: str, value: Any, snapshot: Snapshot) -> Widget:
    identity = f"field-{name}"
    if name == "gpus":
        chosen = [v for v in value if isinstance(v, int)] if isinstance(value, list) else []
        return GpuPicker(snapshot.gpus, _users(snapshot), chosen)
    if name == "model_flavour":
        # Which there are depends on the family: `offer` says.
        return Select([], prompt="not said", id=identity, compact=True)
    words = draft.choices(name)
    if words:
        chosen_word = value if value in words else JobSpec.model_fields[name].default
        return Select(
            [(word, word) for word in words], value=chosen_word, allow_blank=False, id=identity,
            compact=True,
        )  # fmt: skip
    if is_switch(name) and JobSpec.model_fields[name].default is not None:
        return Select(_yes_or_no(value), value=value, allow_blank=False, id=identity, compact=True)
    suggester = PathSuggester() if name in draft.PATHS else None
    return Input(
        draft.as_text(name, value), placeholder=draft.placeholder(name), id=identity,
        compact=True, suggester=suggester,
    )  # fmt: skip


def _yes_or_no(value: bool | int) -> list[tuple[str, bool | int]]:
    """What a switch offers, and the number that a job file gave it, if it may be one."""
    numbers = [(str(value), value)] if type(value) is int else []
    return [("yes", True), ("no", False), *numbers]


def _users(snapshot: Snapshot) -> Mapping[str, str]:
    """GPU → the job of ours that holds it, or the processes of others."""
    users = {gpu.uuid: f"pid {gpu.processes[0].pid}" for gpu in snapshot.gpus if gpu.processes}
    for view in snapshot.jobs:
        if view.job.state.active:
            users |= dict.fromkeys(view.job.gpus, f"job {view.job.id}")
    return users
