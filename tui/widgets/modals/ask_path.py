"""Ask for a path, with completion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from tui.widgets.path_input import PathInput, PathSuggester

if TYPE_CHECKING:
    from textual.app import ComposeResult


class AskPathScreen(ModalScreen[Path | None]):
    """Returns the path, or None when the person thought better of it."""

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
