"""Habits of good terminal apps: help, palette, own keys, last choices, read-only, news, ASCII."""

from __future__ import annotations

import ast
import asyncio
import base64
import fcntl
import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len
from rich.segment import Segment
from textual.binding import Binding
from textual.color import Color
from textual.command import CommandPalette
from textual.filter import ANSIToTruecolor
from textual.geometry import Region
from textual.widgets import Static

from jobs import service
from jobs.errors import StateError, UserError
from jobs.queue.states import State
from jobs.run.rundir import RankStatus
from tests.support.paths import ROOT
from tests.support.tui.detection import flux
from tests.support.tui.driven_app import form, running, said
from tests.support.tui.made_up_runs import add_job, write_log, write_rank, write_steps
from tests.support.tui.pilot import rest, shown_by, until
from tests.support.waiting import PATIENCE
from tui.app.app import ActionsProvider, UiState
from tui.app.notify import Bell, Watch, desktop_message, ring
from tui.app.start import needs_ascii
from tui.app.themes import THEMES, other_theme
from tui.dashboard.caches import CachesScreen
from tui.dashboard.panels import DevicesPanel
from tui.form.blocks import DetectScreen
from tui.form.data import DataScreen
from tui.form.fields import Choice
from tui.keys.actions import ACTING, ACTIONS
from tui.keys.keymap import known_bindings, places
from tui.keys.screen_keys import EVERYWHERE, screen_keys
from tui.look.collector import Collector
from tui.look.snapshot import JobView, Snapshot
from tui.terminal.ascii_filter import AsciiFilter, replacements, to_ascii
from tui.terminal.clipboard import copy
from tui.text.block_text import Model
from tui.text.format import Span
from tui.widgets.bars import KeyBar, TitleBar
from tui.widgets.help import HelpScreen
from tui.widgets.lines import ROLES, Lines
from tui.widgets.questions import ConfirmScreen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Store
    from tui.app.app import FsdpTui


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch, no_processes: None) -> None:
    for name in ("NO_COLOR", "TMUX", "STY"):
        monkeypatch.delenv(name, raising=False)


# -- help and palette ----------------------------------------------------------------------


async def test_help_lists_the_keys_of_the_screen_it_is_asked_on(store: Store) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        text = str(app.screen.query_one("#keys").content)
        for action in ACTIONS:
            assert action.help.split(",")[0].split(";")[0][:30] in text, action.name
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is app.dashboard)
        await pilot.press("C")
        await until(pilot, lambda: app.screen is not app.dashboard)
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        text = str(app.screen.query_one("#keys").content).lower()
        assert "clear all caches" in text
        assert "stop the job" not in text
        assert text.index("all caches") < text.index(EVERYWHERE.lower())


@pytest.mark.slow
async def test_f1_explains_a_question_too(store: Store) -> None:
    add_job(store, state=State.COMPLETED)
    async with running(store) as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))


@pytest.mark.slow
async def test_the_palette_has_a_second_key_in_a_form_too(store: Store) -> None:
    """The terminal of VS Code takes ctrl+p."""
    async with form(store) as (app, pilot):
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))


