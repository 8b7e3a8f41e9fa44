"""A pilot that presses a key and goes on as soon as the app has done all that it can do.

Textual's own waits until the whole process has been idle for a fiftieth of a second, twice for
each key, which takes long on a busy machine and still says nothing of what a thread will bring.
Here nothing waits for time to pass: what a thread or a timer brings is waited for by `until`.
"""

from __future__ import annotations

import asyncio
import unicodedata
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from textual.app import App, ReturnType, ScreenStackError
from textual.events import Key
from textual.keys import REPLACED_KEYS, _character_to_key, _get_unicode_name_from_key
from textual.pilot import Pilot

from tests.support.tui import threads
from tests.support.waiting import PATIENCE, attempts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from textual.timer import Timer

_POLL: Final = 0.01  # seconds between two looks at a condition
_SOON: Final = 0.5  # seconds; a timer of more is for what comes by itself, as a message's end
_ROUNDS: Final = 100_000  # of the event loop, after which an app will never rest

settling: Final[set[App[Any]]] = set()  # two dashboards may be open in one test


async def settle(app: App[Any]) -> bool:
    """Let the app do all that it can do now: handle its messages, lay out, paint.

    It has when none of its tasks has anything left to run, and painting what has changed gives
    them nothing either.

    Returns:
        Whether there was anything to do for its tasks.
    """
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    settling.add(app)
    try:
        for turn in range(_ROUNDS):
            await asyncio.sleep(0)  # all others run; what they start comes after us
            if len(ready) >= len(settling):  # more than those who wait here as well
                continue
            try:
                app.screen._on_timer_update()
            except ScreenStackError:  # it has ended
                return turn > 0
            if len(ready) < len(settling):
                return turn > 0
    finally:
        settling.discard(app)
    raise AssertionError("the app never rests")


async def until(pilot: Pilot[Any], true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition; fail when it does not come true."""
    await settle(pilot.app)
    for _ in attempts(true, seconds, told=lambda: shown_by(pilot.app)):
        await asyncio.sleep(_POLL)
        await settle(pilot.app)


async def rest(app: App[Any]) -> None:
    """Wait until nothing will happen any more without a key, or something new in a file.

    Threads that look again and again have looked, and what they found is on the screen.
    """
    rested: set[int] = set()
    while True:
        await settle(app)
        told = lambda: f"{threads.busy(rested)} {_due_soon(app)}\n{shown_by(app)}"  # noqa: E731
        for _ in attempts(lambda: not threads.busy(rested) and not _due_soon(app), told=told):
            await asyncio.sleep(_POLL)
            await settle(app)
        if not await settle(app):  # else what a thread brought last was handled only now
            return


def _due_soon(app: App[Any]) -> list[Timer]:
    """Timers that tick once, and soon."""
    timers = [timer for pump in (app, *app._registry) for timer in list(pump._timers)]
    return [
        timer
        for timer in timers
        if timer._repeat == 0
        and timer._interval <= _SOON
        and timer._task is not None
        and not timer._task.done()
    ]


def shown_by(app: App[Any]) -> str:
    """All that is on the screen, as it goes to the terminal."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line) for line in lines)


class Keys(Pilot[ReturnType]):
    """Presses keys; see the module."""

    async def press(self, *keys: str) -> None:
        for key in keys:
            event = Key(*_named(key))
            event.set_sender(self.app)
            self.app.post_message(event)
            await settle(self.app)

    async def pause(self, delay: float | None = None) -> None:
        """Wait for so many seconds, and for what the app has to do."""
        if delay is not None:
            await asyncio.sleep(delay)
        await settle(self.app)


@asynccontextmanager
async def driven(
    app: App[ReturnType], size: tuple[int, int] = (80, 24)
) -> AsyncIterator[Keys[ReturnType]]:
    """The app, to press keys in; its threads tend no queue any more when it is over.

    They would go on without what a test has put in the place of processes and devices.
    """
    try:
        async with app.run_test(size=size):
            yield Keys(app)
    finally:
        for _ in attempts(lambda: not threads.collecting()):
            await asyncio.sleep(_POLL)


def _named(key: str) -> tuple[str, str | None]:
    """A key's name and the character that it types, as `App._press_keys` finds them."""
    if len(key) == 1 and not key.isalnum():
        key = _character_to_key(key)
    name = _get_unicode_name_from_key(REPLACED_KEYS.get(key, key))
    try:
        return key, unicodedata.lookup(name)
    except KeyError:
        return key, key if len(key) == 1 else None
