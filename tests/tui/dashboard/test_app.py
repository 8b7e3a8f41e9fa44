"""The dashboard, driven by keys, over run directories that no process writes to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import UserError
from jobs.queue.states import State
from jobs.run.rundir import event
from jobs.spec.file.load import dump_spec, load_spec
from jobs.spec.rules.cascade import settle
from tests.support.paths import ROOT
from tests.support.tui.driven_app import (
    another_look,
    error_of,
    field,
    form,
    question,
    running,
    said,
    shown,
)
from tests.support.tui.made_up_runs import (
    FakeGpus,
    add_job,
    append_events,
    write_checkpoint,
    write_log,
    write_rank,
    write_steps,
)
from tests.support.tui.pilot import until
from tests.support.waiting import PATIENCE
from tui.dashboard.jobs_panel import JobsPanel
from tui.dashboard.panels import ActivityPanel, CurvePanel, DevicesPanel
from tui.form.screen import NewJobScreen
from tui.log.log_view import LogView
from tui.look import collector
from tui.widgets.bars import KeyBar, ProblemBar, TitleBar
from tui.widgets.help import HelpScreen
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store
    from jobs.service.plan import Plan
    from jobs.spec.job_spec import JobSpec
    from tui.app.app import FsdpTui

pytestmark = pytest.mark.usefixtures("no_processes")


def jobs_of(app: FsdpTui) -> JobsPanel:
    return app.dashboard.query_one(JobsPanel)


# -- what is shown -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_all_regions_have_room(store: Store, size: tuple[int, int]) -> None:
    job = add_job(store, state=State.RUNNING)
    write_steps(job, 40)
    write_log(job, "hello from rank 0\n")
    for rank in range(2):
        write_rank(job, rank, step=40)
    async with running(store, size) as (app, pilot):
        await until(pilot, lambda: app.dashboard.query_one(LogView).virtual_size.height)
        await until(pilot, lambda: app.dashboard.devices.outer_size.height >= 5)
        for kind, least in (
            (DevicesPanel, (70, 5)),
            (JobsPanel, (70, 4)),
            (LogView, (40, 6)),
            (CurvePanel, (26, 6)),
        ):
            box = app.dashboard.query_one(kind).outer_size
            assert box.width >= least[0], kind
            assert box.height >= least[1], kind
        assert "step 40" in shown(app.dashboard.query_one(DevicesPanel))
        assert "40/200" in shown(jobs_of(app))
        assert any("⠁" <= char <= "⣿" for char in shown(app.dashboard.query_one(CurvePanel)))


async def test_without_jobs_it_says_how_to_begin(store: Store) -> None:
    async with running(store) as (app, _):
        text = shown(jobs_of(app))
        assert "No jobs yet" in text
        assert "fsdp-tui demo" in text
        assert "selftest" not in text


async def test_a_new_machine_with_gpus_is_offered_the_self_test(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.machine.devices.gpus", FakeGpus(2))
    async with running(store) as (app, _):
        assert "fsdp-tui selftest" in shown(jobs_of(app))


@pytest.mark.slow
async def test_the_title_names_machine_and_counts(store: Store) -> None:
    add_job(store, state=State.RUNNING)
    add_job(store, "next")
    async with running(store) as (app, _):
        text = str(app.dashboard.query_one(TitleBar).content)
        assert "node" in text
        assert "1 running" in text
        assert "1 queued" in text


async def test_a_state_on_the_screen_follows_the_store(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with running(store) as (app, pilot):
        assert "● running" in shown(jobs_of(app))
        store.change(job.id, State.FAILED, "rank 1 was killed by SIGKILL")
        await until(pilot, lambda: "✗ failed" in shown(jobs_of(app)))
        text = shown(app.dashboard.query_one(ActivityPanel))
        assert "rank 1 was killed by SIGKILL" in text


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_no_state_in_the_table_is_cut_off(store: Store, size: tuple[int, int]) -> None:
    for state in State:
        if state is not State.QUEUED:
            add_job(store, f"is-{state}", state=state)
    async with running(store, size) as (app, _):
        text = shown(jobs_of(app))
        for state in State:
            assert state is State.QUEUED or f" {state} " in text


@pytest.mark.slow
async def test_loading_shows_a_moving_bar(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    append_events(job, event("phase", name="load", state="progress", done=10, total=40))
    async with running(store) as (app, pilot):
        panel = app.dashboard.query_one(ActivityPanel)
        await until(pilot, lambda: "loading weights" in shown(panel))
        assert "10/40  25%" in shown(panel)
        append_events(job, event("phase", name="load", state="progress", done=30, total=40))
        await until(pilot, lambda: "30/40  75%" in shown(panel))


async def test_a_second_look_at_the_same_things_paints_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(store, state=State.RUNNING)
    write_steps(job, 30)
    write_rank(job, 0, step=30)
    async with running(store) as (app, pilot):
        await until(pilot, lambda: "step 30" in shown(app.dashboard.query_one(DevicesPanel)))
        painted: list[str] = []
        for widget in app.dashboard.query("*"):

            def note(*_: Any, name: str = str(widget), **__: Any) -> None:
                painted.append(name)

            monkeypatch.setattr(widget, "refresh", note)
        app.dashboard.update_from(app.dashboard.snapshot)
        assert painted == []


@pytest.mark.slow
async def test_late_ranks_gpus_and_memory_are_shown_on_a_gpu_machine(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = FakeGpus(4)
    cards.gpus[2:] = [replace(gpu, memory_used=0) for gpu in cards.gpus[2:]]
    monkeypatch.setattr("jobs.machine.devices.gpus", cards)
    uuids = [gpu.uuid for gpu in cards.gpus[:2]]
    job = add_job(store, state=State.RUNNING, gpus=uuids)
    write_rank(job, 0, device_uuid=uuids[0], allocated=2**30, reserved=2**31, peak=2**31)
    write_rank(job, 1, device_uuid=uuids[1], heartbeat=time.time() - 3700)
    async with running(store) as (app, _):
        text = shown(app.dashboard.query_one(DevicesPanel))
        assert "alloc 1.0  peak 2.0 GiB" in text
        assert "! late 1:0" in text  # an hour
        assert "#1 demo r1" in text
        assert text.count("free") == 2
        assert "0,1" in shown(jobs_of(app))


@pytest.mark.slow
async def test_hundreds_of_ended_jobs_are_read_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        write_steps(add_job(store, f"old-{number}", state=State.COMPLETED), 3)
    look = collector.Collector(store)
    read: list[Path] = []
    original = collector.EventLog.read_all
    monkeypatch.setattr(
        collector.EventLog,
        "read_all",
        lambda log: (read.append(log.path), original(log))[1],
    )
    for _ in range(5):
        snapshot = look.look()
    assert all(view.progress.step == 3 for view in snapshot.jobs)
    assert len(read) == len(set(read))


def test_the_first_rows_do_not_wait_for_long_logs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_POLL_BYTES", 4000)
    for name in ("one", "two"):
        write_steps(add_job(store, name, state=State.RUNNING), 900)
    look = collector.Collector(store)
    first = look.look()
    assert [view.progress.step for view in first.jobs] == [900, 900]
    assert first.curve is not None
    assert 0 < len(first.curve.steps) < 100
    looks = 1
    while look._behind:
        last, looks = look.look(), looks + 1
        assert [view.progress.step for view in last.jobs] == [900, 900]
    assert last.curve is not None
    assert len(last.curve.steps) == 900
    assert 3 < looks < 12, "each look takes twice as much"


def test_jobs_that_rest_are_not_looked_at_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        add_job(store, f"old-{number}", state=State.COMPLETED)
    running = add_job(store, "new", state=State.RUNNING)
    look = collector.Collector(store, selected=2)
    look.look()  # which keeps what it reads of ended jobs, and so changes the database
    first = look.look()
    seen: list[int] = []
    original = look._try_view
    monkeypatch.setattr(
        look, "_try_view", lambda job, *rest: (seen.append(job.id), original(job, *rest))[1]
    )
    write_steps(running, 7)
    again = look.look()
    assert sorted(seen) == [2, running.id]
    assert again.jobs[0].progress.step == 7
    assert again.jobs[1:] == first.jobs[1:]
    store.remove(3)
    assert [view.job.id for view in look.look().jobs] == [6, 5, 4, 2, 1]


async def test_one_unreadable_job_does_not_hide_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = add_job(store, state=State.RUNNING), add_job(store, state=State.RUNNING)
    write_steps(good, 5)
    original = service.progress

    def progress(job: Any, log: Any = None) -> service.Progress:
        if job.id == bad.id:
            raise OSError("stale file handle")
        return original(job, log)

    monkeypatch.setattr(service, "progress", progress)
    snapshot = collector.Collector(store).look()
    assert "job 1: OSError: stale file handle" in snapshot.problem
    assert [view.progress.step for view in snapshot.jobs] == [0, 5]


def test_a_database_that_cannot_be_read_leaves_the_last_picture(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store)
    look = collector.Collector(store)
    assert look.look().problem == ""

    def fail() -> None:
        raise OSError("gone")

    monkeypatch.setattr(store, "all", fail)
    store.move(1, priority=5)  # nothing is read while nothing has changed
    snapshot = look.look()
    assert "gone" in snapshot.problem
    assert len(snapshot.jobs) == 1


# -- selecting and reading -----------------------------------------------------------------


async def test_keys_and_mouse_select_a_job_and_its_log(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        job = add_job(store, name, state=State.COMPLETED)
        write_log(job, f"log of {name}\n")
    async with running(store) as (app, pilot):
        panel, log = jobs_of(app), app.dashboard.query_one(LogView)

        def first_line() -> str:
            return log.model.line(0) if log.model and len(log.model) else ""

        await until(pilot, lambda: first_line() == "log of three")
        await pilot.press("j")
        await until(pilot, lambda: first_line() == "log of two")
        # The log of a job that a held key passes is not shown, that of the one it stops at is.
        monkeypatch.setattr("tui.dashboard.screen._PASSING", 3600)
        await pilot.press("G")
        await another_look(app, pilot)
        assert (panel.selected, first_line()) == (1, "log of two")
        monkeypatch.setattr("tui.dashboard.screen._PASSING", 0.05)
        await pilot.press("k", "G")
        await until(pilot, lambda: first_line() == "log of one")
        await pilot.press("k", "up")
        assert panel.selected == 3
        await pilot.click(JobsPanel, offset=(10, 4))
        await until(pilot, lambda: panel.selected == 1)


@pytest.mark.slow
async def test_the_job_that_was_asked_for_is_selected(store: Store) -> None:
    first = add_job(store, state=State.COMPLETED)
    add_job(store, state=State.RUNNING)
    async with running(store, select=first.id) as (app, pilot):
        assert jobs_of(app).selected == first.id
        await pilot.press("k")
        assert jobs_of(app).selected != first.id


async def test_the_log_follows_stops_when_scrolled_back_and_follows_again(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "".join(f"line {n}\n" for n in range(500)))
    async with running(store) as (app, pilot):
        log = app.dashboard.query_one(LogView)
        await until(pilot, lambda: log.virtual_size.height == 500)
        await until(pilot, lambda: log.scroll_y == log.max_scroll_y > 400)
        await pilot.press("pageup")
        await until(pilot, lambda: not log.following)
        there = log.scroll_y
        write_log(job, "more\n" * 50, append=True)
        await until(pilot, lambda: log.virtual_size.height == 550)
        assert log.scroll_y == there
        assert "paused" in str(log.border_subtitle)
        await pilot.press("end")
        await until(pilot, lambda: log.following and log.scroll_y == log.max_scroll_y)
        await pilot.press("f")
        assert not log.following
        write_log(job, "more\n" * 50, append=True)
        await until(pilot, lambda: log.virtual_size.height == 600)
        assert log.scroll_y < log.max_scroll_y


@pytest.mark.slow
async def test_the_lines_of_a_long_log_before_its_tail_come_to_the_front(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "".join(f"line {n:06}\n" for n in range(40_000)))
    async with running(store) as (app, pilot):
        log = app.dashboard.query_one(LogView)
        await until(pilot, lambda: log.virtual_size.height == 40_000)
        await until(pilot, lambda: log.scroll_y == log.max_scroll_y)
        assert log.following
        assert "line 039999" in log.render_line(log.size.height - 1).text
        await pilot.press("home")
        await until(pilot, lambda: "line 000000" in log.render_line(0).text)


async def test_other_logs_can_be_shown(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "from rank 0\n")
    write_log(job, "from rank 1\n", rank=1)
    job.run_dir.supervisor_log.write_text("from the supervisor\n")
    async with running(store) as (app, pilot):
        log = app.dashboard.query_one(LogView)
        for key, text in (
            ("", "from rank 0"),
            ("]", "from rank 1"),
            ("[", "from rank 0"),
            ("[", "from the supervisor"),
        ):
            if key:
                await pilot.press({"]": "right_square_bracket", "[": "left_square_bracket"}[key])
            await until(
                pilot, lambda text=text: log.model and len(log.model) and log.model.line(0) == text
            )
        assert "supervisor" in str(log.border_title)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "title"),
    [((80, 24), "avg 0.500 · val 0.432"), ((120, 40), "loss 0.5000 · avg 0.5000 · val 0.432")],
)
async def test_the_curve_names_the_loss_on_what_is_held_out(
    store: Store, size: tuple[int, int], title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.dashboard.panels.redraw_after", lambda *_: 0.0)
    job = add_job(store, state=State.RUNNING)
    append_events(job, event("step", step=1, loss=0.5))
    async with running(store, size) as (app, pilot):
        curve = app.dashboard.query_one(CurvePanel)
        await until(pilot, lambda: "loss 0.5000" in str(curve.border_title))
        append_events(job, event("validation", step=1, loss=0.4321))
        append_events(job, event("step", step=2, loss=0.5))
        await until(pilot, lambda: re.sub(r"\[/?b\]", "", str(curve.border_title)) == title)


@pytest.mark.slow
async def test_escape_codes_do_not_reach_the_terminal(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m text\n")
    async with running(store) as (app, pilot):
        log = app.dashboard.query_one(LogView)
        await until(pilot, lambda: log.virtual_size.height == 1)
        strip = log.render_line(0)
        assert strip.text.rstrip() == "red text"
        colours = {
            segment.style.color for segment in strip if segment.style and segment.text.strip()
        }
        assert len(colours) == 2


# -- acting --------------------------------------------------------------------------------


async def test_keys_hold_release_move_and_pause_the_queue(store: Store) -> None:
    busy = add_job(store, "busy", state=State.RUNNING)
    one, two = add_job(store, "one"), add_job(store, "two")
    async with running(store, select=one.id) as (app, pilot):

        async def press(key: str, *told: str) -> None:
            await pilot.press(key)
            await until(
                pilot,
                lambda: all(
                    words in "\n".join([shown(jobs_of(app)), shown(activity), *said(app), title()])
                    for words in told
                ),
            )

        def title() -> str:
            return str(app.dashboard.query_one(TitleBar).content)

        def queue() -> list[int]:
            return [job.id for job in store.in_states([State.QUEUED])]

        activity = app.dashboard.query_one(ActivityPanel)
        await press("h", "held until released · H: release")
        await press("H", f"waiting for job {busy.id} to free the CPU · h: hold · K J: move")
        await press("K", "already the first of priority 0")
        await press("J")
        await until(pilot, lambda: queue() == [two.id, one.id])
        await press("+", "queued with priority 1: ")
        assert queue() == [one.id, two.id]
        await press("-", "has priority 0")
        await press("P", "queue paused", "the queue is paused · P: start queued jobs again")
        assert store.paused
        await press("P", "the queue is running")
        await until(pilot, lambda: "queue paused" not in title())
        store.change(one.id, State.STOPPED, "removed from the queue")
        await press("h", f"job {one.id} is stopped, not queued")


@pytest.mark.parametrize("agrees", ["x", "y", "enter"])
async def test_a_stop_is_asked_about_and_grows_firmer(store: Store, agrees: str) -> None:
    job = add_job(store, "cats", state=State.RUNNING)
    async with running(store) as (app, pilot):
        for level, what, then in (
            (0, "after the current step, with a checkpoint", "after the current step"),
            (1, "SIGTERM ends it now", "gets SIGTERM"),
        ):
            await until(pilot, lambda level=level: level_seen(app) == level)  # type: ignore[misc]
            await pilot.press("x")
            asked = await question(app, pilot)
            assert asked.question == "Stop job 1 “cats”?"
            assert what in asked.detail
            assert store.get(job.id).stop_level == level
            await pilot.press(agrees)
            await until(pilot, lambda then=then: any(then in text for text in said(app)))  # type: ignore[misc]
            assert store.get(job.id).stop_level == level + 1
        await until(pilot, lambda: level_seen(app) == 2)
        await pilot.press("x", "x", "enter")
        await until(pilot, lambda: app.screen is app.dashboard)
        assert store.get(job.id).stop_level == 2, "the key that asked kills nothing"
        await pilot.press("x")
        await question(app, pilot)
        await pilot.press("y")
        await until(pilot, lambda: store.get(job.id).stop_level == 3)


def level_seen(app: FsdpTui) -> int:
    view = app.dashboard.selected
    assert view is not None
    return view.job.stop_level


@pytest.mark.parametrize("size", [(80, 8), (80, 12), (200, 12)])
async def test_the_keys_stay_in_sight_on_a_low_terminal(
    store: Store, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    monkeypatch.setattr("jobs.machine.devices.gpus", FakeGpus(8))
    add_job(store, state=State.RUNNING)
    async with running(store, size) as (app, pilot):
        await pilot.press("tab")
        bar = app.dashboard.query_one(KeyBar)
        await until(pilot, lambda: bar.region.bottom == size[1] and bar.region.height == 1)


async def test_a_key_pressed_often_in_haste_stops_once_and_kills_nothing(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with running(store) as (app, pilot):
        app.collector.close()  # no look comes between the presses
        await pilot.press("x", "x", "x", "x")
        await until(pilot, lambda: store.get(job.id).stop_level == 1)
        # The second question began with what was no longer so: it is asked again, with what is.
        assert "SIGTERM ends it now" in (await question(app, pilot)).detail
        await pilot.press("n")
        assert store.get(job.id).stop_level == 1


async def test_a_filter_shows_what_has_its_words_and_escape_all_again(store: Store) -> None:
    for name in ("lr-1", "lr-2", "cats"):
        add_job(store, name, job_file="model_family: sdxl\n" if name == "cats" else "")
    async with running(store) as (app, pilot):
        panel = jobs_of(app)
        for text, names in (("lr", {"lr-1", "lr-2"}), ("2", {"lr-2"}), ("sdxl", {"cats"})):
            await pilot.press("slash", *text)
            await until(pilot, lambda names=names: names_in(panel) == names)  # type: ignore[misc]
            assert "of 3 have" in str(panel.border_title)
            await pilot.press("escape")
            await until(pilot, lambda: names_in(panel) == {"lr-1", "lr-2", "cats"})
            assert app.focused is panel
        await pilot.press("slash", "l", "r", "enter")
        assert app.focused is panel
        assert names_in(panel) == {"lr-1", "lr-2"}
        await pilot.press("escape")
        assert names_in(panel) == {"lr-1", "lr-2", "cats"}


def names_in(panel: JobsPanel) -> set[str]:
    return {name for name in ("lr-1", "lr-2", "cats") if name in shown(panel)}


async def test_actions_take_all_marked_jobs_after_one_question(store: Store) -> None:
    service.pause(store)
    for name in ("one", "two", "three"):
        add_job(store, name)
    async with running(store) as (app, pilot):
        await pilot.press("space", "space", "h")
        assert "2 marked" in str(jobs_of(app).border_subtitle)
        asked = await question(app, pilot)
        assert asked.question == "Hold 2 jobs?"
        assert "1 one" in asked.detail
        assert "2 two" in asked.detail
        await pilot.press("y")
        await until(pilot, lambda: [store.get(n).held for n in (1, 2, 3)] == [True, True, False])
        assert jobs_of(app).marks == set()
        await pilot.press("g", "space", "space", "space", "r")
        await until(pilot, lambda: "nothing to remove: the 3 marked jobs are queued" in said(app))
        await pilot.press("x")
        assert (await question(app, pilot)).question == "Stop 3 jobs?"
        await pilot.press("x")
        await until(pilot, lambda: all(job.state is State.STOPPED for job in store.all()))
        await another_look(app, pilot)
        await pilot.press("space", "space", "r")
        assert (await question(app, pilot)).question == "Remove 2 jobs?"
        await pilot.press("y")
        await until(pilot, lambda: len(store.all()) == 1)


@pytest.mark.slow
async def test_an_ended_job_starts_again(store: Store, job_spec: JobSpec) -> None:
    job = add_job(store, state=State.STOPPED, job_file=dump_spec(job_spec), total_steps=5)
    write_checkpoint(job, 3)
    async with running(store) as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: "◔ starting" in shown(jobs_of(app)))
        assert any("resumed after step 3" in change.reason for change in store.history(job.id))


@pytest.mark.slow
async def test_what_cannot_be_done_is_said(store: Store) -> None:
    add_job(store, state=State.RUNNING)
    async with running(store) as (app, pilot):
        await pilot.press("s")
        await until(pilot, lambda: any("nothing to resume" in text for text in said(app)))
        await pilot.press("r")
        await until(pilot, lambda: any("stop it first" in text for text in said(app)))


@pytest.mark.slow
async def test_save_now_writes_the_request(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with running(store) as (_, pilot):
        await pilot.press("m")
        await until(pilot, lambda: job.run_dir.requested("save_now"))


async def test_remove_asks_first(store: Store) -> None:
    job = add_job(store, state=State.FAILED)
    async with running(store) as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("enter")  # the harmless answer has the focus
        await until(pilot, lambda: app.screen is app.dashboard)
        assert store.get(job.id)
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("y")
        await until(pilot, lambda: "No jobs yet" in shown(jobs_of(app)))
        await until(pilot, lambda: not job.run_dir.root.exists())


@pytest.mark.slow
async def test_help_lists_every_key(store: Store) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        text = str(app.screen.query_one("#keys").content)
        for words in (
            "Stop the job",
            "Resume an ended job",
            "Follow the log",
            "Quit the dashboard",
        ):
            assert words in text
        assert app.screen.query_one("#keys").outer_size.height > 15


async def test_the_footer_can_be_clicked_and_dims_what_does_not_fit(store: Store) -> None:
    add_job(store, state=State.RUNNING)
    async with running(store, (80, 24)) as (app, pilot):
        bar = app.dashboard.query_one(KeyBar)
        assert "[b $accent]x[/b $accent] stop" in str(bar.content.markup)  # type: ignore[union-attr]
        assert "[b $accent]s[/b $accent] start" not in str(bar.content.markup)  # type: ignore[union-attr]
        await pilot.click(KeyBar, offset=(str(bar.content).index("help") + 2, 0))
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


async def test_quitting_asks_nothing_and_stops_nothing(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with running(store, (80, 24)) as (app, pilot):
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)
    assert store.get(job.id).state is State.RUNNING
    assert store.get(job.id).stop_level == 0
    assert not job.run_dir.requested("stop")


async def test_a_failing_look_is_shown_and_the_next_one_is_made(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(store) as (app, pilot):
        bar = app.dashboard.query_one(ProblemBar)

        def fail(store: Store) -> None:
            raise OSError("the disk is gone")

        with monkeypatch.context() as patched:
            patched.setattr(service, "refresh", fail)
            await until(pilot, lambda: "the disk is gone" in str(bar.content))
            assert bar.display
        await until(pilot, lambda: not bar.display)


async def test_the_theme_switches(store: Store) -> None:
    async with running(store) as (app, pilot):
        before = app.theme
        await pilot.press("t")
        assert app.theme != before


# -- a new job -----------------------------------------------------------------------------


async def test_a_job_is_described_and_queued_by_keyboard(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(store, "older", state=State.RUNNING, ranks=1)
    monkeypatch.setenv("FSDP_TUI_CPU_JOBS", "2")
    async with form(store) as (app, pilot):
        for name in (
            "pretrained_model_name_or_path",
            "dataset",
            "num_processes",
            "max_train_steps",
        ):
            control = field(app, name).control
            control.focus()
            await until(pilot, lambda control=control: control.has_focus)
            control.value = ""  # type: ignore[attr-defined]
            for char in str(job_values[name]):
                control.insert_text_at_cursor(char)  # type: ignore[attr-defined]
        await until(
            pilot, lambda: "3 images" in str(field(app, "dataset").query_one(".note").content)
        )  # type: ignore[attr-defined]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: jobs_of(app).selected == 2)
        job = store.get(2)
        spec = load_spec(job.run_dir.job_file)
        assert (spec.num_processes, spec.max_train_steps) == (2, 5)
        await until(pilot, lambda: "◔ starting" in shown(jobs_of(app)))


async def test_a_mistake_is_shown_beside_its_field(store: Store) -> None:
    async with form(store) as (app, pilot):
        field(app, "learning_rate").control.value = "fast"  # type: ignore[attr-defined]
        await until(pilot, lambda: "number" in error_of(app, "learning_rate"))
        field(app, "learning_rate").control.value = "1e-3"  # type: ignore[attr-defined]
        await until(pilot, lambda: error_of(app, "learning_rate") == "")


@pytest.mark.slow
async def test_a_wrong_path_is_found_while_typing(store: Store, tmp_path: Path) -> None:
    async with form(store) as (app, pilot):
        field(app, "dataset").control.value = str(tmp_path / "nowhere")  # type: ignore[attr-defined]
        await until(pilot, lambda: "no such dataset folder" in error_of(app, "dataset"))


@pytest.mark.slow
async def test_a_refused_job_leaves_the_form_as_it_was(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Store, plan: Plan) -> None:
        raise UserError("the disk is full")

    monkeypatch.setattr(service, "carry_out", refuse)
    async with form(store) as (app, pilot):
        for name in ("pretrained_model_name_or_path", "dataset"):
            field(app, name).control.value = job_values[name]  # type: ignore[attr-defined]
        field(app, "name").control.value = "mine"  # type: ignore[attr-defined]
        await pilot.press("ctrl+r")
        error = app.screen.query_one("#form-error")
        await until(pilot, lambda: "the disk is full" in str(error.content))  # type: ignore[attr-defined]
        assert error.display
        assert field(app, "name").value == "mine"
        assert store.all() == []


@pytest.mark.slow
async def test_submitting_an_empty_form_leads_to_what_is_missing(store: Store) -> None:
    async with form(store) as (app, pilot):
        assert error_of(app, "pretrained_model_name_or_path") == ""
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "missing" in error_of(app, "pretrained_model_name_or_path"))
        await until(pilot, lambda: field(app, "pretrained_model_name_or_path").control.has_focus)


@pytest.mark.slow
async def test_a_copy_has_all_values_of_the_selected_job_under_a_name_of_its_own(
    store: Store, job_values: dict[str, Any]
) -> None:
    spec = load_spec(None, job_values | {"seed": 7, "optimizer": "sgd", "name": "before"})
    add_job(store, "before", state=State.COMPLETED, job_file=dump_spec(spec))
    async with form(store, "D") as (app, pilot):
        assert field(app, "name").value == "before-2"
        carried = app.screen.query_one("#carried")
        assert "seed=7" in str(carried.content)  # type: ignore[attr-defined]
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        copied = load_spec(store.all()[0].run_dir.job_file)
        assert copied == settle(spec).model_copy(update={"name": "before-2"})


@pytest.mark.slow
async def test_a_job_file_fills_the_form_and_can_be_saved(
    store: Store, job_values: dict[str, Any], tmp_path: Path
) -> None:
    import yaml

    given, saved = tmp_path / "given.yaml", tmp_path / "saved.yaml"
    job_values |= {"num_processes": 4, "fsdp_reshard_after_forward": 2}  # not a mere switch
    given.write_text(yaml.safe_dump(job_values | {"name": "given", "seed": 9}))
    async with form(store) as (app, pilot):
        for key, path in (("ctrl+o", given), ("ctrl+s", saved)):
            await pilot.press(key)
            await until(pilot, lambda: app.screen.query("#path"))
            app.screen.query_one("#path").value = str(path)  # type: ignore[attr-defined]
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
            await until(pilot, lambda: field(app, "name").value == "given")
        await until(pilot, saved.exists)
        assert load_spec(saved) == load_spec(given)


@pytest.mark.slow
async def test_the_form_tells_what_auto_comes_to_and_what_is_deprecated(
    store: Store, job_values: dict[str, Any], tmp_path: Path
) -> None:
    import yaml

    given = tmp_path / "given.yaml"
    given.write_text(yaml.safe_dump(job_values | {"name": "old", "fsdp_version": 1}))
    async with form(store) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query("#path"))
        app.screen.query_one("#path").value = str(given)  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, NewJobScreen))
        await until(pilot, lambda: field(app, "name").value == "old")
        note = lambda: str(app.screen.query_one("#row-strategy .note").content)  # noqa: E731
        await until(pilot, lambda: note() == "→ fsdp2")
        field(app, "strategy").control.focus()
        help_text = lambda: str(app.screen.query_one("#field-help").content)  # noqa: E731
        await until(pilot, lambda: "Now fsdp2: 2 ranks" in help_text())
        warning = app.screen.query_one("#form-error")
        assert "FSDP v1 is deprecated" in str(warning.content)
        assert warning.has_class("-warning")


@pytest.mark.slow
async def test_gpus_are_toggled_by_number_keys(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.machine.devices.gpus", FakeGpus(4))
    async with form(store) as (app, pilot):
        field(app, "gpus").control.focus()
        await pilot.press("0", "2")
        assert field(app, "gpus").value == [0, 2]
        await until(pilot, lambda: field(app, "num_processes").control.disabled)
        await pilot.press("0", "2")
        assert field(app, "gpus").value is None


# -- starting ------------------------------------------------------------------------------


def test_the_dashboard_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, tui.app.app, tui.form.screen, tui.job.screen; "
        "print([m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'engine', 'accelerate', 'diffusers', 'transformers', 'numpy')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert result.stdout.strip() == "[]"
