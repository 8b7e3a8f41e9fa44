"""What lies behind a tab of the job screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import Vertical
from textual.message import Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.widget import Widget

    from tui.app.app import FsdpTui
    from tui.keys.key_table import Key
    from tui.look.job_look import Look


class Pane(Vertical):
    """A tab's content. It is there from when it is first opened until the screen closes."""

    KEYS: ClassVar[Sequence[Key]] = ()

    app: FsdpTui

    class KeysChanged(Message):
        """Other keys do something now, or do something else."""

    @property
    def keys(self) -> Sequence[Key]:
        """What can be pressed now, for the key line."""
        return self.KEYS

    @property
    def target(self) -> Widget | None:
        """What gets the focus, so that the pane's keys work."""
        return next((widget for widget in self.query("*") if widget.focusable), None)

    def update_from(self, look: Look) -> None:
        """Show a new look; only called while the pane can be seen."""

    def copy(self, text: str) -> None:
        """Copy a text, and tell where it is."""
        from tui.terminal.clipboard import copy

        self.app.say(copy(self.app, text))
