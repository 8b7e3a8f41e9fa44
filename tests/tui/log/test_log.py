"""The log on the whole screen, driven by keys; the view of it in the dashboard."""

from __future__ import annotations

from contextlib import asynccontextmanager
from threading import Event
from typing import TYPE_CHECKING

import pytest

from jobs.queue.states import State
from tests.support.tui.driven_app import running
from tests.support.tui.made_up_runs import add_job, write_log
from tests.support.tui.pilot import rest, until
from tests.support.waiting import PATIENCE
from tui.dashboard.jobs_panel import JobsPanel
from tui.log.log_model import LogModel
from tui.log.log_view import LogView
from tui.log.screen import LogScreen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from textual.pilot import Pilot

    from jobs.queue.store import Job, Store
    from tui.log.reader import LogReader

LINES = [f"12:{n // 60:02}:{n % 60:02} step {n} loss 0.5" for n in range(300)]
LINES[40] = "12:00:40 WARNING step 40 was left out"
LINES[100:104] = [
    "Traceback (most recent call last):",
    '  File "t.py", line 1, in step',
    "    loss.backward()",
    "ValueError: bad",
]
LINES[200] = "ERROR the second one"


pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.fixture
def job(store: Store) -> Job:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "".join(f"{line}\n" for line in LINES))
    write_log(job, "from rank 1\n", rank=1)
    return job


@asynccontextmanager
async def reading(
    store: Store, size: tuple[int, int] = (80, 24), key: str = "l"
) -> AsyncIterator[tuple[LogScreen, LogReader, Pilot[None]]]:
    """The log of the first job on the whole screen."""
    async with running(store, size) as (app, pilot):
        await pilot.press(key)
        await until(pilot, lambda: isinstance(app.screen, LogScreen))
        screen = app.screen
        assert isinstance(screen, LogScreen)
        await until(pilot, lambda: screen.reader.virtual_size.height)
        yield screen, screen.reader, pilot


def line(reader: LogReader) -> str:
    """Where the cursor is."""
    assert reader.model is not None
    return reader.model.line(reader.line_of(reader.row))


def shown(reader: LogReader) -> list[str]:
    return [reader.render_line(y).text.rstrip() for y in range(reader.size.height)]


def status(screen: LogScreen, part: str) -> str:
    return str(screen.query_one(f"#log-{part}").content)  # type: ignore[attr-defined]


async def typed(pilot: Pilot[None], key: str, text: str) -> None:
    """Open the line at the bottom, and answer."""
    await pilot.press(key)
    screen = pilot.app.screen
    assert isinstance(screen, LogScreen)
    await until(pilot, lambda: screen.prompt.has_focus)
    screen.prompt.value = text
    await pilot.press("enter")


# -- moving --------------------------------------------------------------------------------


async def test_it_follows_and_keys_hold_and_move_it(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await until(pilot, lambda: reader.virtual_size.height == 300)
        assert reader.following
        assert "following" in status(screen, "place")
        assert shown(reader)[-1].endswith(LINES[-1])
        await pilot.press("k")
        assert line(reader) == LINES[298]
        assert "paused · line 299 of 300" in status(screen, "place")
        await pilot.press("up", "j", "down")
        assert line(reader) == LINES[299]
        await pilot.press("j")
        assert reader.following
        await pilot.press("g")
        assert (reader.row, shown(reader)[0]) == (0, "  " + LINES[0])
        await pilot.press("ctrl+d")
        assert 15 < reader.row < 22
        await pilot.press("pageup")
        assert reader.row == 0
        await pilot.press("pagedown", "ctrl+u", "home")
        assert reader.row == 0
        await pilot.press("f")
        assert reader.following
        await pilot.press("f")
        assert line(reader) == LINES[299]
        await pilot.press("end")
        assert reader.following


@pytest.mark.slow
async def test_a_held_log_stays_where_it_is_while_it_grows(store: Store, job: Job) -> None:
    async with reading(store) as (_, reader, pilot):
        await pilot.press("G", "k", "k", "k")
        before = shown(reader)
        write_log(job, "more\n" * 50, append=True)
        await until(pilot, lambda: reader.count == 350)
        assert shown(reader) == before
        assert line(reader) == LINES[296]


@pytest.mark.slow
async def test_the_beginning_of_a_long_log_comes_in_front_of_a_held_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "".join(f"line {n:06}\n" for n in range(60_000)))
    held, original = Event(), LogModel.index_older

    def index_older(model: LogModel, *cancelled: Callable[[], bool]) -> int:
        held.wait(PATIENCE)
        return original(model, *cancelled)

    monkeypatch.setattr(LogModel, "index_older", index_older)
    async with reading(store) as (screen, reader, pilot):
        try:
            await pilot.press("k", "k", "space", "k")
            assert "counting lines" in status(screen, "place")
            assert reader.count < 60_000
            before = shown(reader)
        finally:
            held.set()
        await until(pilot, lambda: reader.virtual_size.height == 60_000)
        assert line(reader) == "line 059996"
        assert reader.selected == (59_996, 59_997)
        assert shown(reader) == before


