"""A question with two answers; the harmless one has the focus."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

if TYPE_CHECKING:
    from textual.app import ComposeResult


class ConfirmScreen(ModalScreen[bool]):
    """Returns whether the person agreed."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
        Binding("left,h", "app.focus_previous", show=False),
        Binding("right,l", "app.focus_next", show=False),
    ]
    AUTO_FOCUS = "#no"

    def __init__(self, question: str, detail: str, verb: str) -> None:
        super().__init__()
        self.question = question
        self.detail = detail
        self.verb = verb

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="confirm") as dialog:
            dialog.border_title = self.question
            yield Static(self.detail, markup=False, id="detail")
            with Horizontal(id="answers"):
                yield Button(f"y  {self.verb}", id="yes", variant="error", compact=True)
                yield Button("n  keep", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
