"""The job screen, every tab driven by keys, over run directories that no process writes to."""

from __future__ import annotations

import json
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from textual.geometry import Region

from jobs.hub.pushes import Push
from jobs.memory.fit import Fit, Room
from jobs.memory.ladder import Rung, Step
from jobs.queue.states import State
from jobs.run.failure import Cause, Failure, keep_failure
from jobs.run.rundir import event
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui import threads
from tests.support.tui.driven_app import all_said, question, running, shown
from tests.support.tui.made_up_runs import (
    GIB,
    add_job,
    append_events,
    write_facts,
    write_log,
    write_rank,
    write_steps,
)
from tests.support.tui.made_up_server import predict
from tests.support.tui.pilot import settle, until
from tests.support.waiting import PATIENCE, eventually_shown
from tui.dashboard.panels import activity_rows
from tui.job.checkpoints import CheckpointsPane
from tui.job.panes.config import PickJobScreen, command_rows
from tui.job.panes.glance_rows import head_rows, lost_words, start_rows
from tui.job.panes.overview import OverviewPane
from tui.job.panes.ranks import late_words, rank_rows
from tui.job.screen import JobScreen
from tui.job.tabs import NAMES, tab_line
from tui.keys.key_table import Key, line_of
from tui.log.screen import LogScreen
from tui.look.job_look import Looker
from tui.plots.screen import PickRunsScreen
from tui.text.format import plain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.pilot import Pilot

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RankStatus
    from tui.app.app import FsdpTui
    from tui.look.job_look import Look
    from tui.widgets.lines import Lines

SIZES = [(80, 24), (120, 40)]


pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was copied, instead of copying it."""
    texts: list[str] = []

    def copy(app: FsdpTui, text: str) -> str:
        texts.append(text)
        return "copied"

    monkeypatch.setattr("tui.terminal.clipboard.copy", copy)
    return texts


@pytest.fixture
def job(store: Store, job_values: dict[str, Any]) -> Job:
    """A running job with something behind every tab."""
    spec = load_spec(None, job_values | {"learning_rate": 0.0003, "max_train_steps": 200})
    job = add_job(store, "cats", state=State.RUNNING, job_file=dump_spec(spec))
    write_facts(job)
    write_steps(job, 40)
    for rank in range(2):
        write_rank(job, rank, step=40)
        write_log(job, "".join(f"line {n} of rank {rank}\n" for n in range(100)), rank)
    job.run_dir.launcher_log.write_text("the launcher speaks\n")
    save_checkpoint(job.run_dir, 30, spec.to_dict())
    return job


@asynccontextmanager
async def opened(
    store: Store, size: tuple[int, int] = (120, 40), *keys: str
) -> AsyncIterator[tuple[FsdpTui, Pilot[None], JobScreen]]:
    """The job screen of the first job, after these keys."""
    async with running(store, size) as (app, pilot):
        await pilot.press("i")
        await until(pilot, lambda: isinstance(app.screen, JobScreen))
        screen = app.screen
        assert isinstance(screen, JobScreen)
        await until(pilot, lambda: screen.look is not None)
        await pilot.press(*keys)
        yield app, pilot, screen


def text_of(screen: JobScreen, name: str) -> str:
    return str(screen.query_one(f"#{name}").content)  # type: ignore[attr-defined]


def lines_of(screen: JobScreen) -> Lines:
    """The rows of the open tab, of those that are text."""
    return screen.panes[screen.tab].lines  # type: ignore[attr-defined, no-any-return]


# -- tabs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_every_tab_opens_by_its_number_and_has_room(
    store: Store, job: Job, size: tuple[int, int]
) -> None:
    async with opened(store, size) as (_, pilot, screen):
        whole = Region(0, 0, *size)
        for number, name in enumerate(NAMES, 1):
            await pilot.press(str(number))
            await until(pilot, lambda name=name: screen.tab == name and name in screen.panes)
            pane = screen.panes[name]
            await until(pilot, lambda pane=pane: pane.region.height >= size[1] - 4)
            assert pane.region in whole
            assert pane.region.width == size[0]
            assert [one for one in screen.panes.values() if one.display] == [pane]
            # So that its keys work.
            await until(pilot, lambda pane=pane: pane.has_focus_within or pane.has_focus)
            assert "esc" in text_of(screen, "job-keys")
            assert len(text_of(screen, "job-keys")) <= size[0] - 2
        assert len(str(screen.tabs.content)) <= size[0]


async def test_tabs_turn_both_ways_and_the_last_one_is_remembered(store: Store, job: Job) -> None:
    async with opened(store) as (app, pilot, screen):
        for key, name in (
            ("tab", "ranks"),
            ("right_square_bracket", "logs"),
            ("tab", "plots"),
            ("shift+tab", "logs"),
            ("shift+tab", "ranks"),
            ("left_square_bracket", "overview"),
            ("left_square_bracket", "history"),
        ):
            await pilot.press(key)
            await until(pilot, lambda name=name: screen.tab == name)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, JobScreen))
        await until(pilot, lambda: app.screen.tab == "history")  # type: ignore[attr-defined]
        for key in ("q", "i", "i", "c", "escape"):
            await pilot.press(key)
        await until(pilot, lambda: app.screen is app.dashboard)


async def test_looking_ends_with_the_app_even_if_the_screen_was_never_told(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the dashboard waits for that thread, and the shell never comes back."""
    monkeypatch.setattr("tui.look.job_look.Looker.close", lambda self: None)
    monkeypatch.setattr(JobScreen, "is_current", False)
    async with running(store) as (app, pilot):
        await pilot.press("i")
        await until(pilot, lambda: any(worker.node is app.screen for worker in app.workers))
    await eventually_shown(lambda: not threads.running("look/job_look.py"))