@pytest.mark.slow
async def test_a_click_and_the_wheel_move_the_cursor(store: Store, job: Job) -> None:
    async with reading(store) as (_, reader, pilot):
        await pilot.press("g")
        await pilot.click(reader, offset=(5, 7))
        assert reader.row == 7
        await pilot.click(reader, offset=(5, 9), shift=True)
        assert reader.selected == (7, 9)
        reader.scroll_to(y=50, animate=False)
        await until(pilot, lambda: reader.row == 50)


@pytest.mark.slow
async def test_the_wheel_at_the_end_follows(store: Store, job: Job) -> None:
    async with reading(store) as (_, reader, pilot):
        await pilot.press("g")
        reader.scroll_to(y=reader.max_scroll_y, animate=False)
        await until(pilot, lambda: reader.following)


@pytest.mark.slow
async def test_other_logs_by_keys_and_back_in_the_dashboard(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: reader.count == 1 and line(reader) == "from rank 1")
        assert "rank" in status(screen, "title")
        await pilot.press("q")
        dashboard = pilot.app.screen
        log = dashboard.query_one(LogView)
        await until(pilot, lambda: log.model and log.model.path == job.run_dir.rank_log(1))
        assert dashboard.query_one(JobsPanel).has_focus
        await pilot.press("l")
        await until(pilot, lambda: isinstance(pilot.app.screen, LogScreen))
        await pilot.press("left_square_bracket", "left_square_bracket")
        assert pilot.app.screen.shown == 3  # type: ignore[attr-defined]
        await pilot.press("l")
        await until(pilot, lambda: not isinstance(pilot.app.screen, LogScreen))


# -- looking for -----------------------------------------------------------------------------


