"""The last line of a screen: its keys, which can be clicked too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

if TYPE_CHECKING:
    from collections.abc import Iterable


def key_line(keys: Iterable[tuple[str, str, str]]) -> Content:
    """The line.

    Args:
        keys: Action (of the screen, unless it names another place), keys as people read them,
            what it does.
    """
    parts = (
        f"[@click={action if '.' in action else 'screen.' + action}][b $accent]{key}[/] {does}[/]"
        for action, key, does in keys
    )
    return Content.from_markup("  ".join(parts))
