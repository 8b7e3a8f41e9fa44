"""The dashboard as tests drive it: opened, its form, what it says."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.tui.pilot import driven, until
from tests.support.waiting import PATIENCE
from tui.app.app import FsdpTui
from tui.form.fields import FieldRow
from tui.form.screen import NewJobScreen
from tui.settings import Settings
from tui.text.format import plain
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.app import App
    from textual.pilot import Pilot

    from jobs.queue.store import Store
    from tui.look.snapshot import Snapshot
    from tui.widgets.lines import Lines


@asynccontextmanager
async def running(
    store: Store, size: tuple[int, int] = (120, 40), select: int | None = None, **settings: Any
) -> AsyncIterator[tuple[FsdpTui, Pilot[None]]]:
    """The app with its first snapshot on the screen.

    Args:
        store: The jobs.
        size: Columns and lines.
        select: The job to begin with.
        settings: What the person has set for good.
    """
    app = FsdpTui(store, select=select, settings=Settings(**settings))
    app.NOTIFICATION_TIMEOUT = PATIENCE  # type: ignore[misc]  # a busy test may look late
    async with driven(app, size) as pilot:
        await until(pilot, lambda: app.dashboard.snapshot.t > 0)
        yield app, pilot


async def another_look(app: FsdpTui, pilot: Pilot[None]) -> None:
    """Wait until the jobs were looked at again, whatever there is to see."""
    seen: list[Snapshot] = []
    app.snapshots.subscribe(app, seen.append, immediate=True)
    app.collector.wake()
    await until(pilot, lambda: len(seen) >= 2)  # the first may have been under way
    app.snapshots.unsubscribe(app)


def said(app: FsdpTui) -> list[str]:
    """What the app has told, message by message."""
    return [str(note.message) for note in app._notifications]


def all_said(app: App[Any]) -> str:
    return "\n".join(str(note.message) for note in app._notifications)


async def question(app: FsdpTui, pilot: Pilot[None]) -> ConfirmScreen:
    """The question that is asked next."""
    await until(pilot, lambda: isinstance(app.screen, ConfirmScreen) and app.screen.is_mounted)
    assert isinstance(app.screen, ConfirmScreen)
    return app.screen


def shown(panel: Lines) -> str:
    """The rows of a panel, without colors."""
    return "\n".join(plain(row) for row in panel.rows)


def field(app: FsdpTui, name: str) -> FieldRow:
    return app.screen.query_one(f"#row-{name}", FieldRow)


def error_of(app: FsdpTui, name: str) -> str:
    return str(field(app, name).query_one(".error").content)  # type: ignore[attr-defined]


@asynccontextmanager
async def form(
    store: Store, key: str = "n", size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[FsdpTui, Pilot[None]]]:
    """The form, opened by its key and ready to be typed into."""
    async with running(store, size) as (app, pilot):
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen) and app.screen.is_mounted)
        await until(pilot, lambda: app.screen.query("#field-name"))
        yield app, pilot
