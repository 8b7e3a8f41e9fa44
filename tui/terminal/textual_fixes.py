"""Workarounds for three bugs in Textual 8: two freeze the dashboard, one swallows keys.

docs/upstream.md has the reports. `tests/tui/terminal/test_textual_fixes.py` fails once Textual has
fixed one of them; delete its workaround then.
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

_VERSION: Final = "8."  # the affected versions; pyproject.toml allows no others

new_timer: Final = Timer.__init__
lay_out: Final = Screen._screen_resized
four: Final = ANSI_SEQUENCES_KEYS.get("\x1b4")


@wraps(new_timer)
def _new_timer(
    self: Timer, *args: Any, repeat: int | None = None, skip: bool = True, **options: Any
) -> None:
    # A late timer skips its ticks, and one that ticks only once never ticks: after an 8 ms pause at
    # the wrong moment, the dashboard would stop following its terminal's size.
    new_timer(self, *args, repeat=repeat, skip=skip and repeat != 0, **options)


def _lay_out(self: Screen[Any], size: Size) -> None:
    # A layout at another size than the screen's sends the screen that size again. If two sizes are
    # queued during a batch, each layout triggers the other forever, and no key is handled.
    lay_out(self, self.app.size)


# Textual maps ESC 4, which is alt+4 in tmux and most terminals, to macOS's ¢.
# Without an entry it would wait for more input; a named key is handled at once.
AltDigit: Final = Enum("AltDigit", {f"ALT_{n}": f"alt+{n}" for n in range(10)})  # type: ignore[misc]


def fix_textual() -> None:
    """Apply all workarounds; a second call changes nothing."""
    if textual.__version__.startswith(_VERSION):
        table = cast("dict[str, Any]", ANSI_SEQUENCES_KEYS)  # declared read-only
        table.update({f"\x1b{key.value[-1]}": (key,) for key in AltDigit})
        Timer.__init__ = _new_timer  # type: ignore[method-assign]
        Screen._screen_resized = _lay_out  # type: ignore[method-assign]
