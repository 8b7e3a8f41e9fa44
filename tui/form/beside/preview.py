"""What the form comes to: the job file, or the launch command, beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.containers import VerticalScroll
from textual.widgets import Static

if TYPE_CHECKING:
    from textual.app import ComposeResult

KINDS: Final = ("yaml", "command")
_TITLES: Final = {"yaml": "job file", "command": "launch command"}
_NOTHING: Final = {"yaml": "nothing yet", "command": "loading …"}


class Preview(VerticalScroll, can_focus=False):
    """Shows one of two texts.

    Attributes:
        kind: Which.
        texts: What would be copied.
        reading: Whether it was asked for where it has no room beside the fields.
    """

    def __init__(self) -> None:
        super().__init__(id="preview")
        self.kind = KINDS[0]
        self.reading = False
        self.texts = dict.fromkeys(KINDS, "")

    def compose(self) -> ComposeResult:
        for kind in KINDS:
            yield Static(_NOTHING[kind], id=kind, markup=False)

    def on_mount(self) -> None:
        self.turn_to(self.kind)

    def turn(self, kind: str = "") -> None:
        """Show this text, or the next; after the last, the fields if both have no room."""
        if kind or not self.display:
            self.reading = True
            self.turn_to(kind or KINDS[0])
        elif self.kind == KINDS[-1]:
            self.reading = False
            self.turn_to(KINDS[0])
        else:
            self.turn_to(KINDS[-1])

    def turn_to(self, kind: str) -> None:
        """Show this text."""
        self.kind = kind
        for name in KINDS:
            self.query_one(f"#{name}").display = name == kind
        titles = []
        for name in KINDS:
            style = "b $primary" if name == kind else "$foreground 55%"
            titles.append(f"[@click=screen.preview('{name}')][{style}]{_TITLES[name]}[/][/]")
        self.border_title = " │ ".join(titles)
        self.border_subtitle = "F3 switch · ^y copy"

    def tell(self, kind: str, seen: str, copied: str | None = None) -> None:
        """Another text.

        Args:
            kind: Which.
            seen: What is shown.
            copied: What is copied, where that is more.
        """
        self.texts[kind] = seen if copied is None else copied
        text = self.query_one(f"#{kind}", Static)
        if str(text.content) != (seen or _NOTHING[kind]):
            text.update(seen or _NOTHING[kind])
