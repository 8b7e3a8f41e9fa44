"""The fields of the form: labeled lines, choices among words, and GPU buttons."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import on
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import Paste
from textual.markup import escape
from textual.message import Message
from textual.widgets import Input, Label, Select, Static

from jobs.errors import SpecError
from jobs.machine.gpu import foreign_users, hidden_use
from jobs.service.sweep import read_values
from jobs.spec.families import FAMILIES
from jobs.spec.job_spec import JobSpec, is_switch, takes_number
from tui.form import draft, pages
from tui.text.format import gib, size
from tui.widgets.path_input import PathInput, PathSuggester

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult
    from textual.widget import Widget

    from jobs.machine.devices import Gpu
    from tui.look.snapshot import Snapshot


# -- choice ---------------------------------------------------------------------------------
# A choice among words: on one line, or as a drop-down list.


_CHOICE_GAP = "  "


class Choice(Static, can_focus=True):
    """A choice whose `value` is the chosen one.

    Args:
        options: Words, each with the value it stands for.
        value: What is chosen; the first option if it is not among them.
    """

    BINDINGS: ClassVar = [
        Binding("right,space,enter", "go(1)", "next value", show=False, id="choice.next"),
        Binding("left", "go(-1)", "previous value", show=False, id="choice.previous"),
        # Letter keys select values here; they do not trigger screen bindings.
        *(Binding(key, f"letter('{key}')", show=False) for key in ascii_lowercase + digits),
    ]

    @dataclass
    class Changed(Message):
        """Another word was chosen."""

    def __init__(self, options: Sequence[tuple[str, Any]], value: Any, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id, classes="choice")
        self.auto_links = False
        self.options = list(options)
        self._place = self._find(value)

    @property
    def value(self) -> Any:
        return self.options[self._place][1]

    @value.setter
    def value(self, value: Any) -> None:
        self._take(self._find(value))

    def on_mount(self) -> None:
        self._draw()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def action_go(self, by: int) -> None:
        self._take((self._place + by) % len(self.options))

    def action_pick(self, place: int) -> None:
        if not self.disabled:
            self._take(place)

    def action_letter(self, letter: str) -> None:
        """Go to the next value that begins with a letter."""
        count = len(self.options)
        order = ((self._place + step) % count for step in range(1, count + 1))
        places = (n for n in order if self.options[n][0].lower().startswith(letter))
        self._take(next(places, self._place))

    def _find(self, value: Any) -> int:
        places = (n for n, (_, option) in enumerate(self.options) if option == value)
        return next(places, 0)

    def _take(self, place: int) -> None:
        if place != self._place:
            self._place = place
            self._draw()
            self.post_message(self.Changed())

    def _draw(self) -> None:
        parts = []
        for place, (word, _) in enumerate(self.options):
            chosen = place == self._place
            style = ("b reverse" if self.has_focus else "b") if chosen else "$foreground 60%"
            mark = "●" if chosen else "○"
            parts.append(f"[@click=pick({place})][{style}]{mark} {word}[/][/]")
        self.update(Content.from_markup(_CHOICE_GAP.join(parts)))


class DropDown(Select[Any]):
    """A list opened by enter or space; the arrow keys move to the next field, as everywhere."""

    BINDINGS: ClassVar = [
        Binding("down", "app.focus_next", "next field", show=False, id="fields.down"),
        Binding("up", "app.focus_previous", "previous field", show=False, id="fields.up"),
    ]


def width_of(words: Sequence[str]) -> int:
    """Return the columns that these options take on a line."""
    return sum(len(word) + 2 for word in words) + len(_CHOICE_GAP) * (len(words) - 1)


# -- gpu picker -----------------------------------------------------------------------------
# GPUs as buttons: a number key or space toggles one, arrows move, `a` all, `f` the free ones.


_GAP: Final = "  "


class GpuPicker(Static, can_focus=True):
    """Chosen GPUs by index. None means auto: any free GPUs, one for each rank.

    Args:
        gpus: This machine's GPUs.
        users: UUID → its current user.
        value: The job file's value: indices, UUIDs or prefixes of them, a count, or None.
    """

    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "previous GPU", show=False, id="gpus.left"),
        Binding("right", "move(1)", "next GPU", show=False, id="gpus.right"),
        Binding(
            "space,enter", "turn_here", "select or deselect this GPU", show=False, id="gpus.toggle"
        ),
        Binding("a", "all", "all GPUs, or none", show=False, id="gpus.all"),
        Binding("f", "free", "all idle GPUs", show=False, id="gpus.free"),
        *(
            Binding(str(n), f"turn({n})", f"GPU {n}", show=False, id=f"gpus.toggle_{n}")
            for n in range(10)
        ),
    ]

    @dataclass
    class Changed(Message):
        """Another set of GPUs was chosen."""

        chosen: tuple[int, ...]

    def __init__(self, gpus: Sequence[Gpu], users: Mapping[str, str], value: Any) -> None:
        super().__init__(id="field-gpus")
        self.auto_links = False
        self.gpus = list(gpus)
        self.users = dict(users)
        self.place = 0
        self.chosen: tuple[int, ...] = ()
        # An initial value other than these GPUs: a count, or GPUs that are not here.
        self._given: Any = None
        self._names: dict[int, int | str] = {}  # the job file's name for each
        self._read(value)

    @property
    def indices(self) -> list[int]:
        return [gpu.index for gpu in self.gpus]

    @property
    def value(self) -> Any:
        """Return the job file's value: the initial value until the user changes it."""
        if self._given is not None:
            return self._given
        return [self._names.get(index, index) for index in self.chosen] or None

    @value.setter
    def value(self, value: Any) -> None:
        if value != self.value:
            self._read(value)
            self._draw()
            self.post_message(self.Changed(self.chosen))

    def _read(self, value: Any) -> None:
        names = value if isinstance(value, list) else []
        indices = {name: self._index(name) for name in names}
        all_present = all(index is not None for index in indices.values())
        self._names = {index: name for name, index in indices.items() if index is not None}
        self.chosen = tuple(sorted(self._names)) if all_present else ()
        self._given = None if all_present and isinstance(value, list | None) else value

    def _index(self, name: int | str) -> int | None:
        if isinstance(name, int):
            return name if name in self.indices else None
        return next((gpu.index for gpu in self.gpus if gpu.uuid.startswith(name)), None)

    def used_by(self, users: Mapping[str, str], gpus: Sequence[Gpu] | None = None) -> None:
        """Show the current users of the GPUs, by UUID, and which are free."""
        self.users = dict(users)
        self.gpus = self.gpus if gpus is None else list(gpus)
        self._draw()

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def choose(self, chosen: Sequence[int]) -> None:
        """Choose exactly these."""
        self._given = None
        self.chosen = tuple(sorted(index for index in chosen if index in self.indices))
        self._draw()
        self.post_message(self.Changed(self.chosen))

    def action_move(self, by: int) -> None:
        self.place = (self.place + by) % max(1, len(self.gpus))
        self._draw()

    def action_turn_here(self) -> None:
        self.action_turn(self.indices[self.place])

    def action_turn(self, index: int) -> None:
        if index in self.indices and not self.disabled:
            self.place = self.indices.index(index)
            self.choose(sorted(set(self.chosen) ^ {index}))

    def action_all(self) -> None:
        self.choose([] if len(self.chosen) == len(self.gpus) else self.indices)

    def action_free(self) -> None:
        self.choose([gpu.index for gpu in self.gpus if gpu.uuid not in self.users])

    def _draw(self) -> None:
        width = self.size.width
        lines, used = [""], 0
        for place, gpu in enumerate(self.gpus):
            button, columns = self._button(place, gpu)
            if used and used + len(_GAP) + columns > width:
                lines, used = [*lines, ""], 0
            lines[-1] += (_GAP if used else "") + button
            used += (len(_GAP) if used else 0) + columns
        tail = self._tail()
        if used + len(_GAP) + len(tail) > width:
            lines.append("")
        lines[-1] += f"{_GAP if lines[-1] else ''}[$foreground 60%]{escape(tail)}[/]"
        self.update(Content.from_markup("\n".join(lines)))

    def _button(self, place: int, gpu: Gpu) -> tuple[str, int]:
        """Return a GPU with its user as markup, and the columns it takes."""
        on, user = gpu.index in self.chosen, self.users.get(gpu.uuid, "")
        used = gpu.memory_used
        free = "" if used is None else f" {gib(gpu.memory_total - used)}G"
        text = f"{'■' if on else '□'} {gpu.index}{free}{f' {user}' if user else ''}"
        style = "b $success" if on and not user else "$warning" if user else "$foreground 80%"
        if self.has_focus and place == self.place:
            style += " reverse"
        return f"[@click=turn({gpu.index})][{style}]{escape(text)}[/][/]", len(text)

    def _tail(self) -> str:
        """Summarize the choice."""
        if isinstance(self._given, int):
            return f"any {self._given} free GPUs"
        if self._given is not None:
            return f"{', '.join(map(str, self._given))}: not on this machine"
        if not self.chosen:
            return "auto: any free GPUs"
        busy = [str(g.index) for g in self.gpus if g.index in self.chosen and g.uuid in self.users]
        return f"waiting for {', '.join(busy)}" if busy else ""