async def test_a_tab_that_was_left_keeps_no_keys(store: Store, job: Job) -> None:
    """Its list was read when the next tab was already asked for."""
    async with opened(store, (120, 40), "7", "6") as (_, pilot, screen):
        pane = screen.panes["checkpoints"]
        assert isinstance(pane, CheckpointsPane)
        await until(pilot, lambda: pane.panel.has_focus)
        pane.on_checkpoints_pane_looked(CheckpointsPane.Looked(job, [], None))
        await screen.action_show_tab("config")
        await settle(pilot.app)
        assert screen.panes["config"].has_focus_within


@pytest.mark.slow
async def test_tabs_and_keys_can_be_clicked(store: Store, job: Job) -> None:
    async with opened(store) as (app, pilot, screen):
        await pilot.click("#job-tabs", offset=(str(screen.tabs.content).index("config"), 0))
        await until(pilot, lambda: screen.tab == "config")
        await until(pilot, lambda: "esc" in text_of(screen, "job-keys"))
        at = text_of(screen, "job-keys").index("esc")
        await pilot.click("#job-keys", offset=(at + 1, 0))
        await until(pilot, lambda: app.screen is app.dashboard)


async def test_nothing_is_painted_while_nothing_changes(store: Store, job: Job) -> None:
    store.change(job.id, State.STOPPED, "stopped")
    async with opened(store) as (_, pilot, screen):
        for name in NAMES:
            await screen.action_show_tab(name)
            await until(pilot, lambda: screen.panes[screen.tab].region.height)
        await screen.action_show_tab("overview")
        overview = screen.panes["overview"]
        assert isinstance(overview, OverviewPane)
        await until(pilot, lambda: "stopped" in shown(overview.head))
        pane = overview.head
        painted: list[int] = []
        pane.repaint = painted.extend  # type: ignore[method-assign]
        assert screen.look is not None
        seen = screen.look.t
        await until(pilot, lambda: screen.look.t > seen + 0.1)  # type: ignore[union-attr]
        assert painted == []


