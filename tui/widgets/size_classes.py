"""The classes of a screen's breakpoints, set before it is drawn for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textual.screen import Screen


def set_size_classes(screen: Screen[Any]) -> None:
    """To be called when the screen is composed.

    Textual (8.2) sets them with the screen's first resize. That comes after a first frame, which
    would show another layout for a moment, and every widget would be styled twice.
    """
    for size, points in (
        (screen.app.size.width, screen.HORIZONTAL_BREAKPOINTS),
        (screen.app.size.height, screen.VERTICAL_BREAKPOINTS),
    ):
        if met := [name for least, name in sorted(points or []) if size >= least]:
            screen.add_class(met[-1])
