"""Ask for a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

if TYPE_CHECKING:
    from textual.app import ComposeResult


class AskNameScreen(ModalScreen[str | None]):
    """Returns the name, or None when the person thought better of it."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [Binding("escape", "dismiss", "cancel", id="ask.cancel")]

    def __init__(self, question: str, proposal: str, about: str) -> None:
        """
        Args:
            question: The heading.
            proposal: What is in the field at first.
            about: What becomes of the name.
        """
        super().__init__()
        self.question = question
        self.proposal = proposal
        self.about = about

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="ask-name") as dialog:
            dialog.border_title = self.question
            dialog.border_subtitle = "enter save · esc cancel"
            yield Input(self.proposal, id="name", compact=True)
            yield Static(self.about, markup=False, id="base")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)