@pytest.mark.slow
async def test_a_job_whose_files_are_gone_is_told(store: Store, job: Job) -> None:
    import shutil

    store.change(job.id, State.STOPPED, "stopped")
    async with opened(store, (80, 24)) as (app, pilot, screen):
        shutil.rmtree(job.run_dir.root)
        await until(pilot, lambda: "is gone" in text_of(screen, "job-problem"))
        for number in range(1, 9):
            await pilot.press(str(number))
        store.remove(job.id)
        await until(pilot, lambda: "no job 1" in text_of(screen, "job-problem"))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)


# -- a failure -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("done", "newest", "every", "words"),
    [
        (322, None, 500, "322 steps are lost: the first save was due at step 500"),
        (1, None, 500, "1 step is lost: the first save was due at step 500"),
        (510, 500, 500, "10 steps are lost: the next save was due at step 1000"),
        (12, None, 0, "12 steps are lost: it saves only at the end"),
        (500, 500, 500, ""),
        (0, None, 500, ""),
        (13, None, Fraction(25, 2), "13 steps are lost: the first save was due at step 13"),
        (14, 13, Fraction(25, 2), "1 step is lost: the next save was due at step 25"),
    ],
)
def test_a_failure_says_what_is_lost_and_why(
    store: Store, job: Job, done: int, newest: int | None, every: int | Fraction, words: str
) -> None:
    look = Looker(store, job).look()
    view = replace(
        look.view,
        job=replace(job, state=State.FAILED),
        progress=replace(look.view.progress, step=done),
    )
    assert lost_words(replace(look, view=view, newest=newest, saves_every=every)) == words
    assert lost_words(replace(look, newest=None)) == "", "it has not failed"


async def test_a_failure_of_memory_ends_in_keys_that_resume_with_what_fits(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung = Rung("smaller", 1.1, lambda _: None)
    room = Room("GPU 0", 80 * GIB)
    before, after = Fit(90 * GIB, 95 * GIB, room), Fit(40 * GIB, 45 * GIB, room)
    spec = load_spec(job.run_dir.job_file)
    steps = [
        Step(rung, {"seed": 7}, before, after, spec),
        Step(rung, {"lora_rank": 2}, before, after, spec),  # which a resume refuses
    ]
    monkeypatch.setattr("tui.job.panes.overview.find_fits", lambda *_: steps)
    keep_failure(job.run_dir, Failure("rank 1 ran out of GPU memory", Cause.GPU_MEMORY, 1))
    store.change(job.id, State.FAILED, "rank 1 ran out of GPU memory")
    async with running(store) as (app, pilot):
        app.dashboard.job_tab = "history"
        await pilot.press("i")
        await until(pilot, lambda: isinstance(app.screen, JobScreen) and app.screen.look)
        screen = app.screen
        assert isinstance(screen, JobScreen)
        assert screen.tab == "overview", "whichever tab was open last"
        pane = screen.panes["overview"]
        assert isinstance(pane, OverviewPane)
        await until(pilot, lambda: "1 seed 7 · 45.0 GiB" in pane.as_text().replace("  ", " "))
        assert "10 steps are lost" in pane.as_text()
        # A rank that was killed has left no report; one key from here to its log.
        assert "enter read the log of rank 1" in pane.as_text()
        await pilot.press("1")
        asked = await question(app, pilot)
        assert "after step 30?" in asked.question
        assert "seed: 7" in asked.detail
        await pilot.press("n", "2")
        assert "cannot resume with these values" in (await question(app, pilot)).detail
        await pilot.press("n", "1")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: store.get(job.id).state is not State.FAILED)
        assert load_spec(job.run_dir.job_file).seed == 7
        await until(pilot, lambda: app.screen is screen)
        await until(pilot, lambda: screen.look and not screen.look.job.state.ended)
        await pilot.press("2")
        await until(pilot, lambda: screen.tab == "ranks")


