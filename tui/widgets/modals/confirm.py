"""A question with two answers; the harmless one has the focus."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Static

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.widgets.button import ButtonVariant


class ConfirmScreen(ModalScreen[bool]):
    """Returns whether the person agreed."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [
        Binding("y", "answer(True)", "yes", id="confirm.yes"),
        Binding("n,escape", "answer(False)", "no", id="confirm.no"),
        Binding("j,down", "scroll(1)", "scroll down", show=False, id="confirm.down"),
        Binding("k,up", "scroll(-1)", "scroll up", show=False, id="confirm.up"),
        Binding("left,h", "app.focus_previous", "other answer", show=False, id="confirm.left"),
        Binding("right,l", "app.focus_next", "other answer", show=False, id="confirm.right"),
    ]
    AUTO_FOCUS = "#no"

    def __init__(
        self, question: str, detail: str, verb: str, *, refuse: str = "keep", harmful: bool = True
    ) -> None:
        """
        Args:
            question: The heading.
            detail: What would happen.
            verb: The answer that does it.
            refuse: The answer that does not.
            harmful: Whether something is lost by it.
        """
        super().__init__()
        self.question = question
        self.detail = detail
        self.verb = verb
        self.refuse = refuse
        self.harmful = harmful

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="confirm") as dialog:
            dialog.border_title = self.question
            with VerticalScroll(id="answers-detail", can_focus=False):
                yield Static(self.detail, markup=False, id="detail")
            with Horizontal(id="answers"):
                variant: ButtonVariant = "error" if self.harmful else "primary"
                yield Button(f"y  {self.verb}", id="yes", variant=variant, compact=True)
                yield Button(f"n  {self.refuse}", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)

    def action_scroll(self, by: int) -> None:
        self.query_one("#answers-detail").scroll_relative(y=by, animate=False)
