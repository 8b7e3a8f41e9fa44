"""The plots screen, driven by keys."""

from __future__ import annotations

import csv
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from jobs.queue.states import State
from jobs.run.events import Scores
from jobs.run.rundir import event
from tests.support.tui.driven_app import all_said, running, shown
from tests.support.tui.made_up_runs import add_job, append_events, write_steps
from tests.support.tui.pilot import rest, until
from tui.plots.measures import COMMON, MEASURES
from tui.plots.screen import PickRunsScreen, PlotsScreen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.pilot import Pilot

    from jobs.queue.store import Store
    from tui.plots.panel import PlotsPanel


pytestmark = pytest.mark.usefixtures("no_processes")


@asynccontextmanager
async def plotting(
    store: Store, size: tuple[int, int] = (80, 24), select: int | None = None
) -> AsyncIterator[tuple[PlotsPanel, Pilot[None]]]:
    """The plots of the selected job."""
    async with running(store, size, select) as (app, pilot):
        await pilot.press("v")
        await until(pilot, lambda: isinstance(app.screen, PlotsScreen))
        screen = app.screen
        assert isinstance(screen, PlotsScreen)
        await until(pilot, lambda: screen.panel.rows)
        yield screen.panel, pilot


async def test_the_keys_of_what_is_shown_and_how(store: Store) -> None:
    write_steps(add_job(store, state=State.RUNNING), 100)
    async with plotting(store) as (panel, pilot):
        await until(pilot, lambda: "[1 loss]" in shown(panel) and "average of 10" in shown(panel))
        for number, measure in enumerate(MEASURES[:COMMON], 1):
            await pilot.press(str(number))
            assert panel.choices.shown == (measure,)
        await pilot.press("8", "n")
        assert panel.choices.measure == 0, "there are no scores, and no loss to the base"
        await pilot.press("N", "up")
        assert panel.choices.measure == COMMON - 2
        await pilot.press("down", "j", "k", "a")
        assert panel.choices.everything
        assert "gradient norm" in shown(panel)
        assert "[a all]" in shown(panel)
        await pilot.press("a", "1", "w")
        assert "no smoothing" in shown(panel)
        await pilot.press("w", "w", "w")
        assert "average of 20" in shown(panel)
        await pilot.press("W", "r")
        assert "average of 10 · no raw values" in shown(panel)
        await pilot.press("r", "l", "o")
        assert "log scale · outliers included" in shown(panel)
        await pilot.press("u")
        assert "over time" in shown(panel)


