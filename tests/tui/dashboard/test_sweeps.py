"""Sweeps on the dashboard: a group that folds, rows that say what differs, curves together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs.queue.states import State
from jobs.run.events import Validation
from jobs.service import sweep
from tests.support.tui.driven_app import running, said, shown
from tests.support.tui.made_up_runs import add_job, append_events, write_steps
from tests.support.tui.pilot import until
from tui.dashboard.jobs_panel import JobsPanel
from tui.dashboard.sweep_rows import heading_row, shape_of
from tui.look.snapshot import JobView
from tui.plots.screen import PlotsScreen

if TYPE_CHECKING:
    from jobs.queue.job import Job
    from jobs.queue.store import Store
    from tui.app.app import FsdpTui

pytestmark = pytest.mark.usefixtures("no_processes")

RATES = ["1e-5", "3e-5", "1e-4", "3e-4"]


@pytest.fixture
def swept(store: Store, job_values: dict[str, Any]) -> list[Job]:
    """Two jobs that have ended, one that trains and one that waits."""
    store.pause(True)
    made = sweep.expand(store, job_values | {"name": "cats"}, {"learning_rate": RATES})
    jobs = sweep.queue_all(store, sweep.plan_all(store, made, lambda spec: []))
    for job, low, state in zip(
        jobs[:3], (0.41, 0.352, 0.5), (State.COMPLETED, State.COMPLETED, None), strict=True
    ):
        store.claim(job.id, [], "starting")
        store.change(job.id, State.RUNNING, "all ranks are up")
        write_steps(job, 3)
        append_events(job, Validation(2, low).line())
        append_events(job, Validation(3, low + 0.1).line())
        if state is not None:
            store.change(job.id, state, "trained 3 steps")
    return jobs


def rows(app: FsdpTui) -> list[str]:
    return shown(app.dashboard.query_one(JobsPanel)).splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
async def test_rows_say_what_differs_and_mark_the_best(
    store: Store, swept: list[Job], width: int
) -> None:
    add_job(store, "alone")
    async with running(store, (width, 40)) as (app, pilot):
        await until(pilot, lambda: "★" in "".join(rows(app)))
        table = rows(app)[1:]
        assert [row[2:20].split()[:2] for row in table[:1]] == [["▾", "cats"]]
        assert "4 jobs · learning_rate" in table[0]
        assert table[0].split()[-2:] == ["loss", "val"]
        jobs = table[1:5]
        assert [" ".join(row.strip("▸ ").split()[:4]) for row in jobs] == [
            "1 lr 1e-5 completed:",
            "2 ★ lr 3e-5",
            f"3 lr 1e-4 {jobs[2].split()[3]}",
            "4 lr 3e-4 1st",
        ]
        assert "━" in jobs[2].split()[3]
        lows = ("0.4100", "0.3520", "0.5000")
        ends = {row.index(value) for row, value in zip(jobs, lows, strict=False)}
        assert len(ends) == 1, "columns stand below each other"
        assert "alone" in table[5]
        assert all(len(row) <= width for row in table)


async def test_a_sweep_folds_into_one_row_that_can_be_selected(
    store: Store, swept: list[Job]
) -> None:
    other = add_job(store, "alone")
    async with running(store, select=swept[1].id) as (app, pilot):
        await until(pilot, lambda: "★" in "".join(rows(app)))
        await pilot.press("z")
        table = rows(app)[1:]
        assert len(table) == 2
        assert table[0].startswith("▸ ▸ cats sweep  4 jobs · ")
        assert "2 completed" in table[0]
        assert table[0].rstrip().endswith("★ lr 3e-5  0.3520")
        await pilot.press("j")
        panel = app.dashboard.query_one(JobsPanel)
        assert panel.selected == other.id
        await pilot.press("z")
        assert "the selected job belongs to no sweep" in said(app)
        await pilot.press("k")
        assert panel.selected in [job.id for job in swept]
        await pilot.press("z")
        assert len(rows(app)) == 1 + 1 + 4 + 1


async def test_one_key_plots_all_of_a_sweep_that_has_trained(
    store: Store, swept: list[Job]
) -> None:
    other = add_job(store, "alone")
    async with running(store, select=swept[0].id) as (app, pilot):
        await until(pilot, lambda: "★" in "".join(rows(app)))
        await pilot.press("V")
        await until(pilot, lambda: isinstance(app.screen, PlotsScreen))
        assert isinstance(app.screen, PlotsScreen)
        assert [job.id for job in app.screen.panel.jobs] == [1, 2, 3]
        await pilot.press("escape")
        app.dashboard.query_one(JobsPanel).awaited = other.id
        await pilot.press("G")
        app.select(other.id)
        await pilot.press("V")
        await until(pilot, lambda: any("belongs to no sweep" in text for text in said(app)))


@pytest.mark.parametrize(
    ("values", "title"),
    [
        ([("high", {}), ("low", {})], "both experts  2 jobs · model_flavour"),
        ([("high", {"seed": 1}), ("low", {"seed": 2})], "both experts  2 jobs · model_flavour, "),
        ([(kind, {"seed": n}) for n in (1, 2) for kind in ("high", "low")], "sweep  4 jobs"),
        ([("high", {"seed": 1}), ("high", {"seed": 2})], "sweep  2 jobs"),
    ],
)
def test_a_heading_says_that_jobs_train_both_experts(
    store: Store, values: list[tuple[str, dict[str, int]]], title: str
) -> None:
    """Also of a pair of which one was resumed with another value; two pairs are a sweep."""
    views = [
        JobView(
            add_job(store, f"cats-{n}"), differs={"model_flavour": f"2.2-t2v-a14b-{kind}", **others}
        )
        for n, (kind, others) in enumerate(values)
    ]
    heading = "".join(
        span.text for span in heading_row("cats", views, shape_of(views, 120), folded=False)
    )
    assert heading.startswith(f"▾ cats {title}")
