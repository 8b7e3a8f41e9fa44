"""Choosing one of some words: in one line, or from a list that drops down."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding
from textual.content import Content
from textual.message import Message
from textual.widgets import Select, Static

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = "  "


class Choice(Static, can_focus=True):
    """What is chosen is its `value`.

    Args:
        options: Words, each with the value it stands for.
        value: What is chosen; the first option if it is not among them.
    """

    BINDINGS: ClassVar = [
        Binding("right,space,enter", "go(1)", "next value", show=False, id="choice.next"),
        Binding("left", "go(-1)", "previous value", show=False, id="choice.previous"),
        # Letters are no keys of the screen here, as little as in an input.
        *(Binding(key, f"letter('{key}')", show=False) for key in ascii_lowercase + digits),
    ]

    @dataclass
    class Changed(Message):
        """Another word is chosen."""

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
        self.update(Content.from_markup(_GAP.join(parts)))


class DropDown(Select[Any]):
    """A list that enter or space opens; the arrows go to the next field, as everywhere."""

    BINDINGS: ClassVar = [
        Binding("down", "app.focus_next", "next field", show=False, id="fields.down"),
        Binding("up", "app.focus_previous", "previous field", show=False, id="fields.up"),
    ]


def width_of(words: Sequence[str]) -> int:
    """Columns that these take in a line."""
    return sum(len(word) + 2 for word in words) + len(_GAP) * (len(words) - 1)
