"""Wait for what must come true, and no longer. The one patience of all tests is here."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

# After this many seconds it will not come true any more. No expectation: tests pass on a machine
# that is busy with eight other things, and only a test that fails anyway waits this long.
PATIENCE: Final = 180.0
_LOOK_EVERY: Final = 0.02  # seconds


def attempts(
    condition: Callable[[], object], seconds: float = PATIENCE, *, told: Callable[[], object] = str
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
    condition: Callable[[], object], seconds: float = PATIENCE, *, told: Callable[[], object] = str
) -> None:
    """Return as soon as the condition holds; see `attempts`."""
    for _ in attempts(condition, seconds, told=told):
        time.sleep(_LOOK_EVERY)


async def eventually_shown(
    condition: Callable[[], object],
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    *,
    told: Callable[[], object] = str,
) -> None:
    """`eventually`, for a test that runs in the event loop it waits for.

    `pause` lets the event loop work for this many seconds, as `Pilot.pause` does.
    """
    for _ in attempts(condition, told=told):
        await pause(_LOOK_EVERY)