# -- the job's own keys --------------------------------------------------------------------


@pytest.mark.slow
async def test_the_job_is_steered_from_its_screen(store: Store, job: Job) -> None:
    async with opened(store) as (app, pilot, _):
        await pilot.press("m")
        await until(pilot, lambda: job.run_dir.requested("save_now"))
        await pilot.press("p")
        await until(pilot, lambda: job.run_dir.requested("sample_now"))
        await pilot.press("s")
        await until(pilot, lambda: "job 1" in all_said(app) and "running" in all_said(app))
        await pilot.press("x", "x")
        await until(pilot, lambda: store.get(job.id).stop_level == 1)
        theme = app.theme
        await pilot.press("t")
        await until(pilot, lambda: app.theme != theme)
        await pilot.press("question_mark")
        await until(pilot, lambda: len(app.screen_stack) == 3)


@pytest.mark.slow
async def test_an_ended_job_starts_again(store: Store, job: Job) -> None:
    store.change(job.id, State.STOPPED, "stopped")
    async with opened(store) as (_, pilot, screen):
        await pilot.press("s")
        await until(pilot, lambda: store.get(job.id).state is State.STARTING)
        await until(pilot, lambda: "starting" in text_of(screen, "job-title"))


# -- overview ------------------------------------------------------------------------------


async def test_the_overview_tells_how_the_job_is(store: Store, job: Job, copied: list[str]) -> None:
    append_events(job, event("warning", message="fsdp_version: FSDP v1 is deprecated"))
    write_rank(job, 0, step=40, heartbeat=time.time() + 3600)  # on time, however slow the test
    write_rank(job, 1, step=38, heartbeat=time.time() - 65)
    Push("me/cats", [10, 20], "", "the hub cannot be reached").keep(job.run_dir)
    async with opened(store, (80, 24)) as (_, pilot, screen):
        overview = screen.panes["overview"]
        assert isinstance(overview, OverviewPane)
        await until(pilot, lambda: "step 40 of 200  20%" in overview.as_text())
        text = overview.as_text()
        for words in (
            "● running   step 40",
            "loss 0.",
            "cpu ",
            "r1  training",
            "checkpoint  step-30  ·  pushed step 20  ·  6: all",
            "on the hub  me/cats: 10,20",
            "the last push to the hub failed: the hub cannot be reached",
            "0.42 s/step",
            "4.76 images/s",
            "fsdp2: a full copy",
            "2 ranks on the CPU",
            "11.0 GiB on each rank; units: 19 FluxTransformerBlock",
            "backward  74.0 GiB  74.0 GiB",
            "FSDP v1 is deprecated",
            "rank 1 is late",
            "checkpoints/step-30",
        ):
            assert words in text, words
        assert [line for line in text.splitlines() if len(line) > 78] == []
        assert str(job.run_dir.root) in text.replace("\n", "").replace(" ", "")
        assert any("⠁" <= sign <= "⣿" for sign in shown(overview.curve))
        await pilot.press("j", "ctrl+d")
        assert overview.page.scroll_offset.y == 11
        await pilot.press("G")
        assert overview.page.scroll_offset.y == overview.page.max_scroll_y > 0
        await pilot.press("k", "ctrl+u", "g")
        assert overview.page.scroll_offset.y == 0
        await pilot.press("y", "Y")
        await until(pilot, lambda: len(copied) == 2)
        assert copied[0] == str(job.run_dir.root)
        assert "strategy    fsdp2: a full copy" in copied[1]