async def test_a_search_goes_to_the_last_match_and_on(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await pilot.press("slash")
        await until(pilot, lambda: screen.prompt.has_focus)
        await pilot.press(*"step 1", "5", "enter")
        await until(pilot, lambda: not reader.following)
        assert line(reader) == LINES[159]
        assert "“step 15” 11 of 11" in status(screen, "found")
        await pilot.press("N")
        assert line(reader) == LINES[158]
        assert "10 of 11" in status(screen, "found")
        await pilot.press("n", "n")
        assert line(reader) == LINES[15], "it goes round"
        assert any("wrapped around" in str(n.message) for n in pilot.app._notifications)
        assert any(reader.render_line(y).text.strip().endswith(LINES[15]) for y in range(20))
        await typed(pilot, "slash", "")
        assert screen.finding.pattern == ""
        await pilot.press("n")
        assert any("/ to search" in str(n.message) for n in pilot.app._notifications)


@pytest.mark.slow
async def test_matches_are_marked(store: Store, job: Job) -> None:
    async with reading(store) as (_, reader, pilot):
        await typed(pilot, "slash", "step 29")
        await until(pilot, lambda: not reader.following)
        last = reader.row - reader.scroll_offset.y
        for y in (last, last - 1):  # under the cursor too
            before, match, _ = reader.render_line(y)
            assert match.text == "step 29"
            assert before.style
            assert match.style
            assert match.style.bgcolor != before.style.bgcolor
            assert match.style.bgcolor != match.style.color


@pytest.mark.slow
async def test_a_search_that_finds_nothing_says_so_and_stays(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await typed(pilot, "slash", "no such (")
        await until(pilot, lambda: "0 lines" in status(screen, "found"))
        assert reader.following
        said = [str(n.message) for n in pilot.app._notifications]
        assert any("no line contains “no such (”" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["slash", "ampersand"])
async def test_a_pattern_without_end_is_given_up(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("tui.log.finders.SECONDS", 0.2)
    write_log(job, "a" * 90 + "b\n", append=True)
    async with reading(store) as (screen, reader, pilot):
        await typed(pilot, key, "(a|aa)+$")
        await until(
            pilot, lambda: any("too long" in str(n.message) for n in pilot.app._notifications)
        )
        assert screen.finding.pattern == ""
        assert not screen.finding.filter
        assert reader.count == len(LINES) + 1
        assert "searching" not in status(screen, "found")


async def test_a_filter_shows_its_lines_alone_and_grows(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await typed(pilot, "ampersand", r"step \d\d ")
        await until(pilot, lambda: reader.count == 90)
        assert "90 of 300 lines" in status(screen, "place")
        assert "only “step" in status(screen, "found")
        write_log(job, "step 77 again\nnot this\n", append=True)
        await until(pilot, lambda: reader.count == 91)
        assert shown(reader)[-1] == "  step 77 again"
        await pilot.press("k", "k")
        assert line(reader) == LINES[98]
        await pilot.press("slash")
        await pilot.press(*"step 5", "enter")
        await until(pilot, lambda: "of 10" in status(screen, "found"))
        assert reader.only is not None
        assert line(reader) == LINES[50], "round to the first one, among the shown lines"
        await typed(pilot, "ampersand", "")
        assert reader.count == 302
        assert line(reader) == LINES[50]


@pytest.mark.slow
async def test_levels_are_a_filter_and_named_by_letters(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await pilot.press("v")
        await until(pilot, lambda: reader.count == 6)
        assert [text[0] for text in shown(reader)[:6]] == ["W", "E", " ", " ", "E", "E"]
        assert "warnings and errors" in status(screen, "found")
        await pilot.press("v")
        await until(pilot, lambda: reader.count == 5)
        await pilot.press("v")
        assert reader.count == 300


@pytest.mark.slow
async def test_a_filter_without_lines_moves_nowhere(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await typed(pilot, "ampersand", "nowhere")
        await until(pilot, lambda: "none of 300 lines" in status(screen, "place"))
        await pilot.press(
            "k", "j", "g", "G", "pageup", "pagedown", "space", "y", "e", "n", "w", "w"
        )
        assert reader.count == 0
        await typed(pilot, "ampersand", "")
        assert reader.count == 300


@pytest.mark.slow
async def test_errors_are_jumped_to(store: Store, job: Job) -> None:
    async with reading(store) as (_, reader, pilot):
        await pilot.press("E")
        await until(pilot, lambda: line(reader) == "ERROR the second one")
        await pilot.press("E")
        assert line(reader) == "Traceback (most recent call last):"
        await pilot.press("e")
        assert line(reader) == "ERROR the second one"
        await pilot.press("e")
        assert line(reader) == "Traceback (most recent call last):"


@pytest.mark.slow
async def test_it_goes_to_a_place(store: Store, job: Job) -> None:
    places = {"120": 119, "99999": 299, "50%": 150, "12:03": 180, "12:03:10": 190}
    async with reading(store) as (_, reader, pilot):
        for place, number in places.items():
            await typed(pilot, "colon", place)
            await until(pilot, lambda there=LINES[number]: line(reader) == there)  # type: ignore[misc]
            assert not reader.following, place
            top, height = reader.scroll_offset.y, reader.size.height
            assert top <= reader.row < top + height


@pytest.mark.slow
async def test_what_is_no_place_is_told_and_can_be_mended(store: Store, job: Job) -> None:
    async with reading(store) as (screen, reader, pilot):
        await typed(pilot, "colon", "there")
        assert any("is not a position in a log" in str(n.message) for n in pilot.app._notifications)
        assert screen.prompt.has_focus
        await pilot.press("escape")
        assert reader.has_focus
        assert isinstance(pilot.app.screen, LogScreen)
        await typed(pilot, "colon", "23:59")
        await until(
            pilot,
            lambda: any(
                "at or after that time" in str(n.message) for n in pilot.app._notifications
            ),
        )


@pytest.mark.slow
async def test_a_rewritten_log_is_looked_through_again(store: Store, job: Job) -> None:
    async with reading(store) as (_, reader, pilot):
        await typed(pilot, "ampersand", "step")
        await until(pilot, lambda: reader.count > 250)
        write_log(job, "step a\nother\nstep b\n")
        await until(pilot, lambda: reader.count == 2)
        assert shown(reader)[:2] == ["  step a", "  step b"]


# -- long lines, copying -----------------------------------------------------------------------


@pytest.mark.slow
async def test_long_lines_are_cut_or_folded(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    long = "".join(f"<{n:03}>" for n in range(80))
    write_log(job, "".join(f"{n} {long}\n" for n in range(30)) + "the end\n")
    async with reading(store) as (_, reader, pilot):
        await pilot.press("g")
        assert len(shown(reader)[0]) <= 80
        await pilot.press("right")
        await until(pilot, lambda: "<001>" not in shown(reader)[0])
        await pilot.press("left")
        await until(pilot, lambda: "<001>" in shown(reader)[0])
        await pilot.press("w")
        assert "".join(shown(reader)[:6]).replace(" ", "") == "0" + long
        await pilot.press("G")
        await until(pilot, lambda: shown(reader)[-1] == "  the end")
        assert "<079>" in shown(reader)[-2]
        await pilot.press("k", "k")
        assert reader.row == 28
        text = "".join(shown(reader)).replace(" ", "")
        assert f"28{long}" in text, "the line under the cursor is seen as a whole"
        for row in range(27, -1, -1):
            await pilot.press("k")
            assert reader.row == row
            assert f"{row}{long}" in "".join(shown(reader)).replace(" ", "")
        await pilot.press("w", "end")
        await until(pilot, lambda: shown(reader)[-1] == "  the end")


@pytest.mark.slow
async def test_lines_are_selected_and_copied_without_colours(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    write_log(job, "one\n\x1b[31mtwo\x1b[0m\nthree\nfour\n")
    async with reading(store) as (screen, reader, pilot):
        await pilot.press("g", "y")
        assert pilot.app.clipboard == "one"
        await pilot.press("j", "space", "j")
        assert "2 selected" in status(screen, "place")
        await pilot.press("y")
        assert pilot.app.clipboard == "two\nthree"
        assert reader.origin is None
        await pilot.press("space", "k", "escape")
        assert reader.origin is None
        assert isinstance(pilot.app.screen, LogScreen)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, LogScreen))


@pytest.mark.slow
async def test_a_log_that_is_not_there_yet_appears(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with running(store, (80, 24)) as (app, pilot):
        await pilot.press("l")
        await until(pilot, lambda: isinstance(app.screen, LogScreen))
        screen = app.screen
        assert isinstance(screen, LogScreen)
        await until(pilot, lambda: status(screen, "place") == "no output yet")
        await pilot.press("k", "j", "g", "y", "e", "space", "w", "f", "escape")
        write_log(job, "here\n")
        if not isinstance(app.screen, LogScreen):
            await pilot.press("l")
        await until(pilot, lambda: app.screen.reader.count == 1)  # type: ignore[attr-defined]


async def test_nothing_new_paints_nothing(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading(store) as (_, reader, pilot):
        await typed(pilot, "slash", "step")
        await until(pilot, lambda: not reader.following)
        await rest(pilot.app)
        painted: list[str] = []
        for widget in pilot.app.screen.query("*"):
            monkeypatch.setattr(widget, "refresh", lambda *_, **__: painted.append("painted"))
        looks = 0
        original = reader.model.poll  # type: ignore[union-attr]

        def poll() -> object:
            nonlocal looks
            looks += 1
            return original()

        monkeypatch.setattr(reader.model, "poll", poll)
        await until(pilot, lambda: looks > 5)
        assert painted == []