async def test_scores_have_tabs_where_there_are_any(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_steps(job, 30)
    append_events(job, *(Scores(n, clip_t=n / 100, dino_i=0.5).line() for n in (10, 20)))
    async with plotting(store, (120, 30)) as (panel, pilot):
        await until(pilot, lambda: "8 CLIP-T" in shown(panel) and "9 DINO-I" in shown(panel))
        await pilot.press("9")
        assert panel.choices.shown[0].name == "dino_i"
        await pilot.press("8")
        assert "[8 CLIP-T]" in shown(panel)
        assert "CLIP-T 0.2000" in shown(panel)
        await pilot.press("n", "n")
        assert panel.choices.measure == 0, "no tab for CLIP-I"


@pytest.mark.slow
async def test_values_are_read_along_the_axis(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    append_events(job, *[event("step", step=n, loss=n / 1000) for n in range(1, 201)])
    async with plotting(store) as (panel, pilot):
        await until(pilot, lambda: "loss 0.2000" in shown(panel))
        await pilot.press("left")
        assert panel.choices.cursor == 200
        await pilot.press("left")
        before = panel.choices.cursor
        assert before is not None
        assert 195 <= before < 200
        await pilot.press("H")
        assert panel.choices.cursor is not None
        assert panel.choices.cursor < before - 15
        await pilot.press("L", "right", "right")
        assert panel.choices.cursor == 200
        await pilot.press("home")
        assert panel.choices.cursor == 1
        assert "loss 0.0010" in shown(panel)
        assert "values at step 1 " in shown(panel)
        await pilot.press("y")
        assert pilot.app.clipboard.startswith("1 demo\tstep 1\tloss\t0.001")
        await pilot.press("end", "escape")
        assert panel.choices.cursor is None
        assert isinstance(pilot.app.screen, PlotsScreen)
        await pilot.click(panel, offset=(40, 12))
        assert panel.choices.cursor is not None
        assert 80 < panel.choices.cursor < 120
        await pilot.press("escape", "escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, PlotsScreen))


@pytest.mark.slow
async def test_the_axis_is_zoomed_and_moved(store: Store) -> None:
    write_steps(add_job(store, state=State.RUNNING), 200)
    async with plotting(store) as (panel, pilot):
        await until(pilot, lambda: panel.values.runs)
        await pilot.press("plus")
        extent = panel.choices.extent
        assert extent is not None
        assert extent[1] == 200
        assert "zoomed" in shown(panel)
        await pilot.press("comma", "less_than_sign")
        assert panel.choices.extent is not None
        assert panel.choices.extent[0] < extent[0]
        await pilot.press("full_stop", "greater_than_sign")
        assert panel.choices.extent == extent
        await pilot.press("equals_sign", "home")
        assert panel.choices.cursor == 1
        assert panel.choices.extent is not None
        assert panel.choices.extent[0] == 1, "what is read is shown"
        await pilot.press("minus", "0")
        assert panel.choices.extent is None


async def test_new_steps_are_drawn_and_nothing_new_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(store, state=State.RUNNING)
    async with plotting(store) as (panel, pilot):
        await until(pilot, lambda: "no data yet: loss" in shown(panel))
        await pilot.press("left", "plus", "comma", "home", "u", "a", "l", "ctrl+s", "y", "a")
        await until(pilot, lambda: "nothing to write yet" in all_said(pilot.app))
        write_steps(job, 50)
        await until(pilot, lambda: any("⠁" <= char <= "⣿" for char in shown(panel)))
        await rest(pilot.app)
        drawn: list[int] = []
        monkeypatch.setattr(type(panel), "draw", lambda self: drawn.append(1))
        looks = 0
        original = panel._reading._read

        def read(jobs: object) -> bool:
            nonlocal looks
            looks += 1
            return original(jobs)  # type: ignore[arg-type]

        monkeypatch.setattr(panel._reading, "_read", read)
        await until(pilot, lambda: looks > 5)
        assert drawn == []


def test_runs_with_a_curve_are_offered_first(store: Store) -> None:
    first = add_job(store, state=State.RUNNING)
    ended = add_job(store, state=State.COMPLETED)
    waiting = [add_job(store) for _ in range(3)]
    listed = PickRunsScreen(store.all(), [], first).list
    offered = [listed.get_option_at_index(n).value for n in range(listed.option_count)]
    assert offered == [ended.id, *(job.id for job in reversed(waiting))]


@pytest.mark.slow
async def test_runs_are_compared(store: Store) -> None:
    for name in ("one", "two", "three"):
        write_steps(add_job(store, name, state=State.COMPLETED), 60, seed=len(name))
    async with plotting(store, (120, 40), select=1) as (panel, pilot):
        await until(pilot, lambda: "1 one" in shown(panel))
        await pilot.press("c")
        await until(pilot, lambda: isinstance(pilot.app.screen, PickRunsScreen))
        await pilot.press("space", "j", "space", "k", "enter")
        await until(pilot, lambda: "▲ 3 three" in shown(panel) and "■ 2 two" in shown(panel))
        assert shown(panel).count("●") >= 3
        await pilot.press("r")
        assert "no raw values" not in shown(panel)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "written: " in all_said(pilot.app))
        path = next((store.get(1).run_dir.root / "plots").glob("*.csv"))
        assert str(path) in all_said(pilot.app)
        with path.open(newline="") as file:
            assert {row["name"] for row in csv.DictReader(file)} == {"one", "two", "three"}
        await pilot.press("c")
        await until(pilot, lambda: isinstance(pilot.app.screen, PickRunsScreen))
        await pilot.press("space", "escape")
        await until(pilot, lambda: isinstance(pilot.app.screen, PlotsScreen))
        assert len(panel.jobs) == 3
        await pilot.press("q")
        await until(pilot, lambda: not isinstance(pilot.app.screen, PlotsScreen))


@pytest.mark.slow
async def test_more_runs_than_can_be_told_apart_are_refused(store: Store) -> None:
    for number in range(8):
        add_job(store, f"job-{number}", state=State.COMPLETED)
    async with plotting(store) as (panel, pilot):
        await pilot.press("c")
        await until(pilot, lambda: isinstance(pilot.app.screen, PickRunsScreen))
        for _ in range(7):
            await pilot.press("space", "j")
        await pilot.press("enter")
        note = pilot.app.screen.query_one("#too-many")
        assert "the limit is 5" in str(note.content)  # type: ignore[attr-defined]
        await pilot.press("escape", "v")
        await until(pilot, lambda: not isinstance(pilot.app.screen, PlotsScreen))
        assert len(panel.jobs) == 1


@pytest.mark.slow
async def test_ten_thousand_steps_and_every_measure_have_room(store: Store) -> None:
    job = add_job(store, state=State.COMPLETED)
    write_steps(job, 10_000)
    async with plotting(store, (200, 60)) as (panel, pilot):
        await until(pilot, lambda: panel.values.runs and len(panel.values.runs[0].steps) == 10_000)
        await pilot.press("a", "left", "left")
        assert panel.choices.cursor is not None
        assert panel.choices.cursor < 10_000
