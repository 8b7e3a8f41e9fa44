"""Whatever files say, no cell of the dashboard steers the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jobs.queue.states import State
from tests.support.tui.driven_app import running
from tests.support.tui.hostile import EVIL, add_evil_job, steering
from tests.support.tui.pilot import until
from tui.job.screen import JobScreen

if TYPE_CHECKING:
    from jobs.queue.store import Store
    from tui.app.app import FsdpTui

pytestmark = pytest.mark.usefixtures("no_processes")


def cells(app: FsdpTui) -> str:
    """All text that the terminal is sent."""
    strips = app.screen._compositor.render_strips()
    return "".join(one.text for strip in strips for one in strip if not one.control)


@pytest.mark.parametrize("state", [State.FAILED, State.RUNNING])
async def test_a_run_is_shown_without_what_its_files_would_do(store: Store, state: State) -> None:
    add_evil_job(store, state)
    async with running(store, (200, 50)) as (app, pilot):
        app.say(EVIL, "error")
        await until(pilot, lambda: "]52;c;" in cells(app))
        assert steering(cells(app)) == []
        await pilot.press("i")
        await until(pilot, lambda: isinstance(app.screen, JobScreen) and app.screen.is_mounted)
        for key in "1234567":
            await pilot.press(key)
            assert steering(cells(app)) == [], key
