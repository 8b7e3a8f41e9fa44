"""All keys, from the table of actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.actions import ACTIONS, GROUP_TITLES

if TYPE_CHECKING:
    from textual.app import ComposeResult

_ABOUT = (
    "Quitting stops nothing: every job has a supervisor of its own, and a new dashboard shows "
    "the same jobs. Tab moves between the jobs and the log; the mouse works."
)


class HelpScreen(ModalScreen[None]):
    """Lists every action by group."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [Binding("escape,q,question_mark,f1,enter", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="help") as dialog:
            dialog.border_title = "keys"
            dialog.border_subtitle = "esc closes"
            dialog.can_focus = True
            yield Static(help_text(), id="keys")
            yield Static(_ABOUT, id="about")


def help_text() -> Content:
    """Every action under the heading of its group."""
    lines: list[Content] = []
    for group, title in GROUP_TITLES.items():
        lines.append(Content.from_markup(f"[b $primary]{title}[/]"))
        lines += [
            Content.from_markup("  [b $accent]$key[/]$gap$help", key=action.shown,
                                gap=" " * (7 - len(action.shown)), help=action.help)
            for action in ACTIONS
            if action.group == group
        ]  # fmt: skip
        lines.append(Content(""))
    return Content("\n").join(lines)
