"""The last line of a screen: its keys, which can be clicked too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.content import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_GAP: Final = 2  # columns between two
_KEPT: Final = 2  # the last ones are help and the way out


def key_line(keys: Iterable[tuple[str, str, str]], width: int | None = None) -> Content:
    """Return the line.

    Args:
        keys: Action (of the screen, unless it names another place), keys as people read them,
            what it does.
        width: Columns. Where they are too few, those before the last two go.
    """
    keys = list(keys)
    while width is not None and len(keys) > _KEPT and _width(keys) > width:
        del keys[-_KEPT - 1]
    parts = (
        f"[@click={action if '.' in action else 'screen.' + action}][b $accent]{key}[/] {does}[/]"
        for action, key, does in keys
    )
    return Content.from_markup((" " * _GAP).join(parts))


def _width(keys: Sequence[tuple[str, str, str]]) -> int:
    return sum(len(key) + 1 + len(does) + _GAP for _, key, does in keys) - _GAP