async def test_the_palette_has_every_action_once_what_fits_first_and_does_it(store: Store) -> None:
    first, second = add_job(store, "cats", state=State.RUNNING), add_job(store, "dogs-flux")
    failed = add_job(store, "birds", state=State.FAILED)
    async with running(store) as (app, pilot):
        await until(pilot, lambda: app.dashboard.jobs.selected == first.id)
        palette = ActionsProvider(app.dashboard)

        async def found(query: str) -> list[str | None]:
            hits = [hit async for hit in palette.search(query)]
            return [hit.text for hit in sorted(hits, key=lambda hit: hit.score, reverse=True)]

        entries = {entry.title: entry for entry in palette.entries()}
        own = {"Find an action or a job by name"}
        assert {one.title for one in screen_keys(app.dashboard)} - own < {*entries}
        offered = [str(hit.prompt).strip() for hit in [hit async for hit in palette.discover()]]
        assert len(offered) == len(set(offered))
        assert offered[:3] == [
            "x         Stop the job after a checkpoint",
            "m         Write a checkpoint at the next step",
            "p         Sample the validation prompts at the next step",
        ]
        assert not any("Resume" in line or "Select the next" in line for line in offered)
        await entries["Select the next job"].do()  # type: ignore[misc]
        await until(pilot, lambda: app.dashboard.jobs.selected == second.id)
        assert await found("dogs") == [f"Go to job {second.id} “dogs-flux”"]
        assert await found("save") == ["Write a checkpoint at the next step"], "by its label"
        assert "Write a checkpoint at the next step" in await found("wrt chk"), "by its letters"
        assert await found("birds") == [f"Go to job {failed.id} “birds”"]
        entries[f"Go to job {failed.id} “birds”"].do()
        await until(pilot, lambda: app.dashboard.jobs.selected == failed.id)
        ordered = await found("checkpoint")
        assert "Resume an ended job from its newest checkpoint" in ordered[:2]
        later = ("Write a checkpoint at the next step", "Stop the job after a checkpoint")
        assert {*ordered[-2:]} == {*later}, "they do not fit"


def test_every_binding_of_a_screen_is_told_about() -> None:
    """Those that a person can change; each has words."""
    for one in known_bindings().values():
        assert one.does, one.id


# -- own keys ------------------------------------------------------------------------------


async def test_own_keys_work_and_are_shown(store: Store) -> None:
    async with running(store, keymap={"app.show_help": "f7", "app.quit_app": "n"}) as (app, pilot):
        assert "n is already the key of jobs.new_job" in said(app)[0]
        await pilot.press("question_mark")
        await pilot.press("f7")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert len(app.screen_stack) == 2
        await pilot.press("escape")
        assert "F7 help" in str(app.dashboard.query_one(KeyBar).content) or "f7 help" in str(
            app.dashboard.query_one(KeyBar).content
        )


@pytest.mark.slow
async def test_without_vim_keys_letters_do_nothing(store: Store) -> None:
    first, second = add_job(store, "a"), add_job(store, "b")
    async with running(store, vim_keys=False) as (app, pilot):
        await until(pilot, lambda: app.dashboard.jobs.selected == first.id)
        await pilot.press("j")
        assert app.dashboard.jobs.selected == first.id
        await pilot.press("down")
        assert app.dashboard.jobs.selected == second.id
        await pilot.press("ctrl+home")
        assert app.dashboard.jobs.selected == first.id


# -- last choices --------------------------------------------------------------------------


async def test_a_theme_is_remembered_when_it_is_chosen(store: Store) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("t")
        await until(pilot, (store.home / "ui.json").exists)  # and not when the app ends
        assert app.theme == "harbour-light"
    async with running(store) as (app, _):
        assert app.theme == "harbour-light"
    async with running(store, theme="nord") as (app, _):
        assert app.theme == "nord"


@pytest.mark.slow
async def test_ranks_in_place_of_devices_are_remembered(store: Store) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("R")
        await until(pilot, (store.home / "ui.json").exists)
    async with running(store) as (app, _):
        assert app.dashboard.devices.of_ranks


@pytest.mark.slow
async def test_an_unknown_theme_is_told(store: Store) -> None:
    async with running(store, theme="harbor") as (app, _):
        assert app.theme == "harbour"
        assert 'no theme "harbor" (did you mean "harbour"?)' in said(app)[0]


def test_two_dashboards_keep_each_others_choices(tmp_path: Path) -> None:
    one, other = UiState(tmp_path), UiState(tmp_path)
    assert one.put("theme", "nord")
    one.save()
    assert other.put("sort", "name")
    other.save()
    assert not other.put("sort", "name"), "nothing new, nothing to write"
    both = UiState(tmp_path)
    assert (both.get("theme"), both.get("sort")) == ("nord", "name")


