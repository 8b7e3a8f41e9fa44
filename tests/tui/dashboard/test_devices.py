"""The panels of devices and jobs: whose memory, what holds back, who keeps up, who waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.machine import devices
from jobs.machine.devices import Gpu, GpuProcess
from jobs.machine.processes import RUN_ID_VARIABLE, wait_for_by_hand
from jobs.queue.states import State
from jobs.service import Progress
from jobs.units import ordinal
from tests.support.nvml_stub.stub import gpu as played
from tests.support.tui import driven_app
from tests.support.tui.driven_app import shown
from tests.support.tui.made_up_runs import (
    GIB,
    FakeGpus,
    add_job,
    nothing_starts,
    write_rank,
    write_steps,
)
from tests.support.tui.pilot import until
from tui.dashboard.device_rows import columns as device_columns
from tui.dashboard.device_rows import device_head, device_rows, devices_title, hint_of, links
from tui.dashboard.gpus import GpusPanel, GpusScreen, gpus_rows, graph
from tui.dashboard.jobs_panel import job_groups, queue_places
from tui.dashboard.panels import DevicesPanel, redraw_after
from tui.dashboard.rank_lines import (
    Seat,
    Split,
    keeping_up,
    rank_table,
    rank_title,
    split_bar,
    split_of,
    whoami,
)
from tui.look import collector
from tui.look.collector import EVERY, History, where_of
from tui.look.snapshot import JobView, Snapshot, in_order, in_step
from tui.text.format import plain, sparkline
from tui.widgets.job_rows import columns, job_row

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from textual.pilot import Pilot

    from jobs.queue.store import Store
    from tests.support.nvml_stub.stub import StubNvml
    from tui.app.app import FsdpTui

WAITS = "import time; time.sleep(600)"

pytest_plugins = ["tests.support.nvml_stub.fixture"]

CARD = Gpu(0, "GPU-0000", "NVIDIA H200", 100 * GIB, memory_used=80 * GIB, utilisation=97)


def seat(store: Store, name: str = "demo", **rank: Any) -> Seat:
    """A rank of a new running job on `CARD`."""
    job = add_job(store, name, state=State.RUNNING)
    write_rank(job, 0, **{"device_uuid": CARD.uuid, "pid": 4000 + job.id} | rank)
    view = JobView(job, ranks=tuple(job.run_dir.rank_statuses()))
    return Seat(view, view.ranks[0])


def process(pid: int, gibibytes: int, command: str | None = "python x.py") -> GpuProcess:
    return GpuProcess(pid, gibibytes * GIB, user="anna", command=command)


# -- whose memory --------------------------------------------------------------------------


def test_memory_is_the_selected_jobs_our_others_and_not_ours(store: Store) -> None:
    mine, other = seat(store), seat(store, "other")
    card = replace(
        CARD,
        processes=(process(4001, 30), process(4002, 20), process(77, 25)),
    )
    split = split_of(card, [mine, other], 1, claimed=True)
    assert split == Split(35 * GIB, 20 * GIB, 25 * GIB)  # what nobody is named for is the job's


def test_without_matching_pids_what_torch_reserved_counts(store: Store) -> None:
    mine = seat(store, reserved=60 * GIB)
    card = replace(CARD, processes=(process(1_000_001, 70, command=None),))
    assert split_of(card, [mine], 1, claimed=True) == Split(80 * GIB, 0, 0)
    assert split_of(card, [mine], 9, claimed=True) == Split(0, 80 * GIB, 0)


def test_a_gpu_without_our_jobs_is_not_ours() -> None:
    assert split_of(CARD, [], None, claimed=False) == Split(0, 0, 80 * GIB)
    assert split_of(CARD, [], None, claimed=True).others == 0


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 60),
)
def test_a_split_bar_is_as_wide_as_asked(mine: int, ours: int, others: int, width: int) -> None:
    total = max(1, mine + ours + others)
    card = replace(CARD, memory_total=100 * GIB, memory_used=total * GIB)
    row = split_bar(card, Split(mine * GIB, ours * GIB, others * GIB), width)
    assert len(plain(row)) == width


def test_the_parts_of_a_bar_differ_without_colour() -> None:
    bar = plain(split_bar(CARD, Split(40 * GIB, 20 * GIB, 20 * GIB), 20))
    assert bar == "━━━━━━━━╍╍╍╍▒▒▒▒┄┄┄┄"


# -- a line --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [72, 76, 95, 96, 109, 110, 139, 140, 169, 170, 196, 250])
def test_lines_fit_whatever_there_is_to_say(store: Store, width: int) -> None:
    mine = seat(store, "a-very-long-name-of-a-job-that-cannot-fit")
    full = replace(
        CARD,
        temperature=91,
        power=699.4,
        power_limit=700.0,
        clock=1980,
        throttle="power limit",
        pcie_generation=5,
        pcie_lanes=8,
        pcie_lanes_limit=16,
        nvlinks=18,
    )
    names = (full, replace(full, index=1, uuid="GPU-1", name="NVIDIA RTX PRO 6000 Blackwell Max-Q"))
    snapshot = Snapshot(
        t=time.time(), jobs=(mine.view,), gpus=names, busy={CARD.uuid: tuple(range(0, 100, 3))}
    )
    for row in device_rows(snapshot, width, 20, 1):
        assert len(plain(row)) <= width, plain(row)


def test_what_holds_a_gpu_back_is_named_at_every_width(store: Store) -> None:
    hot = replace(CARD, throttle="heat", pcie_lanes=8, pcie_lanes_limit=16)
    for width in (76, 116, 196):
        line = plain(device_rows(Snapshot(t=0, gpus=(hot,)), width, 9)[0])
        assert "heat" in line
        assert "PCIe x8 of x16" in line
    calm = replace(CARD, throttle="", pcie_lanes=16, pcie_lanes_limit=16)
    assert hint_of(calm, device_columns(76)) == ""


def test_the_rank_stays_readable_where_a_name_is_cut(store: Store) -> None:
    mine = seat(store, "portraits-of-sailors-at-sea")
    snapshot = Snapshot(t=time.time(), jobs=(mine.view,), gpus=(CARD,))
    line = plain(device_rows(snapshot, 76, 1, 1)[0])
    assert line.endswith("… r0")
    assert "#1 portraits" in line


def test_links_are_named() -> None:
    assert links(replace(CARD, nvlinks=18)) == "18 NVLinks"
    assert links(replace(CARD, pcie_generation=4, pcie_lanes=16)) == "PCIe 4 x16"
    assert links(CARD) == ""


def test_a_sparkline_has_eight_heights_and_gaps() -> None:
    assert sparkline([0, 50, 100, None, 99], 7) == "  ▁▅█ █"
    assert sparkline(range(200), 4) == "████"


def test_links_come_from_the_driver(nvml: StubNvml) -> None:
    nvml.write([played(0, pcie=[5, 8, 16], nvlinks=[18, 17]), {}])
    first, second = devices.gpus()
    assert (first.pcie_generation, first.pcie_lanes, first.pcie_lanes_limit) == (5, 8, 16)
    assert first.nvlinks == 17
    assert (second.pcie_generation, second.nvlinks) == (None, None)


def test_a_column_of_the_history_is_the_average_of_two_seconds() -> None:
    history = History()
    for t, share in enumerate((10, 50, 90, 100, 80)):
        history.add(float(t), [replace(CARD, utilisation=share)])
    assert history.shown[CARD.uuid] == (10, 70, 90)
    history.add(9.0, [replace(CARD, utilisation=None)])
    assert history.shown[CARD.uuid][-1] is None
    before = history.shown
    history.add(9.0 + EVERY / 2, [CARD])
    assert history.shown is before  # nothing to paint


# -- ranks ---------------------------------------------------------------------------------


def statuses(store: Store, *changes: dict[str, Any]) -> JobView:
    job = add_job(store, state=State.RUNNING, ranks=len(changes))
    for rank, change in enumerate(changes):
        write_rank(job, rank, **change)
    return JobView(job, ranks=tuple(job.run_dir.rank_statuses()))


def test_a_rank_that_does_not_keep_up_is_named_in_words(store: Store) -> None:
    now = time.time()
    view = statuses(
        store,
        {"step": 20},
        {"step": 19},
        {"step": 12},
        {"step": 20, "heartbeat": now - 64},
        {"step": 20, "progressed": now - 190},
    )
    words = [keeping_up(rank, 20, now) for rank in view.ranks]
    assert [span.text for span in words] == [
        "ok",
        "ok",
        "! 8 steps behind",
        "! late 1:04",
        "stalled 3:10",
    ]
    assert [span.role == "bad" for span in words] == [False, False, True, True, False]
    assert rank_title(view, now).endswith("5 of 5 · late: 2,3")


@pytest.mark.parametrize("width", [76, 116, 196])
def test_the_table_of_ranks_aligns_and_fits(store: Store, width: int) -> None:
    view = statuses(
        store,
        *(
            {
                "step": 12345,
                "allocated": 61 * GIB,
                "reserved": 70 * GIB,
                "peak": 71 * GIB,
                "device_uuid": "GPU-0000",
                "phase": phase,
            }
            for phase in ("train", "validate")
        ),
    )
    head, *rows = (plain(row) for row in rank_table(view, [CARD], time.time(), width))
    assert len(rows) == 2
    for row in rows:
        assert len(row) <= width
        assert row[: head.index("reserved") + 8].endswith("70.0")
        assert row[: head.index("step") + 4].endswith("12345")


def test_late_ranks_come_first_where_not_all_can_be_seen(store: Store) -> None:
    cards = tuple(FakeGpus(4).gpus)
    view = statuses(
        store,
        *(
            {"device_uuid": card.uuid, "heartbeat": time.time() - 60 * (card.index == 3)}
            for card in cards
        ),
    )
    snapshot = Snapshot(t=time.time(), jobs=(view,), gpus=cards)
    lines = [plain(row) for row in device_rows(snapshot, 100, 5)]
    assert "! late" in lines[4]
    assert "r3" in lines[4]
    assert devices_title(snapshot) == "devices · 4 H200 · late: #1 r3"


# -- the table of jobs ---------------------------------------------------------------------


def grouped(store: Store, gpus: Sequence[Gpu]) -> list[tuple[str, list[int]]]:
    jobs = in_order(store.all())
    views = [JobView(job, where=where_of(job, gpus)) for job in jobs]
    return [
        (group.title, [view.job.id for view in group.views]) for group in job_groups(views, gpus)
    ]


def test_jobs_stand_with_those_they_share_gpus_with(store: Store) -> None:
    gpus = FakeGpus(6).gpus
    names = [gpu.uuid for gpu in gpus]
    add_job(store, "high", state=State.RUNNING, gpus=names[4:6])
    add_job(store, "low", state=State.RUNNING, gpus=names[0:2])
    add_job(store, "waits for low", wanted=[names[1]])
    add_job(store, "any", wanted=2)
    add_job(store, "alone", wanted=[names[3]])
    add_job(store, "old", state=State.COMPLETED, gpus=names[2:3])
    add_job(store, "on cpu")
    assert grouped(store, gpus) == [
        ("CPU", [7]),
        ("GPU 0,1", [2, 3]),
        ("GPU 3", [5]),
        ("GPU 4,5", [1]),
        ("any GPUs", [4]),
        ("ended", [6]),
    ]


def test_the_queue_is_shown_in_the_order_in_which_it_is_served(store: Store) -> None:
    for name in ("first", "second", "urgent"):
        add_job(store, name)
    jobs = [replace(job, priority=5) if job.name == "urgent" else job for job in store.all()]
    views = [JobView(job) for job in in_order(jobs)]
    assert [view.job.name for view in views] == ["urgent", "first", "second"]
    assert queue_places(views) == {3: "1st", 1: "2nd", 2: "3rd"}
    views[0] = JobView(replace(views[0].job, held=True))
    assert queue_places(views) == {1: "1st", 2: "2nd"}


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "111th",
    ]


@pytest.mark.parametrize("width", [58, 74, 116, 196])
def test_a_queued_job_says_its_place_and_why_it_waits(store: Store, width: int) -> None:
    running = JobView(add_job(store, "runs", state=State.RUNNING, total_steps=100_000))
    queued = JobView(add_job(store, "next", reason="waiting for job 1 on GPU 0"), where="0")
    shape = columns(Snapshot(t=0, jobs=(running, queued)), width)
    line = plain(job_row(queued, shape, "12th"))
    assert "queued 12th" in line
    assert "waiting for job" in line
    assert len(line) <= width


def test_a_curve_is_drawn_again_when_it_has_grown_by_a_column() -> None:
    assert redraw_after(0, 1, 30, 6) == 2
    assert redraw_after(4000, 4010, 40, 10) == 15
    assert redraw_after(4000, 4100, 40, 8) == 2
    assert redraw_after(4000, 4100, 100, 16) == 10  # a large one less often


# -- in the app ----------------------------------------------------------------------------


@asynccontextmanager
async def running(
    store: Store, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> AsyncIterator[tuple[FsdpTui, Pilot[None]]]:
    nothing_starts(monkeypatch)
    monkeypatch.setattr("jobs.machine.devices.gpus", FakeGpus(4))
    gpus = FakeGpus(4).gpus
    job = add_job(store, state=State.RUNNING, gpus=[gpu.uuid for gpu in gpus[:2]])
    write_steps(job, 10)
    for rank in range(2):  # the first is not late however long this takes
        write_rank(
            job,
            rank,
            device_uuid=gpus[rank].uuid,
            allocated=GIB,
            step=10,
            heartbeat=time.time() + (3600, -60)[rank],
        )
    add_job(store, "next", wanted=[gpus[0].uuid], ranks=1)
    async with driven_app.running(store, size) as (app, pilot):
        await until(pilot, lambda: app.dashboard.query_one(DevicesPanel).rows)
        yield app, pilot


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_a_key_shows_the_ranks_in_place_of_the_devices_and_back(
    store: Store, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    async with running(store, monkeypatch, size) as (app, pilot):
        panel = app.dashboard.query_one(DevicesPanel)
        assert "late: #1 r1" in str(panel.border_title)
        await pilot.press("R")
        await until(pilot, lambda: "reserved" in plain(panel.rows[0]))
        assert "! late" in shown(panel)
        assert "ranks of #1 demo" in str(panel.border_title)
        await pilot.press("R")
        await until(pilot, lambda: "GiB" in shown(panel) or "G" in shown(panel))
        assert "devices" in str(panel.border_title)


async def test_headings_name_the_gpus_and_cannot_be_selected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, monkeypatch, (120, 40)) as (app, pilot):
        panel = app.dashboard.jobs
        await until(pilot, lambda: "GPU 0,1" in shown(panel))
        assert panel.selected == 1
        await pilot.press("j")
        await until(pilot, lambda: panel.selected == 2)
        await pilot.press("k", "k")
        await until(pilot, lambda: panel.selected == 1)
        marked = [index for index in range(len(panel.rows)) if panel.is_marked(index)]
        assert [plain(panel.rows[index])[:4] for index in marked] == ["▸  1"]
        await pilot.click(panel, offset=(6, 2))  # the heading
        assert panel.selected == 1


@pytest.mark.slow
async def test_the_devices_get_room_on_a_low_screen_while_they_have_the_focus(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store, monkeypatch, (80, 24)) as (app, pilot):
        panel = app.dashboard.query_one(DevicesPanel)
        await until(pilot, lambda: panel.outer_size.height == 7)
        panel.focus()
        await until(pilot, lambda: panel.outer_size.height == 8)  # all there is
        assert app.dashboard.log_view.outer_size.height >= 5
        app.dashboard.jobs.focus()
        await until(pilot, lambda: panel.outer_size.height == 7)


def test_a_thousand_ended_jobs_cost_no_new_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch, no_gpus: None
) -> None:
    for number in range(3):
        write_steps(add_job(store, f"old-{number}", state=State.COMPLETED), 3)
    look = collector.Collector(store, selected=3)
    first, second = look.look(), look.look()
    assert [before is after for before, after in zip(first.jobs, second.jobs, strict=True)] == [
        False,
        True,
        True,
    ]
    assert [view.progress.step for view in second.jobs] == [3, 3, 3]
    store.requeue(1, "again")
    assert look.look().find(1) != second.find(1)


# -- many GPUs, few lines; few GPUs, many lines ---------------------------------------------------


def busy_server(store: Store) -> Snapshot:
    """Eight GPUs: four of a job, one of another person, one of hidden processes, two free."""
    cards = [replace(gpu, memory_used=0) for gpu in FakeGpus(8).gpus]
    view = statuses(
        store,
        *({"device_uuid": card.uuid, "pid": 4000 + card.index} for card in cards[:4]),
    )
    ours = [
        replace(card, memory_used=34 * GIB, processes=(GpuProcess(4000 + n, 34 * GIB, user="me"),))
        for n, card in enumerate(cards[:4])
    ]
    cards[:4] = ours
    cards[4] = replace(cards[4], memory_used=9 * GIB, processes=(process(77, 9),))
    cards[5] = replace(cards[5], memory_used=106 * GIB)
    return Snapshot(t=time.time(), jobs=(view,), gpus=tuple(cards))


def test_two_gpus_share_a_line_where_lines_are_few(store: Store) -> None:
    snapshot = busy_server(store)
    head = device_head(snapshot, 78, 5)
    assert head is not None
    lines = [plain(row) for row in device_rows(snapshot, 78, 4)]
    assert len(lines) == 4
    assert {len(line) for line in (plain(head), *lines)} <= {77, 78}
    left, right = lines[0].split("│")
    assert left.split()[0] == "0"
    assert "#1 demo r0" in left
    assert right.split()[0] == "4"
    assert "anna: python x" in right
    assert "hidden processes" in lines[1]
    assert lines[3].rstrip().endswith("free")


def test_processes_stand_below_the_gpus_where_lines_are_many(store: Store) -> None:
    snapshot = busy_server(store)
    lines = [plain(row) for row in device_rows(snapshot, 196, 28)]
    assert len(lines) == 8 + 1 + 6
    assert lines[9].split()[:5] == ["0", "4000", "me", "34.0", "GiB"]
    assert "#1 demo" in lines[9]
    assert "python x.py" in lines[13]
    assert lines[14].split() == ["5", "–", "–", "106", "GiB", "hidden", "processes"]
    # Fewer lines: GPUs alone, and no half of a table.
    assert len(device_rows(snapshot, 196, 11)) == 8


@pytest.mark.parametrize("size", [(78, 12), (78, 22), (118, 38), (198, 58), (198, 20)])
def test_the_gpu_screen_fits_its_lines(store: Store, size: tuple[int, int]) -> None:
    shares = tuple(range(0, 100, 2))
    snapshot = busy_server(store)
    uuids = [gpu.uuid for gpu in snapshot.gpus]
    snapshot = replace(
        snapshot, busy=dict.fromkeys(uuids, shares), filled=dict.fromkeys(uuids, shares)
    )
    rows = [plain(row) for row, _ in gpus_rows(snapshot, *size, 1)]
    assert max(map(len, rows)) <= size[0]
    if size[1] >= 38:
        assert len(rows) <= size[1]
        assert any("▇" in row for row in rows)


async def test_the_gpu_screen_ends_ones_own_stray_process_and_leaves_others_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_starts(monkeypatch)
    add_job(store, "cats", state=State.RUNNING)
    env = os.environ | {RUN_ID_VARIABLE: "r"}
    with (
        subprocess.Popen([sys.executable, "-c", WAITS]) as stray,
        subprocess.Popen([sys.executable, "-c", WAITS], env=env) as ours,
    ):
        wait_for_by_hand(stray.pid)
        processes = (
            GpuProcess(1, 3 * GIB, user="someone", command="python theirs.py"),
            GpuProcess(stray.pid, 2 * GIB, user=whoami(), command="python mine.py"),
            GpuProcess(ours.pid, 1 * GIB, user=whoami(), command="python worker.py"),
        )
        card = Gpu(0, "GPU-0", "H200", 140 * GIB, 6 * GIB, processes=processes)
        monkeypatch.setattr("jobs.machine.devices.gpus", lambda *_: [card])
        async with driven_app.running(store) as (app, pilot):
            await pilot.press("u")
            await until(pilot, lambda: isinstance(app.screen, GpusScreen) and app.screen.is_mounted)
            screen = app.screen
            assert isinstance(screen, GpusScreen)
            await until(pilot, lambda: screen.panel.target is not None)
            await pilot.press("T")
            assert "2 processes of yours belong to no job" in driven_app.said(app)[-1]
            await pilot.press("k", "T")
            assert "it is someone's" in driven_app.said(app)[-1]
            await pilot.press("j", "T")
            asked = await driven_app.question(app, pilot)
            assert "python mine.py" in asked.detail
            await pilot.press("n")
            assert stray.poll() is None
            await pilot.press("G", "T")
            await driven_app.question(app, pilot)
            await pilot.press("y")
            await until(pilot, lambda: any("belongs to a job" in t for t in driven_app.said(app)))
            assert ours.poll() is None
            # Three keys from the dashboard, where it is the only one.
            card = replace(card, processes=processes[:2])
            await pilot.press("escape", "u")
            await until(pilot, lambda: isinstance(app.screen, GpusScreen) and app.screen.is_mounted)
            seen = lambda: driven_app.shown(app.screen.query_one(GpusPanel))  # noqa: E731
            await until(pilot, lambda: "mine.py" in seen() and "worker.py" not in seen())
            await pilot.press("T")
            await driven_app.question(app, pilot)
            await pilot.press("y")
            await until(pilot, lambda: stray.poll() is not None)
        ours.kill()


async def test_enter_on_the_gpu_screen_goes_to_the_job(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_starts(monkeypatch)
    add_job(store, "first", state=State.RUNNING)
    job = add_job(store, "cats", state=State.RUNNING)
    write_rank(job, 0, device_uuid="GPU-0")
    card = Gpu(0, "GPU-0", "H200", 140 * GIB, 6 * GIB)
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda *_: [card])
    async with driven_app.running(store, select=1) as (app, pilot):
        await pilot.press("u")
        await until(pilot, lambda: isinstance(app.screen, GpusScreen))
        screen = app.screen
        assert isinstance(screen, GpusScreen)
        await until(pilot, lambda: len(screen.panel.rows) > 2)
        await pilot.press("G", "enter")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: app.dashboard.jobs.selected == job.id)


def test_a_graph_is_as_high_as_its_shares() -> None:
    assert graph((0, 50, 100, None), 5, 2) == ["   █ ", "  ██ "]
    assert graph((1,), 1, 1) == ["▁"]  # a little is not nothing


def test_one_step_is_named_everywhere_unless_a_rank_does_not_keep_up(store: Store) -> None:
    now = time.time()
    view = statuses(store, {"step": 130}, {"step": 133}, {"step": 90}, {"step": 129})
    told = in_step(view.ranks, Progress(step=132, seconds_per_step=0.4), now)
    assert [rank.step for rank in told] == [132, 132, 90, 132]
    long = statuses(store, {"step": 131, "heartbeat": now - 3600}, {"step": 0})
    told = in_step(long.ranks, Progress(step=132, seconds_per_step=0.4), now)
    assert [rank.step for rank in told] == [131, 0]
    assert in_step(view.ranks, Progress(), now) == view.ranks
    past = statuses(store, {"step": 131, "phase": "sample"}, {"step": 132, "phase": "save"})
    told = in_step(past.ranks, Progress(step=132, seconds_per_step=0.4), now, training=True)
    assert [rank.phase for rank in told] == ["train", "save"]
