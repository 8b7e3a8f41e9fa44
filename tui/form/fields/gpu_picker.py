"""GPUs as buttons: a number key or space toggles one, arrows move, `a` all, `f` the free ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual.binding import Binding
from textual.content import Content
from textual.markup import escape
from textual.message import Message
from textual.widgets import Static

from jobs.machine.gpu import foreign_users, hidden_use
from tui.text.format import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.machine.devices import Gpu
    from tui.look.snapshot import Snapshot

_GAP: Final = "  "


class GpuPicker(Static, can_focus=True):
    """Chosen GPUs by index. None chosen means: auto: any free GPUs, as many as there are ranks.

    Args:
        gpus: Of this machine.
        users: UUID → who sits on it.
        value: As a job has it: indices, UUIDs or beginnings of them, a count, or None.
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
        """Another set of GPUs is chosen."""

        chosen: tuple[int, ...]

    def __init__(self, gpus: Sequence[Gpu], users: Mapping[str, str], value: Any) -> None:
        super().__init__(id="field-gpus")
        self.auto_links = False
        self.gpus = list(gpus)
        self.users = dict(users)
        self.place = 0
        self.chosen: tuple[int, ...] = ()
        self._given: Any = None  # what is not these GPUs: a count, or some that are not here
        self._names: dict[int, int | str] = {}  # how the job calls them
        self._read(value)

    @property
    def indices(self) -> list[int]:
        return [gpu.index for gpu in self.gpus]

    @property
    def value(self) -> Any:
        """As a job has it; what was given, while nobody chose others."""
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

    def used_by(self, users: Mapping[str, str]) -> None:
        """Show who sits on the GPUs now, by UUID."""
        self.users = dict(users)
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
        """Take these, and no others."""
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
        """One GPU with who uses it, as markup, and how many columns it takes."""
        on, user = gpu.index in self.chosen, self.users.get(gpu.uuid, "")
        text = f"{'■' if on else '□'} {gpu.index}{f' {user}' if user else ''}"
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
    """GPU → the job of ours that holds it, or a process of others, though it may be hidden."""
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
