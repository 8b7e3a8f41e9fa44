"""The dashboard as tests drive it: opened, its form, what it says."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.support.tui import (
    until,
)
from tui.app import FsdpTui
from tui.newjob.field_row import FieldRow
from tui.newjob.screen import NewJobScreen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.pilot import Pilot

    from jobs.store import Store


@asynccontextmanager
async def running(
    store: Store, size: tuple[int, int] = (120, 40), select: int | None = None
) -> AsyncIterator[tuple[FsdpTui, Pilot[None]]]:
    """The app with its first snapshot on the screen."""
    app = FsdpTui(store, select=select)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.dashboard.snapshot.t > 0)
        yield app, pilot


def said(app: FsdpTui) -> list[str]:
    return [str(note.message) for note in app._notifications]


def field(app: FsdpTui, name: str) -> FieldRow:
    return app.screen.query_one(f"#row-{name}", FieldRow)


def error_of(app: FsdpTui, name: str) -> str:
    return str(field(app, name).query_one(".error").content)  # type: ignore[attr-defined]


@asynccontextmanager
async def form(
    store: Store, key: str = "n", size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[FsdpTui, Pilot[None]]]:
    async with running(store, size) as (app, pilot):
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen) and app.screen.is_mounted)
        await until(pilot, lambda: app.screen.query("#field-name"))
        yield app, pilot