def users_of(snapshot: Snapshot) -> dict[str, str]:
    """Return GPU → our job that holds it, or another process, which may be hidden."""
    users = {
        uuid: f"job {view.job.id}"
        for view in snapshot.jobs
        if view.job.state.active
        for uuid in view.job.gpus
    }
    taken = foreign_users(snapshot.gpus, (), users)
    for gpu in snapshot.gpus:
        if gpu.uuid in users:
            continue
        if gpu.unusable:
            users[gpu.uuid] = "unusable"
        elif gpu.uuid in taken:
            first = max(gpu.processes, key=lambda process: process.memory or 0, default=None)
            more = f" +{len(gpu.processes) - 1}" if len(gpu.processes) > 1 else ""
            users[gpu.uuid] = (
                f"hidden {size(hidden_use(gpu))}"
                if first is None
                else f"{first.user or 'pid'} {first.pid}{more}"
            )
    return users


# -- field row ------------------------------------------------------------------------------
# One line of the form: label, control and, below, the value's error.


_WIDEST_CHOICE: Final = 24  # columns; longer ones drop down
_NO_FLAVOUR: Final = "unknown"


class FieldRow(Vertical):
    """Shows one field of the job. `value` is None while it is blank.

    Args:
        name: The job's key.
        value: Its value.
        snapshot: The machine's state.
        off: Why it does not apply, if it does not.
        detailed: Show its help, or why it does not apply, beside it.
    """

    @dataclass
    class Changed(Message):
        """The user changed the value."""

        name: str

    def __init__(
        self, name: str, value: Any, snapshot: Snapshot, *, off: str = "", detailed: bool = False
    ) -> None:
        super().__init__(id=f"row-{name}", classes="field")
        self.set_class(detailed, "-detailed")
        self.set_class(bool(off), "-off")
        self.field = name
        self.control = _control(name, value, snapshot)
        self.control.tooltip = draft.help_text(name)
        self.control.disabled = bool(off)
        self.listed = False  # whether it is a list of values, each a job
        self._single: Any = None  # its value before that
        self._snapshot = snapshot
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
                if self.listed:
                    return next(iter(self.values), None)
                return draft.from_text(self.field, text.value)
        return None

    @property
    def values(self) -> list[Any]:
        """Return the values of a list; else its only value."""
        if not self.listed or not isinstance(self.control, Input):
            return [self.value]
        try:
            texts = read_values(self.field, self.control.value)
            return [draft.from_text(self.field, text) for text in texts]
        except SpecError:  # none yet
            return []

    async def turn_list(self) -> None:
        """Turn into a list of values, each a job, or back into one value."""
        if self.listed:
            control = _control(self.field, self._single, self._snapshot)
        else:
            self._single, text = self.value, draft.as_text(self.field, self.value)
            if isinstance(self.control, Choice):
                text = ", ".join(word for word, value in self.control.options if value is not None)
            else:
                text = draft.proposal(self.field, text)
            control = Input(text, id=f"field-{self.field}", compact=True)
        self.listed = not self.listed
        control.tooltip = self.control.tooltip
        before, self.control = self.control, control
        await before.remove()
        await self.query_one(".line").mount(control, before=self._note)
        control.focus()
        self.post_message(self.Changed(self.field))

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
                text.value = draft.as_text(self.field, value)

    def offer(self, words: Sequence[str], chosen: str | None) -> None:
        """Set the words of a choice, in addition to blank."""
        if isinstance(self.control, Select):
            self.control.set_options((word, word) for word in words)
            if chosen in words:
                self.control.value = chosen

    def complain(self, problem: str) -> None:
        """Show an error below the control; none if the text is empty."""
        text = problem and f"! {problem}"
        if self._error.content != text:
            self._error.update(text)
            self.set_class(bool(problem), "-wrong")

    def note(self, text: str) -> None:
        """Show a remark beside the control."""
        self._remark = text
        self._show_beside()

    def turn_off(self, reason: str) -> None:
        """Disable the field with a reason; enable it if that is ""."""
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