@pytest.mark.slow
async def test_a_failure_comes_with_its_cause_and_what_to_do(store: Store, job: Job) -> None:
    reason = "rank 1 ran out of GPU memory at step 12 during backward: 79.1 of 79.6 GiB"
    store.change(job.id, State.FAILED, reason)
    aborted = "NCCL communicator was aborted on rank 0."
    for rank, kind, words in ((0, "DistBackendError", aborted), (1, "OutOfMemoryError", "memory")):
        record = {
            "t": rank,
            "rank": rank,
            "type": kind,
            "message": words,
            "phase": "backward",
            "step": 12,
            "trace": f"Traceback …\nthe last line of rank {rank}\n",
        }
        job.run_dir.rank_error(rank).write_text(json.dumps(record))
    async with opened(store, (80, 24)) as (_, pilot, screen):
        overview = screen.panes["overview"]
        assert isinstance(overview, OverviewPane)
        await until(pilot, lambda: "what is wrong" in overview.as_text())
        text = overview.as_text()
        assert "79.1 of 79.6 GiB" in text
        assert "· turn on gradient_checkpointing" in text
        assert "· lower train_batch_size or resolution" in text
        assert "s     resume after step 30" in text
        assert "e     change its settings in a copy" in text
        assert "enter read the log of rank 1" in text
        assert "the last line of" not in text, "the traceback is folded"
        await pilot.press("space")
        text = overview.as_text()
        assert "the last line of rank 1" in text, "rank 0 only suffered from it"
        await pilot.press("enter")
        await until(pilot, lambda: screen.tab == "logs")
        await until(pilot, lambda: screen.panes["logs"].index == 1)  # type: ignore[attr-defined]


async def test_while_it_starts_each_phase_is_told_with_its_seconds(store: Store) -> None:
    job = add_job(store, "cats", state=State.RUNNING)
    assert job.started is not None
    phases = (("import", "begin", 4), ("import", "end", 13), ("load", "begin", 14))
    append_events(
        job,
        *(
            json.dumps({"t": job.started + t, "kind": "phase", "name": name, "state": state}) + "\n"
            for name, state, t in phases
        ),
    )
    look = replace(Looker(store, job).look(), t=job.started + 26)
    told = [plain(row).split() for row in start_rows(look, 78)]
    assert [" ".join(words) for words in told] == [
        "start",
        "✓ starting the ranks 4 s",
        "✓ importing libraries 9 s",
        "● loading weights 12 s",
    ]
    assert plain(head_rows(look, 78)[0]).startswith("● running   loading weights 12 s")
    assert text_of_activity(look) == "● #1 cats  loading weights 12 s …"
    write_steps(job, 1)
    assert start_rows(Looker(store, job).look(), 78) == []
    again = replace(job, started=time.time() + 60)  # resumed: what was trained is of before
    look = Looker(store, job).look()
    look = replace(look, t=again.started + 5, view=replace(look.view, job=again))
    assert plain(start_rows(look, 78)[1]).split() == ["●", "starting", "the", "ranks", "5", "s"]


def text_of_activity(look: Look) -> str:
    """What the dashboard says of it."""
    return plain(activity_rows(look.view, 78, look.t)[0])


# -- ranks ---------------------------------------------------------------------------------


