"""Timers that tick once do tick, on a busy machine too.

Textual 8 leaves out the ticks for which a timer is late. Where there is one tick only, what waited
for it never happens: after a process was held up for 8 ms in the wrong moment, the dashboard would
not follow its terminal's size any more.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from textual.timer import Timer

_begin = Timer.__init__


@wraps(_begin)
def _begin_surely(
    self: Timer, *args: Any, repeat: int | None = None, skip: bool = True, **options: Any
) -> None:
    _begin(self, *args, repeat=repeat, skip=skip and repeat != 0, **options)


def keep_single_timers() -> None:
    """From now on no timer that ticks once skips its tick; a second call changes nothing."""
    Timer.__init__ = _begin_surely  # type: ignore[method-assign]
