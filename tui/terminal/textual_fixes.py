"""Three bugs of Textual 8, fixed from outside: two stop the dashboard, one takes keys from it.

docs/upstream.md has the reports. `tests/tui/terminal/test_textual_fixes.py` fails once Textual has
fixed one of them: then delete it here.
"""

from __future__ import annotations

from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, cast

import textual
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual.screen import Screen
from textual.timer import Timer

if TYPE_CHECKING:
    from textual.geometry import Size

_VERSION: Final = "8."  # the versions that have them; pyproject.toml admits no others

new_timer: Final = Timer.__init__
lay_out: Final = Screen._screen_resized
four: Final = ANSI_SEQUENCES_KEYS.get("\x1b4")


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


# Textual reads ESC 4, alt+4 in tmux and most terminals, as the ¢ that macOS writes with it.
# Without an entry it would wait for more to come; a key with a name is there at once.
AltDigit: Final = Enum("AltDigit", {f"ALT_{n}": f"alt+{n}" for n in range(10)})  # type: ignore[misc]


def fix_textual() -> None:
    """Apply all; a second call changes nothing."""
    if textual.__version__.startswith(_VERSION):
        table = cast("dict[str, Any]", ANSI_SEQUENCES_KEYS)  # declared read-only
        table.update({f"\x1b{key.value[-1]}": (key,) for key in AltDigit})
        Timer.__init__ = _new_timer  # type: ignore[method-assign]
        Screen._screen_resized = _lay_out  # type: ignore[method-assign]