async def test_the_ranks_are_shown_and_late_ones_named(
    store: Store, job: Job, copied: list[str]
) -> None:
    write_rank(
        job,
        0,
        step=40,
        allocated=30 * GIB,
        reserved=33 * GIB,
        peak=38 * GIB,
        heartbeat=time.time() + 3600,
        progressed=time.time() + 3600,
        device="cuda:0",
        device_uuid="GPU-1",
        peaks={"load": 22 * GIB},
    )
    write_rank(job, 1, step=38, heartbeat=time.time() - 65)
    async with opened(store, (120, 40), "2") as (_, pilot, screen):
        pane: Any = screen.panes["ranks"]
        await until(pilot, lambda: "! late 1:" in shown(pane.list))
        assert "rank 1 is late: no heartbeat for 1:" in text_of(screen, "rank-late")
        first = shown(pane.list).splitlines()[1]
        for words in ("training", "40", "ok", "30.0 GiB", "33.0 GiB", "38.0 GiB", "4000"):
            assert words in first
        assert "peak per phase: load 22.0 GiB" in text_of(screen, "rank-about")
        await pilot.press("j")
        await until(pilot, lambda: "rank 1 · pid 4001" in text_of(screen, "rank-about"))
        await pilot.press("y")
        await until(pilot, lambda: copied == ["4001"])
        await pilot.press("enter")
        await until(pilot, lambda: screen.tab == "logs")
        await until(pilot, lambda: screen.panes["logs"].index == 1)  # type: ignore[attr-defined]
        await pilot.press("2", "k", "l")
        await until(pilot, lambda: screen.tab == "logs")
        await until(pilot, lambda: screen.panes["logs"].index == 0)  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_before_there_are_ranks_it_says_so(store: Store) -> None:
    add_job(store)
    store.pause(True)
    async with opened(store, (80, 24), "2") as (_, pilot, screen):
        pane: Any = screen.panes["ranks"]
        await until(pilot, lambda: "no rank has reported yet" in shown(pane.list))
        await pilot.press("j", "enter", "y", "G")
        assert screen.tab == "ranks"


def ranks(count: int, **changes: Any) -> list[RankStatus]:
    from jobs.run.rundir import RankStatus

    values: dict[str, Any] = {
        "pid": 1,
        "started": 0.0,
        "host": "node",
        "device": "cpu",
        "phase": "train",
        "step": 3,
        "heartbeat": 100.0,
        "progressed": 100.0,
        "rss": GIB,
    }
    return [RankStatus(**values | changes | {"rank": rank}) for rank in range(count)]


@pytest.mark.parametrize("width", [30, 60, 78, 118, 200])
def test_rank_rows_fit_and_align(width: int) -> None:
    for rows in (
        rank_rows(ranks(3), False, 101.0, width),
        rank_rows(ranks(200, allocated=GIB, phase="encode", done=12), False, 500.0, width),
    ):
        assert len({len(plain(row)) for row in rows}) == 1
        if width >= 60:
            assert len(plain(rows[0])) <= width


def test_many_late_ranks_are_counted() -> None:
    assert late_words(ranks(2), 101.0) == ""
    assert "ranks 0, 1, 2, 3, 4, 5 and 58 more are late" in late_words(ranks(64), 200.0)


# -- logs ----------------------------------------------------------------------------------


async def test_logs_are_turned_and_followed(store: Store, job: Job, copied: list[str]) -> None:
    async with opened(store, (80, 24), "3") as (_, pilot, screen):
        pane: Any = screen.panes["logs"]
        await until(pilot, lambda: pane.view.model is not None and len(pane.view.model) == 100)
        for key, index in (
            ("right_square_bracket", 1),
            ("right_square_bracket", 2),
            ("left_square_bracket", 1),
        ):
            await pilot.press(key)
            await until(pilot, lambda index=index: pane.index == index)
        await until(pilot, lambda: len(pane.view.model) == 100)
        await pilot.press("f")
        await until(pilot, lambda: not pane.view.following)
        await pilot.press("f")
        await until(pilot, lambda: pane.view.following)
        await pilot.press("y")
        assert copied == [str(job.run_dir.rank_log(1))]
        await pilot.press("left_square_bracket", "left_square_bracket")
        await until(pilot, lambda: pane.index == 3)
        assert screen.tab == "logs"