def test_a_choice_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    """The dashboard's own thread chooses, while another one waits for the file."""
    state = UiState(tmp_path)
    state.put("theme", "nord")
    writer = threading.Thread(target=state.save)
    with open(tmp_path / "ui.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer.start()
        chooser = threading.Thread(target=state.put, args=("theme", "harbour"), daemon=True)
        chooser.start()
        chooser.join(PATIENCE)
        assert not chooser.is_alive()
        assert writer.is_alive()
    writer.join(PATIENCE)
    state.save()
    assert UiState(tmp_path).get("theme") == "harbour"


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        state = UiState(tmp_path)
        for turn in range(20):
            state.put(f"choice-{number}", turn)
            state.save()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = UiState(tmp_path)
    assert [state.get(f"choice-{number}") for number in range(4)] == [19] * 4
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "values": 3}'])
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "ui.json").write_text(text)
    state = UiState(tmp_path)
    assert state.get("theme", "nord") == "nord"
    state.put("theme", "harbour")
    state.save()
    assert UiState(tmp_path).get("theme") == "harbour"


def test_a_choice_of_another_kind_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "ui.json").write_text(json.dumps({"version": 1, "values": {"theme": 3}}))
    assert UiState(tmp_path).get("theme", "harbour") == "harbour"


def test_the_memory_of_a_newer_version_stays(tmp_path: Path) -> None:
    text = json.dumps({"version": 2, "values": {"theme": {"name": "nord"}}})
    (tmp_path / "ui.json").write_text(text)
    state = UiState(tmp_path)
    assert state.get("theme", "harbour") == "harbour"
    state.put("theme", "harbour")
    state.save()
    assert (tmp_path / "ui.json").read_text() == text


# -- two dashboards, read-only -------------------------------------------------------------


async def test_two_dashboards_on_one_store_show_the_same(store: Store) -> None:
    """One stops a job; both show it, and neither shows the other's theme."""
    job = add_job(store, "cats", state=State.RUNNING)
    both_open, pressed = asyncio.Barrier(2), asyncio.Event()

    def shows_the_end(app: FsdpTui) -> bool:
        view = app.dashboard.selected
        return view is not None and view.job.state is State.STOPPED

    async def acts() -> None:
        async with running(store) as (app, pilot):
            await both_open.wait()
            await pilot.press("x", "x")
            await until(pilot, lambda: store.get(job.id).stop_level == 1)
            store.change(job.id, State.STOPPED, "as asked")
            await until(pilot, lambda: shows_the_end(app))
            await pilot.press("t")
            pressed.set()

    async def looks() -> None:
        async with running(store) as (app, pilot):
            await both_open.wait()
            await until(pilot, lambda: shows_the_end(app))
            await pressed.wait()
            assert app.theme == "harbour"

    # In tasks of their own: Textual knows by the task which app it is in.
    async with asyncio.TaskGroup() as group:
        group.create_task(acts())
        group.create_task(looks())


async def test_read_only_refuses_what_acts_and_says_why(store: Store) -> None:
    job = add_job(store, "cats", state=State.RUNNING)
    async with running(store, read_only=True) as (app, pilot):
        assert "read-only" in str(app.dashboard.query_one(TitleBar).content)
        assert not [worker for worker in app.workers if worker.group == "tend"]
        bar = str(app.dashboard.query_one(KeyBar).content.markup)  # type: ignore[union-attr]
        assert "[b $accent]x" not in bar
        assert "[b $accent]l" in bar
        for action in ACTIONS:
            if action.acts:
                before = len(said(app))
                await pilot.press(action.keys.split(",")[0])
                await until(pilot, lambda before=before: len(said(app)) > before)  # type: ignore[misc]
                assert said(app)[-1].startswith(f"read-only: {action.name.replace('_', ' ')} is")
                assert app.screen is app.dashboard
        await pilot.click(
            KeyBar, offset=(str(app.dashboard.query_one(KeyBar).content).index("stop"), 0)
        )
        await pilot.press("t")
    with pytest.raises(StateError, match="read-only"):
        service.stop(store, job.id)
    assert store.get(job.id).stop_level == 0
    assert not list(job.run_dir.control.iterdir())
    assert not (store.home / "ui.json").exists()


