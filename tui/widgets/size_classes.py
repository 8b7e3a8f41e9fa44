"""Set the breakpoint classes of a screen before it is first drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textual.screen import Screen


def set_size_classes(screen: Screen[Any]) -> None:
    """Set the size classes; call this while the screen is composed.

    Textual (8.2) sets them on the screen's first resize. That follows a first frame, which would
    briefly show another layout, and every widget would be styled twice.
    """
    for size, points in (
        (screen.app.size.width, screen.HORIZONTAL_BREAKPOINTS),
        (screen.app.size.height, screen.VERTICAL_BREAKPOINTS),
    ):
        if met := [name for least, name in sorted(points or []) if size >= least]:
            screen.add_class(met[-1])
