"""Screens are laid out at the size that the terminal has now.

In Textual 8 a layout at another size tells the screen of that size once more. Where two sizes wait
in its queue while a batch is on, as after a resize while the screen is being made, each layout so
calls for the other, without end, and no key is answered any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.screen import Screen

if TYPE_CHECKING:
    from textual.geometry import Size

_lay_out = Screen._screen_resized


def _lay_out_now(self: Screen[Any], size: Size) -> None:
    _lay_out(self, self.app.size)


def keep_present_size() -> None:
    """From now on a size that is past is not laid out; a second call changes nothing."""
    Screen._screen_resized = _lay_out_now  # type: ignore[method-assign]