@pytest.mark.slow
async def test_logs_open_on_the_whole_screen(store: Store, job: Job) -> None:
    async with opened(store, (80, 24), "3") as (app, pilot, screen):
        pane: Any = screen.panes["logs"]
        for key in ("enter", "slash", "ampersand"):
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, LogScreen))
            if key == "enter":
                await pilot.press("right_square_bracket")
            else:
                await pilot.press("escape")
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is screen)
        assert pane.index == 1, "the log that was read last"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tab", "key", "kind"), [("4", "c", PickRunsScreen), ("7", "o", PickJobScreen)]
)
async def test_a_locked_database_does_not_hold_keys_up(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch, tab: str, key: str, kind: Any
) -> None:
    go_on, read = threading.Event(), store.all

    def slow() -> list[Job]:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(PATIENCE)
        return read()

    async with opened(store, (80, 24), tab) as (app, pilot, screen):
        await until(pilot, lambda: screen.look is not None)
        monkeypatch.setattr(store, "all", slow)
        await pilot.press(key)
        await pilot.press("1")
        await until(pilot, lambda: screen.tab == "overview")
        await pilot.press(tab)
        go_on.set()
        await until(pilot, lambda: isinstance(app.screen, kind))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)


@pytest.mark.slow
async def test_what_was_predicted_stands_beside_what_is_measured(store: Store, job: Job) -> None:
    write_facts(job)
    async with opened(store, (120, 40), "1") as (_, pilot, screen):
        await until(pilot, lambda: "peak memory per phase" in shown(lines_of(screen)))
        assert "memory: predicted" not in shown(lines_of(screen))
        predict(job)  # beside the run, while it is looked at
        await until(pilot, lambda: "predicted 72.0 GiB to 79.0 GiB" in shown(lines_of(screen)))
        (line,) = (
            one
            for one in shown(lines_of(screen)).splitlines()
            if "forward" in one and "measured" in one
        )
        assert line.split() == ["forward", "60.0", "GiB", "measured", "61.0", "GiB", "+1.7", "%"]


# -- plots ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_plots_have_their_keys_and_tabs_keep_the_numbers(store: Store, job: Job) -> None:
    add_job(store, "other")
    store.pause(True)
    async with opened(store, (80, 24), "4") as (app, pilot, screen):
        pane: Any = screen.panes["plots"]
        await until(pilot, lambda: any("⠁" <= char <= "⣿" for char in shown(pane.panel)))
        assert shown(pane.panel).splitlines()[0].split()[:3] == ["[loss]", "lr", "grad"]
        first = pane.panel.choices
        await pilot.press("n", "plus", "w", "l")
        await until(pilot, lambda: pane.panel.choices != first)
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, PickRunsScreen))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        await pilot.press("left", "escape")
        assert app.screen is screen, "it took the cursor away"
        await pilot.press("2")
        await until(pilot, lambda: screen.tab == "ranks")
        await pilot.press("4", "escape")
        await until(pilot, lambda: app.screen is app.dashboard)


# -- config --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_job_file_is_shown_in_both_lengths_and_as_a_command(
    store: Store, job: Job, copied: list[str]
) -> None:
    async with opened(store, (80, 24), "7") as (_, pilot, screen):
        await until(pilot, lambda: "learning_rate: 0.0003" in shown(lines_of(screen)))
        assert "adam_beta1" not in shown(lines_of(screen))
        await pilot.press("a")
        await until(pilot, lambda: "adam_beta1" in shown(lines_of(screen)))
        await pilot.press("a", "l")
        await until(pilot, lambda: "accelerate launch" in shown(lines_of(screen)))
        await pilot.press("y")
        assert "--config_file" in copied[0]
        assert "  fsdp_version: 2" in copied[0].splitlines(), "as it is, not as it is broken"
        await pilot.press("l", "y")
        await until(pilot, lambda: len(copied) == 2)
        assert "learning_rate: 0.0003" in copied[1]


