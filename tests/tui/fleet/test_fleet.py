"""The fleet screen over a false ssh: rows, ages, hostile boxes, a visit."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from jobs.fleet.config import config_file
from tests.support.fleet import GPU, HEAD, JOB, FakeBoxes
from tests.support.tui.driven_app import all_said, running, shown
from tests.support.tui.hostile import EVIL, steering
from tests.support.tui.made_up_fleet import made_up_views
from tests.support.tui.pilot import shown_by, until
from tests.support.waiting import eventually_shown
from tui.fleet.rows import about_rows, box_rows, totals
from tui.fleet.screen import FleetScreen
from tui.text.format import plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from textual.pilot import Pilot

    from jobs.queue.store import Store
    from tui.app.app import FsdpTui


# A machine that speaks once and is not silent while a test looks.
SELDOM = HEAD | {"interval": 3600}


@pytest.fixture
def boxes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBoxes:
    made = FakeBoxes(tmp_path, monkeypatch)
    path = config_file()
    path.parent.mkdir(parents=True)
    machines = [{"name": name, "command": made.command} for name in ("big", "evil", "gone")]
    path.write_text(yaml.safe_dump({"machines": machines}), encoding="utf-8")
    made.says("big", SELDOM, JOB, GPU | {"job": 3}, GPU | {"gpu": 1, "utilisation": 0}, {"t": 1})
    evil = {"name": EVIL, "reason": EVIL, "state": EVIL}
    made.says("evil", SELDOM | {"host": EVIL}, JOB | evil, GPU | {"name": EVIL}, {"t": 1})
    made.away("gone", f"ssh: no route {EVIL}")
    return made


async def opened(app: FsdpTui, pilot: Pilot[None]) -> FleetScreen:
    await pilot.press("F")
    await until(pilot, lambda: isinstance(app.screen, FleetScreen) and app.screen.is_mounted)
    assert isinstance(app.screen, FleetScreen)
    return app.screen


async def test_boxes_are_shown_as_they_are(store: Store, boxes: FakeBoxes) -> None:
    async with running(store, (100, 30)) as (app, pilot):
        screen = await opened(app, pilot)
        await until(
            pilot, lambda: [v.status for v in screen.panel.views] == ["here", "here", "away"]
        )
        await until(pilot, lambda: "1 away" in shown_by(app))
        rows = shown(screen.panel).splitlines()
        assert re.search(r"big +\S+ +1 of 2 free +1 +0 +0 +20% cats", rows[1])
        assert "away, never seen: " in rows[3]
        assert "3 machines" in shown_by(app)
        about = shown(screen.about)
        assert re.search(r"GPU +0 +97% .* job 3", about)
        assert re.search(r"3 cats +● running +40/200", about)
        await pilot.press("j")
        assert "GPU  0" in shown(screen.about)
        assert steering(shown_by(app)) == []
        await pilot.press("j")
        assert steering(shown_by(app)) == []
        assert "GPU" not in shown(screen.about)
        boxes.says("gone", SELDOM, {"t": 1})
        boxes.away("gone", None)
        await pilot.press("r")
        await until(pilot, lambda: screen.panel.views[2].status == "here")
        await pilot.press("escape")
        assert app.screen is app.dashboard
    watch = screen.watch_boxes
    assert watch is not None
    await eventually_shown(lambda: all(link._process is None for link in watch.links))


async def test_a_visit_gives_the_terminal_to_ssh(
    store: Store, boxes: FakeBoxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    visited: list[Any] = []

    @contextmanager
    def suspend() -> Iterator[None]:
        visited.append("suspended")
        yield
        visited.append("resumed")

    def call(command: list[str], **_: Any) -> int:
        visited.append(command)
        return 255

    monkeypatch.setattr("tui.fleet.visit.subprocess.call", call)
    monkeypatch.setattr("sys.__stdin__", None)
    async with running(store, (80, 24), read_only=True) as (app, pilot):
        screen = await opened(app, pilot)
        await until(pilot, lambda: screen.panel.count == 3)
        monkeypatch.setattr(app, "suspend", suspend)
        await pilot.press("enter")
        assert visited[0] == "suspended"
        assert visited[2] == "resumed"
        command = visited[1]
        assert command[:2] == ["ssh", "-t"]
        assert command[-2:] == ["big", f"{boxes.command} --read-only"]
        assert "BatchMode=yes" not in command
        assert "big: ssh ended with status 255" in all_said(app)


async def test_without_machines_it_says_how(store: Store) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        await opened(app, pilot)
        text = shown_by(app)
        assert "No machines yet" in text
        assert "- trainer1" in text
        for key in ("enter", "r", "j", "J"):
            await pilot.press(key)
    config_file().parent.mkdir(parents=True)
    config_file().write_text("machines: 3", encoding="utf-8")
    async with running(store, (80, 24)) as (app, pilot):
        await opened(app, pilot)
        assert "machines.yaml: machines: " in shown_by(app).replace("\n", "")


@pytest.mark.parametrize("width", [30, 76, 116, 196])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_rows_fit_their_lines(width: int, count: int) -> None:
    views = made_up_views(count)
    now = max(view.heard or 0 for view in views)
    for row in [row for view in views for row in about_rows(view, now, width)]:
        assert len(plain(row)) <= max(width, 76)
    rows = box_rows(views, now, width)
    assert len(rows) == count + 1
    if width >= 76:
        assert all(len(plain(row)) <= width for row in rows)
    if count >= 3:
        assert "away 3 min" in plain(rows[3]) or width == 30
        assert "1 away" in totals(views[:3], now)
