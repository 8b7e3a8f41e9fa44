"""Each fix of Textual fixes something, and is still needed."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from textual.app import App
from textual.events import Resize
from textual.geometry import Size
from textual.screen import Screen
from textual.timer import Timer

import tui
from tests.support.tui.pilot import driven, until
from tui.terminal import textual_fixes
from tui.terminal.textual_fixes import fix_textual

MENDED = "Textual has fixed it: delete it from tui/terminal/textual_fixes.py"


async def ticks_of_a_late_timer(monkeypatch: pytest.MonkeyPatch) -> int:
    ticks: list[int] = []
    async with driven(App[None]()) as pilot:
        timer = Timer(pilot.app, 0.01, callback=lambda: ticks.append(1), repeat=0)
        seconds = itertools.count()
        with monkeypatch.context() as slow:
            slow.setattr("textual.timer._time.get_time", lambda: next(seconds))
            await timer._run()
    return len(ticks)


async def two_sizes_at_once() -> None:
    """Give a screen two sizes during a batch.

    Raises:
        RuntimeError: It is laid out again and again.
    """

    class Counting(Screen[None]):
        layouts = 0

        def on_resize(self) -> None:
            self.layouts += 1
            if self.layouts > 100:  # nothing else would ever run again
                self.app.exit()
                raise RuntimeError("one layout calls for the next")

    screen = Counting()
    app = App[None]()
    async with driven(app) as pilot:
        await app.push_screen(screen)
        with app.batch_update():
            for size in (Size(70, 20), Size(80, 24)):
                screen.post_message(Resize(size, size))
                screen.call_later(lambda: None)
            await pilot.pause()
        await pilot.pause()
        assert screen.size == (80, 24)
    assert screen.layouts < 10


async def test_a_timer_that_ticks_once_ticks_though_it_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_textual()
    assert await ticks_of_a_late_timer(monkeypatch) == 1
    monkeypatch.setattr(Timer, "__init__", textual_fixes.new_timer)
    assert await ticks_of_a_late_timer(monkeypatch) == 0, MENDED


async def test_two_sizes_at_once_come_to_rest_at_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_textual()
    await two_sizes_at_once()
    monkeypatch.setattr(Screen, "_screen_resized", textual_fixes.lay_out)
    with pytest.raises(RuntimeError, match="one layout calls"):  # if not, delete the fix
        await two_sizes_at_once()


async def test_who_waits_for_a_screen_and_is_cancelled_still_ends_the_app() -> None:
    """So nobody may wait for one. What has begun to close never gets its `Unmount`, either."""
    go_on = asyncio.Event()

    class Slow(Screen[None]):
        async def on_unmount(self) -> None:
            await go_on.wait()

    app = App[None]()
    async with driven(app) as pilot:
        await app.push_screen(slow := Slow())

        async def work() -> None:
            app.pop_screen()
            await app.push_screen_wait(Screen())

        worker = app.run_worker(work(), exit_on_error=False)
        await until(pilot, lambda: not slow.is_running)
        worker.cancel()
        await until(pilot, lambda: worker.is_finished)
        go_on.set()
        await asyncio.sleep(0)
        await until(pilot, lambda: not app.is_running)
    folder = Path(tui.__file__).parent
    waiting = [path for path in folder.rglob("*.py") if "push_screen_wait(" in path.read_text()]
    assert not waiting, "see docs/upstream.md"
