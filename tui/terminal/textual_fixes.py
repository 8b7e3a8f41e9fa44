"""Two bugs of Textual 8 that stop the dashboard, fixed from outside.

docs/upstream.md has the reports. `tests/tui/terminal/test_textual_fixes.py` fails once Textual has
fixed one of them: then delete it here.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import textual
from textual.screen import Screen
from textual.timer import Timer

if TYPE_CHECKING:
    from textual.geometry import Size

_VERSION: Final = "8."  # the versions that have them; pyproject.toml admits no others

new_timer: Final = Timer.__init__
lay_out: Final = Screen._screen_resized


@wraps(new_timer)
def _new_timer(
    self: Timer, *args: Any, repeat: int | None = None, skip: bool = True, **options: Any
) -> None:
    # A late timer skips its ticks. One that ticks once would never tick: after a pause of 8 ms at
    # the wrong moment, the dashboard would not follow its terminal's size any more.
    new_timer(self, *args, repeat=repeat, skip=skip and repeat != 0, **options)


def _lay_out(self: Screen[Any], size: Size) -> None:
    # A layout at another size than the screen's sends the screen that size again. If two sizes wait
    # in its queue during a batch, each layout calls for the other forever, and no key is answered.
    lay_out(self, self.app.size)


def fix_textual() -> None:
    """Apply both; a second call changes nothing."""
    if textual.__version__.startswith(_VERSION):
        Timer.__init__ = _new_timer  # type: ignore[method-assign]
        Screen._screen_resized = _lay_out  # type: ignore[method-assign]