@pytest.mark.slow
async def test_another_job_is_picked_and_compared(
    store: Store, job: Job, job_values: dict[str, Any]
) -> None:
    spec = load_spec(None, job_values | {"learning_rate": 0.0001, "trigger_word": "sks"})
    other = add_job(store, "dogs", job_file=dump_spec(spec))
    add_job(store, "birds")
    store.pause(True)
    async with opened(store, (80, 24), "7", "o") as (app, pilot, screen):
        await until(pilot, lambda: isinstance(app.screen, PickJobScreen))
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is screen)
        await pilot.press("o")
        await until(pilot, lambda: isinstance(app.screen, PickJobScreen))
        picker: Any = app.screen
        await until(pilot, lambda: "birds" in shown(picker.list))
        await pilot.press("j", "enter")
        await until(pilot, lambda: f"#{other.id} dogs" in shown(lines_of(screen)))
        rows = [line.split() for line in shown(lines_of(screen)).splitlines()]
        assert ["~", "learning_rate", "0.0003", "0.0001"] in rows
        assert ["+", "trigger_word", "–", "sks"] in rows
        await pilot.press("a")
        await until(pilot, lambda: "learning_rate: 0.0003" in shown(lines_of(screen)))


@pytest.mark.slow
async def test_a_job_file_that_cannot_be_read_is_shown_as_it_is(store: Store, job: Job) -> None:
    job.run_dir.job_file.write_text("name: x\nno_such_key: 1\n")
    async with opened(store, (80, 24), "7") as (_, pilot, screen):
        await until(pilot, lambda: 'unknown key "no_such_key"' in shown(lines_of(screen)))
        assert "name: x" in shown(lines_of(screen))


def test_long_commands_are_broken_and_lose_nothing() -> None:
    text = "env A=1 " + " ".join(f"--flag-{n} value-{n}" for n in range(20))
    rows = [plain(row) for row in command_rows(text, 60)]
    assert max(map(len, rows)) <= 60
    assert " ".join(" ".join(rows).split()) == text
    assert plain(command_rows("  indented: 1", 60)[0]) == "  indented: 1"


# -- history -------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_history_has_states_and_events(store: Store, job: Job, copied: list[str]) -> None:
    append_events(job, event("checkpoint", step=30, path="x", bytes=GIB, seconds=1.5))
    store.change(job.id, State.FAILED, "rank 0 failed")
    store.requeue(job.id, "resumed after step 30")
    store.claim(job.id, [], "starting on CPU ranks")
    async with opened(store, (80, 24), "8") as (_, pilot, screen):
        await until(pilot, lambda: "saved step-30 (1.0 GiB, 1.5 s)" in shown(lines_of(screen)))
        text = shown(lines_of(screen))
        for words in ("submitted", "attempt 1: starting", "✗ failed", "attempt 2: starting"):
            assert words in text
        await pilot.press("e")
        await until(pilot, lambda: "saved step-30" not in shown(lines_of(screen)))
        await pilot.press("e", "y")
        await until(pilot, lambda: copied and "saved step-30" in copied[0])
        for number in range(40):
            append_events(job, event("warning", message=f"warning {number}"))
        await until(pilot, lambda: "warning 39" in shown(lines_of(screen)))
        lines = lines_of(screen)
        await until(pilot, lambda: lines.scroll_offset.y == lines.max_scroll_y > 0)
        await pilot.press("g")
        append_events(job, event("warning", message="one more"))
        await until(pilot, lambda: "one more" in shown(lines_of(screen)))
        assert lines.scroll_offset.y == 0, "who scrolled back stays there"


# -- lines ---------------------------------------------------------------------------------


def test_the_tabs_fit_on_a_small_screen() -> None:
    assert len(tab_line("samples", narrow=True).plain) <= 80
    assert "checkpoints" in tab_line("samples", narrow=False).plain


@pytest.mark.parametrize("width", [10, 20, 40, 80])
def test_the_key_line_keeps_to_its_room(width: int) -> None:
    keys = [Key(f"go({n})", f"{n}", f"{n}", "words" * (n % 3 + 1), "") for n in range(9)]
    keys.append(Key("turn", "x", "[ ]", "turn", ""))
    assert len(line_of(keys, width).plain) <= width
    assert line_of([keys[-1]], 20).plain == "[ ] turn"
