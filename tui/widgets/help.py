"""The help of a screen, generated from its bindings."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, ClassVar

from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.keys.screen_keys import screen_keys

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.events import Resize
    from textual.screen import Screen

    from tui.keys.screen_keys import ScreenKey


_ABOUT = (
    "Quitting stops no jobs: each has its own supervisor, and a new dashboard shows the same "
    "jobs. Tab moves between the parts of a screen; the mouse works. To change keys, see "
    "`fsdp-tui settings`."
)
_WIDEST = 16  # columns for the keys
_MOST, _FRAME = 76, 3  # columns of the dialog, and of its margin and scrollbar; see modals.tcss


class Keys(Static):
    """The list of keys; wrapped lines are indented."""

    def __init__(self, keys: list[ScreenKey], width: int) -> None:
        """
        Args:
            keys: The keys to list.
            width: Its final width in columns, so that it is painted once.
        """
        super().__init__(help_text(keys, width), id="keys")
        self.keys = keys
        self._width = width

    def on_resize(self, event: Resize) -> None:
        if event.size.width != self._width:
            self._width = event.size.width
            self.update(help_text(self.keys, self._width))


class HelpScreen(ModalScreen[None]):
    """Lists what the keys of another screen do."""

    CSS_PATH = "modals.tcss"
    BINDINGS: ClassVar = [
        Binding("escape,q,question_mark,f1,enter", "dismiss", "close", id="help.close"),
        Binding("j,down", "scroll(1)", "scroll down", id="help.down"),
        Binding("k,up", "scroll(-1)", "scroll up", id="help.up"),
        Binding("ctrl+d,pagedown,space", "scroll(10)", "ten lines down", id="help.page_down"),
        Binding("ctrl+u,pageup", "scroll(-10)", "ten lines up", id="help.page_up"),
        Binding("home,g", "scroll(-1000000)", "first line", id="help.first"),
        Binding("end,G,shift+g", "scroll(1000000)", "last line", id="help.last"),
    ]

    def __init__(self, about: Screen[Any]) -> None:
        super().__init__()
        self.keys = screen_keys(about)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog", id="help", can_focus=False) as dialog:
            dialog.styles.max_height = _highest(self.app.size.height)
            dialog.border_title = "keys"
            dialog.border_subtitle = "↑ ↓ scroll · esc close"
            width = min(_MOST, self.app.size.width * 9 // 10) - _FRAME
            yield Keys(self.keys, width)
            yield Static(_ABOUT, id="about", markup=False)

    def on_resize(self, event: Resize) -> None:
        self.query_one("#help").styles.max_height = _highest(event.size.height)

    def action_scroll(self, by: int) -> None:
        self.query_one("#help").scroll_relative(y=by, animate=False)


def _highest(lines: int) -> int:
    """Return the dialog's height; more than 40 lines are slow to send, and to read."""
    return min(40, lines * 9 // 10)


def help_text(keys: list[ScreenKey], width: int) -> Content:
    """Return every key under its section's heading, formatted for this width."""
    widest = min(_WIDEST, max((len(key.shown) for key in keys), default=0))
    room = max(20, width - widest - 4)
    lines: list[Content] = []
    section = ""
    for key in keys:
        if key.section != section:
            section = key.section
            lines += [Content(""), Content.from_markup("[b $primary]$title[/]", title=section)]
        wrapped = textwrap.wrap(key.help[:1].upper() + key.help[1:], room)
        lines.append(
            Content.from_markup(
                "  [b $accent]$key[/]  $help", key=key.shown.ljust(widest), help=wrapped[0]
            )
        )
        lines += [Content(" " * (widest + 4) + more) for more in wrapped[1:]]
    return Content("\n").join(lines[1:])
