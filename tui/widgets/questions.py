"""Modal questions: a name, a path, or one of two answers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from jobs.errors import UserError
from tui.widgets.path_input import PathInput, PathSuggester

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult
    from textual.widgets.button import ButtonVariant


# -- ask name -------------------------------------------------------------------------------
# Ask for a name.


class AskNameScreen(ModalScreen[str | None]):
    """Returns the name, or None if the user cancels."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [Binding("escape", "dismiss", "cancel", id="ask.cancel")]

    def __init__(self, question: str, proposal: str, about: str) -> None:
        """
        Args:
            question: The heading.
            proposal: The initial text.
            about: What the name is used for.
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


# -- ask jobs -------------------------------------------------------------------------------
# Ask for the numbers of jobs.


class AskJobsScreen(ModalScreen[tuple[int, ...] | None]):
    """Returns the numbers of jobs, or None if the user cancels.

    Args:
        question: The heading.
        proposal: The initial numbers.
        read: Reads the input: the numbers, and what to say of them; raises `UserError`.
    """

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [Binding("escape", "dismiss", "cancel", id="ask.cancel")]

    def __init__(
        self,
        question: str,
        proposal: Sequence[int],
        read: Callable[[str], tuple[tuple[int, ...], str]],
    ) -> None:
        super().__init__()
        self.question = question
        self.proposal = ", ".join(map(str, proposal))
        self.read = read

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="ask-jobs") as dialog:
            dialog.border_title = self.question
            dialog.border_subtitle = "enter accept · esc cancel"
            yield Input(self.proposal, id="jobs-input", compact=True, placeholder="3, 4")
            yield Static("", markup=False, id="base")

    def on_input_changed(self, event: Input.Changed) -> None:
        try:
            _, text = self.read(event.value)
        except UserError as error:
            text = f"! {error}"
        self.query_one("#base", Static).update(text)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        with suppress(UserError):  # which stands below
            self.dismiss(self.read(event.value)[0])


# -- ask path -------------------------------------------------------------------------------
# Ask for a path, with completion.


class AskPathScreen(ModalScreen[Path | None]):
    """Returns the path, or None if the user cancels."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [Binding("escape", "dismiss", "cancel", id="ask.cancel")]

    def __init__(self, question: str, proposal: str) -> None:
        super().__init__()
        self.question = question
        self.proposal = proposal

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog", id="ask-path") as dialog:
            dialog.border_title = self.question
            dialog.border_subtitle = "tab complete · enter accept · esc cancel"
            files = PathSuggester((".yaml", ".yml", ".json"))
            yield PathInput(self.proposal, id="path", compact=True, suggester=files)
            yield Static(f"relative to {Path.cwd()}", markup=False, id="base")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        self.dismiss(Path(os.path.expandvars(text)).expanduser() if text else None)


# -- confirm --------------------------------------------------------------------------------
# A question with two answers; the harmless one has the focus.


class ConfirmScreen(ModalScreen[bool]):
    """Returns whether the user agreed."""

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
            detail: The effect.
            verb: The answer that agrees.
            refuse: The answer that declines.
            harmful: Whether agreeing loses something.
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


class StopScreen(ConfirmScreen):
    """Asks before stopping jobs; pressing the same key again agrees, however slow the terminal."""

    BINDINGS: ClassVar = [Binding("x", "answer(True)", "stop", show=False, id="jobs.stop_job")]
    AUTO_FOCUS = "#yes"
