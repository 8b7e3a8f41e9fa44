"""Lines of text around the fields."""

from __future__ import annotations

from textual.widgets import Static


class Links(Static):
    """Text of which parts can be clicked, in the colours it has."""

    def on_mount(self) -> None:
        self.auto_links = False


def reveal(place: Static, text: str) -> None:
    """Show a line that takes no room while it says nothing."""
    show(place, text)
    place.set_class(bool(text), "-shown")


def show(place: Static, text: str) -> None:
    """Update the text if it changed: Textual repaints at every update."""
    if place.content != text:
        place.update(text)
