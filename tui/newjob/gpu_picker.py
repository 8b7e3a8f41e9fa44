"""GPUs as buttons in one line: space or a number key toggles one, arrows move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.devices import Gpu


class GpuPicker(Static, can_focus=True):
    """Chosen GPUs by index. None chosen means: any that are free, as many as there are ranks."""

    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", show=False),
        Binding("right", "move(1)", show=False),
        Binding("space", "turn_here", "toggle", show=False),
        *(Binding(str(n), f"turn({n})", show=False) for n in range(10)),
    ]

    @dataclass
    class Changed(Message):
        """Another set of GPUs is chosen."""

        chosen: tuple[int, ...]

    def __init__(
        self, gpus: Sequence[Gpu], users: Mapping[str, str], chosen: Sequence[int]
    ) -> None:
        super().__init__(id="field-gpus")
        self.auto_links = False
        self.gpus = list(gpus)
        self.users = dict(users)  # uuid → who sits on it
        self.chosen = tuple(sorted(index for index in chosen if index in self.indices))
        self.place = 0

    @property
    def indices(self) -> list[int]:
        return [gpu.index for gpu in self.gpus]

    def on_mount(self) -> None:
        self._draw()

    def on_focus(self) -> None:
        self._draw()

    def on_blur(self) -> None:
        self._draw()

    def choose(self, chosen: Sequence[int]) -> None:
        self.chosen = tuple(sorted(index for index in chosen if index in self.indices))
        self._draw()
        self.post_message(self.Changed(self.chosen))

    def action_move(self, by: int) -> None:
        self.place = (self.place + by) % max(1, len(self.gpus))
        self._draw()

    def action_turn_here(self) -> None:
        self.action_turn(self.indices[self.place])

    def action_turn(self, index: int) -> None:
        if index in self.indices:
            self.place = self.indices.index(index)
            self.choose(sorted(set(self.chosen) ^ {index}))

    def _draw(self) -> None:
        parts = []
        for place, gpu in enumerate(self.gpus):
            on = gpu.index in self.chosen
            busy = " busy" if gpu.uuid in self.users else ""
            mark = "■" if on else "□"
            style = "b $success" if on else "$warning" if busy else "$foreground 70%"
            if self.has_focus and place == self.place:
                style += " reverse"
            parts.append(f"[@click=turn({gpu.index})][{style}]{mark} {gpu.index}{busy}[/][/]")
        users = [f"{gpu.index}: {self.users[gpu.uuid]}" for gpu in self.gpus
                 if gpu.uuid in self.users and gpu.index in self.chosen]  # fmt: skip
        tail = f"  [$warning]waits for {', '.join(users)}[/]" if users else ""
        if not self.chosen:
            tail = "  [$foreground 55%]any that are free[/]"
        self.update(Content.from_markup("  ".join(parts) + tail))
