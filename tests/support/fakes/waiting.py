"""Wait for what must come true, and no longer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def eventually(
    condition: Callable[[], object], seconds: float = 60.0, *, told: Callable[[], object] = str
) -> None:
    """Return as soon as the condition holds.

    Args:
        condition: Asked again and again.
        seconds: After so long it will not come true any more; generous, for a loaded machine.
        told: What to show when it does not.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come true in {seconds:g} s: {told()}"
        time.sleep(0.02)
