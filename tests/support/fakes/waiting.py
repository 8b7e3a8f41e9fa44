"""Wait for what must come true, and no longer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Seconds after which something will not come true any more: for a machine under heavy load, not
# an expectation. The one patience of all tests.
PATIENCE: Final = 180.0


def attempts(
    condition: Callable[[], object],
    seconds: float = PATIENCE,
    *,
    told: Callable[[], object] = str,
) -> Iterator[None]:
    """Yield until the condition holds; whoever asks pauses between attempts, as fits its kind.

    Args:
        condition: Asked again and again.
        seconds: How long at most.
        told: What to show when it does not come true.

    Raises:
        AssertionError: The condition did not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come true in {seconds:g} s: {told()}"
        yield


def eventually(
    condition: Callable[[], object],
    seconds: float = PATIENCE,
    *,
    told: Callable[[], object] = str,
) -> None:
    """Return as soon as the condition holds; see `attempts`."""
    for _ in attempts(condition, seconds, told=told):
        time.sleep(0.02)
