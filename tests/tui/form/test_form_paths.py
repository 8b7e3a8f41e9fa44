"""Paths in the form: completed by tab, looked up in a thread, one at a time."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.tui.driven_app import field, form
from tests.support.tui.pilot import until
from tests.support.waiting import PATIENCE
from tui.widgets.path_input import PathSuggester, complete_path

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

pytestmark = pytest.mark.usefixtures("no_processes")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "tree"
    for name in ("cats/red", "cots", "dogs", ".hidden"):
        (root / name).mkdir(parents=True)
    for name in ("cab.yaml", "cats.txt", "dots.yaml"):
        (root / name).touch()
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.setenv("TREE", str(root))
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(
    ("typed", "suffixes", "completed"),
    [
        ("c", (), "cats/"),
        ("co", (), "cots/"),
        ("cats/", (), "cats/red/"),
        ("cats/red/", (), None),
        ("x", (), None),
        ("no/such/place", (), None),
        ("~/d", (), "~/dogs/"),
        ("~", (), "~/"),
        ("$TREE/d", (), "$TREE/dogs/"),
        ("${TREE}/cats/r", (), "${TREE}/cats/red/"),
        ("./", (), "./cats/"),
        (".h", (), ".hidden/"),
        ("ca", (".yaml",), "cats/"),  # directories first
        ("cab", (".yaml",), "cab.yaml"),
        ("cats.", (".yaml",), None),
        ("cats.", None, "cats.txt"),
        ("do", (".yaml",), "dogs/"),
        ("~nobody-here/a", (), None),
        ("a\0b/", (), None),
    ],
)
def test_the_last_part_of_a_path_is_completed(
    tree: Path, typed: str, suffixes: tuple[str, ...] | None, completed: str | None
) -> None:
    assert complete_path(typed, suffixes) == completed


def test_what_is_no_text_is_not_proposed(tree: Path) -> None:
    (tree / os.fsdecode(b"zo\xe9")).mkdir()
    assert complete_path("z") is None
    (tree / "zoé").mkdir()
    assert complete_path("z") == "zoé/"


async def test_other_words_are_proposed_where_no_path_begins_so(tree: Path) -> None:
    suggester = PathSuggester(words=lambda: ["black-forest-labs/FLUX.1-dev"])
    assert await suggester.get_suggestion("bla") == "black-forest-labs/FLUX.1-dev"
    assert await suggester.get_suggestion("do") == "dogs/"
    assert await suggester.get_suggestion("") is None


async def test_a_slow_disk_holds_one_thread_and_only_the_newest_text_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    answer = threading.Event()

    def slow(text: str, suffixes: object) -> str:
        asked.append(text)
        assert answer.wait(PATIENCE)
        return f"{text}!"

    monkeypatch.setattr("tui.widgets.path_input.complete_path", slow)
    suggester = PathSuggester()
    first = asyncio.create_task(suggester.get_suggestion("a"))
    while not asked:
        await asyncio.sleep(0)
    others = [asyncio.create_task(suggester.get_suggestion(text)) for text in ("ab", "abc", "abcd")]
    await asyncio.sleep(0)
    answer.set()
    assert await first == "a!"
    assert await asyncio.gather(*others) == [None, None, "abcd!"]
    assert asked == ["a", "abcd"]


async def test_tab_takes_what_is_proposed_and_goes_on_when_nothing_is(
    store: Store, tree: Path
) -> None:
    async with form(store) as (app, pilot):
        dataset = field(app, "dataset").control
        dataset.focus()
        await until(pilot, lambda: dataset.has_focus)
        await pilot.press("d")
        await until(pilot, lambda: dataset._suggestion == "dogs/")  # type: ignore[attr-defined]
        await pilot.press("tab")
        assert field(app, "dataset").value == "dogs/"
        assert dataset.has_focus
        await until(pilot, lambda: not dataset._suggestion)  # type: ignore[attr-defined]
        await pilot.press("tab")
        await until(pilot, lambda: field(app, "datasets").control.has_focus)


@pytest.mark.slow
async def test_the_path_of_a_job_file_is_completed_too(store: Store, tree: Path) -> None:
    async with form(store) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query("#path"))
        path = app.screen.query_one("#path")
        path.value = "dot"  # type: ignore[attr-defined]
        await pilot.press("end")
        await until(pilot, lambda: path._suggestion == "dots.yaml")  # type: ignore[attr-defined]
        await pilot.press("tab")
        assert path.value == "dots.yaml"  # type: ignore[attr-defined]