def test_a_read_only_store_refuses_every_change(store: Store) -> None:
    job = add_job(store, "cats", state=State.RUNNING)
    store.read_only = True
    for change in (
        lambda: service.stop(store, job.id),
        lambda: service.request(store, job.id, "save_now"),
        lambda: service.delete_checkpoints(store, job.id, ["3"]),
        lambda: store.pause(True),
        lambda: store.hold(job.id, True),
    ):
        with pytest.raises(StateError, match="read-only"):
            change()
    assert not list(job.run_dir.control.iterdir())


def test_acting_actions_elsewhere_are_named_as_they_are() -> None:
    """A renamed action would slip through."""
    names = set()
    for path in (ROOT / "tui").rglob("*.py"):
        names |= set(re.findall(r"def action_(\w+)", path.read_text(encoding="utf-8")))
    assert names >= ACTING


# -- news ----------------------------------------------------------------------------------


def look(store: Store, ranks: tuple[RankStatus, ...] = (), problem: str = "") -> Snapshot:
    views = tuple(JobView(job, ranks=ranks) for job in store.all())
    return Snapshot(t=time.time(), jobs=views, problem=problem)


def test_each_end_is_told_once_and_none_from_before(store: Store) -> None:
    add_job(store, "old", state=State.FAILED, reason="long ago")
    job = add_job(store, "cats", state=State.RUNNING)
    watch = Watch()
    assert watch.news(Snapshot(t=1.0, problem="cannot read the jobs")) == []
    assert watch.news(look(store)) == []
    store.change(job.id, State.FAILED, "rank 1 ran out of memory")
    (news,) = watch.news(look(store))
    assert news.text == f"job {job.id} “cats” failed: rank 1 ran out of memory"
    assert news.severity == "error"
    assert watch.news(look(store)) == []
    store.requeue(job.id, "again")
    assert watch.news(look(store)) == []
    store.change(job.id, State.STOPPED, "taken out")
    assert [one.severity for one in watch.news(look(store))] == ["information"]


def test_an_end_says_when_all_others_are_done(store: Store) -> None:
    jobs = [add_job(store, name, state=State.RUNNING) for name in ("cats", "dogs", "birds")]
    for job in jobs:
        write_steps(job, 100, seconds=2.0)
    collector, watch = Collector(store), Watch()
    assert watch.news(collector.look()) == []
    store.change(jobs[0].id, State.COMPLETED, "")
    (news,) = watch.news(collector.look())
    assert re.fullmatch(r"job 1 “cats” completed · all done in ≥?3:2\d", news.text)


def test_a_job_that_came_and_went_between_two_looks_is_told(store: Store) -> None:
    watch = Watch()
    assert watch.news(look(store)) == []
    add_job(store, "quick", state=State.COMPLETED)
    assert ["completed" in one.text for one in watch.news(look(store))] == [True]


def test_an_old_end_seen_late_is_no_news(store: Store) -> None:
    watch = Watch(since=time.time() + 60)
    watch.news(look(store))
    add_job(store, "quick", state=State.COMPLETED)
    assert watch.news(look(store)) == []


def status(rank: int, *, still: float, step: int = 5, phase: str = "train") -> RankStatus:
    now = time.time()
    return RankStatus(
        rank=rank,
        pid=1,
        started=0.0,
        host="node",
        device="cpu",
        phase=phase,
        step=step,
        heartbeat=now,
        progressed=now - still,
        rss=1,
    )


