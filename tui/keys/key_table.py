"""The keys of the job screen and its tabs: one table each for bindings, key line and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from textual.binding import Binding
from textual.content import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.binding import BindingType


# -- key line -------------------------------------------------------------------------------
# The last line of a screen: its keys, which are also clickable.


_GAP: Final = 2  # columns between two entries
_KEPT: Final = 2  # the last entries, help and quit, always stay


def key_line(keys: Iterable[tuple[str, str, str]], width: int | None = None) -> Content:
    """Return a key line.

    Args:
        keys: Action (on the screen, unless it has a namespace), displayed keys,
            description.
        width: Columns. If they do not fit, entries before the last two are dropped.
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


# -- key table ------------------------------------------------------------------------------


def bind(
    name: str,
    keys: str,
    about: str,
    *,
    action: str | None = None,
    label: str | None = None,
    shown: str | None = None,
) -> Binding:
    """Return a binding that footer, help, palette and keymaps can name.

    Args:
        name: Its id in keymaps, such as `log.next_match`.
        keys: Comma-separated Textual key names.
        about: A sentence for help and tooltips.
        action: The Textual action; default: the last part of the name.
        label: A word or two; default: the last part of the name.
        shown: The displayed keys; default: Textual's.
    """
    own = name.rpartition(".")[2]
    return Binding(
        keys,
        action or own,
        label or own.replace("_", " "),
        key_display=shown,
        tooltip=about,
        id=name,
    )


@dataclass(frozen=True)
class Key:
    """A key of a screen.

    Attributes:
        action: The Textual action, without `action_`.
        keys: Comma-separated Textual key names.
        shown: The displayed keys, which may include another entry's.
        label: A word or two.
        help: A sentence.
        line: Whether it is in the key line.
    """

    action: str
    keys: str
    shown: str
    label: str
    help: str
    line: bool = True

    @property
    def name(self) -> str:
        """Return the action as an identifier, such as `go-1` for `go(1)`."""
        words = "".join(char if char.isalnum() or char in "_-" else " " for char in self.action)
        return "-".join(words.split())


def bindings_of(scope: str, keys: Iterable[Key]) -> list[BindingType]:
    """Return bindings for the keys; ids begin with the scope."""
    return [
        Binding(
            key.keys,
            key.action,
            key.label,
            show=key.line,
            tooltip=key.help,
            id=f"{scope}.{key.name}",
        )
        for key in keys
    ]


def line_of(keys: Iterable[Key], width: int) -> Content:
    """Return the key line, shortened to the width; entries are clickable."""
    shown: list[Key] = []
    for key in (key for key in keys if key.line):
        if width_of([*shown, key]) - _GAP > width:
            break
        shown.append(key)
    # A bracket would start markup.
    return key_line(
        (f"press('{key.keys.split(',')[0]}')", key.shown.replace("[", "\\["), key.label)
        for key in shown
    )


def width_of(keys: Iterable[Key]) -> int:
    """Return the columns that keys take in the key line, with the gap after each."""
    return sum(len(key.shown) + 1 + len(key.label) + _GAP for key in keys if key.line)


def moving(what: str, page: int = 10) -> tuple[Key, ...]:
    """Return the keys that move the cursor in a list of these items."""
    return (
        Key("go(1)", "j,down", "↑ ↓", what, f"Next {what}"),
        Key("go(-1)", "k,up", "k ↑", "previous", f"Previous {what}", line=False),
        Key(f"go({page})", "ctrl+d,pagedown", "^d", "page down", "Page down", line=False),
        Key(f"go(-{page})", "ctrl+u,pageup", "^u", "page up", "Page up", line=False),
        Key("go(-1000000)", "home,g", "g", "first", f"First {what}", line=False),
        Key("go(1000000)", "end,G,shift+g", "G", "last", f"Last {what}", line=False),
    )


def scrolling() -> tuple[Key, ...]:
    """Return the keys that scroll a text."""
    return (
        Key("scroll_by(1)", "j,down", "↑ ↓", "scroll", "Scroll down"),
        Key("scroll_by(-1)", "k,up", "k ↑", "up", "Scroll up", line=False),
        Key(
            "scroll_by(10)", "ctrl+d,pagedown", "^d", "page down", "Scroll a page down", line=False
        ),
        Key("scroll_by(-10)", "ctrl+u,pageup", "^u", "page up", "Scroll a page up", line=False),
        Key("scroll_by(-1000000)", "home,g", "g", "start", "Go to the start", line=False),
        Key("scroll_by(1000000)", "end,G,shift+g", "G", "end", "Go to the end", line=False),
    )