class TextInput(Input):
    """A text input that keeps all lines of a paste, unlike Textual's.

    Args:
        name: The job's key.
        text: Its initial text.
        hint: Its placeholder.
    """

    def __init__(self, name: str, text: str, hint: str) -> None:
        super().__init__(text, placeholder=hint, id=f"field-{name}", compact=True)
        self._key = name

    @on(Paste)
    def several_lines(self, event: Paste) -> None:
        lines = [line.strip() for line in event.text.splitlines() if line.strip()]
        if len(lines) < 2:
            return  # Textual's own input handles it
        event.prevent_default()
        event.stop()
        start, end = sorted(self.selection)
        self.value = draft.pasted(self._key, self.value[:start], lines, self.value[end:])
        self.cursor_position = len(self.value)


def _control(name: str, value: Any, snapshot: Snapshot) -> Widget:
    identity = f"field-{name}"
    usual = JobSpec.model_fields[name].default
    if name == "gpus":
        return GpuPicker(snapshot.gpus, users_of(snapshot), value)
    if name == "model_flavour":
        # They depend on the family; `offer` sets them.
        return DropDown([], prompt=_NO_FLAVOUR, id=identity, compact=True)
    if words := draft.choices(name):
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
    text, hint = draft.as_text(name, value), draft.placeholder(name)
    if name == "slurm_partition":  # the form finds out later what to suggest
        return PathInput(text, placeholder=hint, id=identity, compact=True)
    if name not in (*pages.PATHS, "cache_dir", "logging_dir"):
        return TextInput(name, text, hint)
    words = _hub_ids if name == "pretrained_model_name_or_path" else tuple
    suggester = PathSuggester(words=words)
    return PathInput(text, placeholder=hint, id=identity, compact=True, suggester=suggester)


def _hub_ids() -> list[str]:
    """Return the hub ids of the families' models."""
    return [flavour.hub_id for family in FAMILIES.values() for flavour in family.flavours.values()]


def _yes_or_no(value: bool | int) -> list[tuple[str, bool | int]]:
    """Return a switch's options, and a number if a job file set one."""
    numbers = [(str(value), value)] if type(value) is int else []
    return [("yes", True), ("no", False), *numbers]