def test_ranks_that_stand_still_are_told_once_until_they_move(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    add_job(store, "cats", state=State.RUNNING)
    watch = Watch()
    going = (status(0, still=1), status(1, still=1))
    stuck = (status(0, still=700), status(1, still=700, step=4))
    assert watch.news(look(store, going)) == []
    (news,) = watch.news(look(store, stuck))
    assert "rank 1 made no progress for 700 s at step 4" in news.text
    assert watch.news(look(store, stuck)) == []
    assert watch.news(look(store, going)) == []
    assert len(watch.news(look(store, stuck))) == 1
    saving = tuple(status(rank, still=700, phase="save") for rank in range(2))
    assert watch.news(look(store, saving)) == []


async def test_the_app_tells_and_rings(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[tuple[str, str]] = []
    monkeypatch.setattr("tui.app.notify.ring", lambda app, text, how: rung.append((text, how)))
    monkeypatch.setattr("tui.app.notify._TOGETHER", 0.01)
    job = add_job(store, "cats", state=State.RUNNING)
    async with running(store, notifications="osc9") as (app, pilot):
        store.change(job.id, State.COMPLETED, "all steps")
        await until(pilot, lambda: rung)
        assert rung == [(f"job {job.id} “cats” completed", "osc9")]
        assert said(app) == [rung[0][0]]


def test_what_happens_within_a_second_rings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[str] = []
    monkeypatch.setattr("tui.app.notify.ring", lambda app, text, how: rung.append(text))
    due: list[Callable[[], None]] = []

    class App:
        def set_timer(self, seconds: float, then: Callable[[], None]) -> None:
            due.append(then)

    bell = Bell(App(), "bell")  # type: ignore[arg-type]
    for text in ("job 1 failed", "job 2 failed", "job 3 is lost"):
        bell.tell(text)
    assert len(due) == 1
    due.pop()()
    assert rung == ["3 messages: job 1 failed · job 2 failed · job 3 is lost"]
    bell.tell("job 4 failed")
    due.pop()()
    assert rung[1:] == ["job 4 failed"]


# -- bindings ------------------------------------------------------------------------------


def test_every_key_can_be_given_to_another_action() -> None:
    """Each has an id for the keymap, and says what it does; the letters of a choice are typed."""
    for place in places():
        for binding in Binding.make_bindings(vars(place)["BINDINGS"]):
            if place is Choice and binding.action.startswith("letter("):
                continue
            told = f"{place.__name__}: {binding.key} {binding.action}"
            assert binding.id, told
            assert binding.description or (binding.tooltip and not binding.show), told


@pytest.mark.slow
@pytest.mark.parametrize(
    "screen", [DataScreen, CachesScreen, DetectScreen], ids=lambda one: one.__name__
)
async def test_a_narrow_screen_still_says_how_to_leave_it(store: Store, screen: Any) -> None:
    made = {
        DataScreen: lambda: DataScreen("data", lambda: (_ for _ in ()).throw(UserError("none"))),
        CachesScreen: lambda: CachesScreen(store),
        DetectScreen: lambda: DetectScreen(Model("flux", "dev", None), [], 2),
    }[screen]()
    if screen is DetectScreen:
        made._look = lambda **_: None
    async with running(store, (60, 24)) as (app, pilot):
        await app.push_screen(made)
        if screen is DetectScreen:
            made.post_message(DetectScreen.Found(flux()))
        if screen is DataScreen:
            made.add_class("-looked")
            made.on_resize()
        line = made.query_one(
            {DataScreen: "#data-keys", CachesScreen: "#cache-keys", DetectScreen: "#detect-keys"}[
                screen
            ],
            Static,
        )

        def fits() -> bool:
            text = str(line.content)
            return "esc" in text and "r " in text and cell_len(text) <= line.size.width

        await until(pilot, fits)


def test_a_desktop_message_is_wrapped_for_what_is_around_it() -> None:
    plain = desktop_message("job 3\x1b]0;evil\x07 failed", {})
    assert plain == "\x1b]9;fsdp-tui: job 3 ]0;evil  failed\x07"
    assert desktop_message("x", {"TMUX": "/t,1,0"}) == (
        "\x1bPtmux;\x1b\x1b]9;fsdp-tui: x\x07\x1b\\"
    )
    assert desktop_message("x", {"STY": "1.t"}) == "\x1bP\x1b]9;fsdp-tui: x\x07\x1b\\"
    assert len(desktop_message("x" * 1000, {})) < 200


class FakeDriver:
    """Keeps what is written to the terminal."""

    def __init__(self) -> None:
        self.written = ""
        self.is_web = False

    def write(self, data: str) -> None:
        self.written += data


class FakeApp:
    """As much of an app as has a terminal."""

    is_headless = False
    is_web = False

    def __init__(self) -> None:
        self._driver = FakeDriver()

    def bell(self) -> None:
        self._driver.write("\x07")

    def copy_to_clipboard(self, text: str) -> None:
        self._driver.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")


@pytest.mark.parametrize(
    ("how", "tmux", "written"),
    [
        ("off", False, ""),
        ("bell", False, "\x07"),
        ("osc9", False, "\x1b]9;fsdp-tui: x\x07"),
        ("osc9", True, "\x1bPtmux;\x1b\x1b]9;fsdp-tui: x\x07\x1b\\\x07"),
    ],
)
def test_the_terminal_is_told_as_was_set(
    how: Any, tmux: bool, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tmux:
        monkeypatch.setenv("TMUX", "/t,1,0")
    app = FakeApp()
    ring(app, "x", how)  # type: ignore[arg-type]
    assert app._driver.written == written


# -- copying -------------------------------------------------------------------------------


def test_a_text_is_copied_to_terminal_and_file(home: Path) -> None:
    app = FakeApp()
    told = copy(app, "a\nb\udce9\n")  # type: ignore[arg-type]
    assert "2 lines copied; also saved in " in told
    assert "clipboard.txt" in told
    assert (home / "clipboard.txt").read_text() == "a\nb?\n"
    assert app._driver.written == "\x1b]52;c;YQpiPwo=\x07"
    assert copy(app, "") == "nothing to copy"  # type: ignore[arg-type]


def test_what_no_terminal_takes_is_in_the_file(home: Path) -> None:
    app = FakeApp()
    told = copy(app, "x" * 100_000)  # type: ignore[arg-type]
    assert told.startswith("too long for the terminal's clipboard: 1 line saved in ")
    assert app._driver.written == ""
    assert len((home / "clipboard.txt").read_text()) == 100_000


def test_a_full_disk_does_not_hinder_copying(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tui.terminal.clipboard.write_atomic", full)
    assert copy(FakeApp(), "x") == "1 line copied"  # type: ignore[arg-type]


# -- characters and colours ----------------------------------------------------------------


def drawn() -> dict[str, str]:
    """Every character beyond ASCII in texts of ours, and a file that has it."""
    found = {}
    for path in sorted((ROOT / "tui").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) in documentation or path.name == "ascii_filter.py":
                    continue
                found |= {char: path.name for char in node.value if not char.isascii()}
    return found


def test_every_character_we_draw_has_one_of_ascii() -> None:
    found = drawn()
    assert len(found) > 10, "else this test looks at the wrong thing"
    braille = {char for char in found if "⠀" <= char <= "⣿"}
    assert (
        not {char: where for char, where in found.items() if char not in replacements()}.keys()
        - braille
    )


@pytest.mark.parametrize("text", ["a ─╮ é ö “x” ⣿⠁", "猫 cats 🐈", "▁▂▃▄▅▆▇█", "Ⅳ ½ ﬁ"])
def test_a_line_of_ascii_is_as_wide(text: str) -> None:
    segment = Segment(text)
    (plain,) = AsciiFilter().apply([segment], Color.parse("black"))
    assert plain.text.isascii()
    assert cell_len(plain.text) == cell_len(text)


def test_what_bars_are_made_of_stays_apart() -> None:
    """Filled and empty differ without colour."""
    assert to_ascii("━") != to_ascii("┄")
    assert to_ascii("█") != to_ascii("░")
    assert len({to_ascii(char) for char in "●◌✓✗■"}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_ascii_dashboard_is_ascii(store: Store, size: tuple[int, int]) -> None:
    job = add_job(store, "cats", state=State.RUNNING)
    write_steps(job, 40)
    write_log(job, "naïve “log” – 猫\n")
    write_rank(job, 0, step=40)
    async with running(store, size, ascii=True) as (app, pilot):
        await until(pilot, lambda: "log" in shown_by(app) and "40/200" in shown_by(app))
        for key in ("question_mark", "escape", "f9"):
            assert shown_by(app).isascii(), set(shown_by(app)) - set(map(chr, range(128)))
            await pilot.press(key)
            await pilot.pause()
        assert shown_by(app).isascii()


@pytest.mark.parametrize(
    ("environ", "ascii_only"),
    [
        ({"TERM": "xterm-256color"}, False),
        ({"TERM": "xterm-256color", "LANG": "en_US.UTF-8"}, False),
        ({"TERM": "xterm-256color", "LANG": "C"}, True),
        ({"TERM": "xterm-256color", "LANG": "de_DE.ISO-8859-1"}, True),
        ({"TERM": "xterm", "LANG": "C", "LC_ALL": "C.utf8"}, False),
        ({"TERM": "linux", "LANG": "en_US.UTF-8"}, True),
    ],
)
def test_where_ascii_is_needed(environ: dict[str, str], ascii_only: bool) -> None:
    assert needs_ascii(environ) is ascii_only


def terminal_colours(lines: Lines) -> list[Segment]:
    """What a panel paints in the terminal's own colours, or dim: `Lines` filters neither."""
    lines.rows = (*lines.rows, *((Span("text", role),) for role in ROLES))
    width, height = lines.size
    strips = [lines.render_line(y) for y in range(len(lines.rows))]
    strips += lines.render_lines(Region(0, 0, width, height))
    filters = [one for one in lines.app.get_line_filters() if isinstance(one, ANSIToTruecolor)]
    return [
        segment
        for stock in filters  # none where the theme is the terminal's own
        for strip in strips
        for segment, other in zip(strip, stock.apply(list(strip), Color(0, 0, 0)), strict=True)
        if segment.style != other.style
    ]


@pytest.mark.slow
async def test_every_theme_draws_the_dashboard(store: Store) -> None:
    names = [theme.name for theme in THEMES]
    async with running(store, theme=names[-1]) as (app, pilot):
        for theme in reversed(names):
            app.theme = theme
            await rest(app)
            assert "fsdp-tui" in shown_by(app)
            assert not terminal_colours(app.dashboard.query_one(DevicesPanel))
            for panel in app.dashboard.query(Lines):
                styles = [panel._style(role, marked=True) for role in ROLES]
                assert all(style.color != style.bgcolor for style in styles), "the bar, for one"
                assert {style.bgcolor for style in styles} != {panel._style("", False).bgcolor}
            await pilot.press("t")
            assert app.theme == other_theme(theme, dark=True)
            assert app.theme in names
            await pilot.press("t")
            assert app.theme == theme


def test_a_theme_of_somebody_else_has_our_other_one() -> None:
    assert other_theme("nord", dark=True) == "harbour-light"
    assert other_theme("textual-light", dark=False) == "harbour"


@pytest.mark.slow
async def test_no_color_draws_without_colours(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    add_job(store, "cats", state=State.RUNNING)
    async with running(store) as (app, pilot):
        assert app.theme == "harbour-16"
        await until(pilot, lambda: "cats" in shown_by(app))
        strips = app.screen._compositor.render_strips()
        colours = {
            str(colour.name)
            for line in strips
            for segment in line
            if segment.style is not None
            for colour in (segment.style.color, segment.style.bgcolor)
            if colour is not None
        }
        assert colours <= {"default"}


@pytest.mark.slow
async def test_long_work_does_not_keep_others_waiting(store: Store) -> None:
    """However few cores there are, which is what Python's own pool goes by."""
    done = threading.Event()
    async with running(store) as (app, pilot):
        try:
            for _ in range(16):
                app.run_worker(done.wait, group="long", thread=True)
            app.act(lambda: "acted")
            await until(pilot, lambda: "acted" in said(app))
        finally:
            done.set()
