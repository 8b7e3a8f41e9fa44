"""The base of a tab's content."""

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
    """A tab's content. It exists from when it is first opened until the screen closes."""

    KEYS: ClassVar[Sequence[Key]] = ()

    app: FsdpTui

    class KeysChanged(Message):
        """The available keys, or their meanings, have changed."""

    @property
    def keys(self) -> Sequence[Key]:
        """Return the keys available now, for the key line."""
        return self.KEYS

    @property
    def target(self) -> Widget | None:
        """Return the widget to focus, so that the pane's keys work."""
        return next((widget for widget in self.query("*") if widget.focusable), None)

    def update_from(self, look: Look) -> None:
        """Show new data; called only while the pane is visible."""

    def copy(self, text: str) -> None:
        """Copy a text, and say where it went."""
        from tui.terminal.clipboard import copy

        self.app.say(copy(self.app, text))
