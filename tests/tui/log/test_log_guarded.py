"""A pattern that would take for ever holds nothing up."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import PATIENCE
from tui.log import finders
from tui.log.finders import (
    PatternFinder,
    TooSlowError,
    choices,
    compile_pattern,
    marked_up_to,
    pattern_finders,
)
from tui.log.log_model import LogModel
from tui.log.scan import Answer, Watch
from tui.log.search import Filter

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = r"(a|aa)+$"
TRAP = "a" * 90 + "b\n"


@pytest.mark.parametrize(
    ("pattern", "count", "marked"),
    [
        ("loss", 0, 1 << 20),
        (r"step \d+", 1, 1 << 20),
        (r"\(\+\*", 0, 1 << 20),
        (r"[*+?][]+*]x", 0, 1 << 20),
        ("step.*loss.*", 2, 200),
        (ENDLESS, 2, 0),
        ("(a|a)*b", 2, 0),
        (".*.*.*x", 3, 60),
        ("a?" * 30 + "a" * 30, 30, 0),
    ],
)
def test_what_a_pattern_leaves_open(pattern: str, count: int, marked: int) -> None:
    assert (choices(pattern), marked_up_to(pattern)) == (count, marked)


def test_with_a_deadline_the_same_is_found() -> None:
    data = "".join(f"v1.{n}.{n * 7} – ok\nno\n" for n in range(50)).encode()
    text = r"(\d+\.)+\d*7"
    found = pattern_finders(text)()
    assert type(found) is not PatternFinder
    for piece in (data, data[:100], b"1.7\n", b""):
        assert found.find(piece) == PatternFinder(compile_pattern(text)).find(piece)


def test_what_is_harmless_needs_no_deadline() -> None:
    assert type(pattern_finders(r"step \d+")()) is PatternFinder


def test_what_takes_too_long_is_given_up_and_can_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finder = pattern_finders(ENDLESS)()
    for _ in range(2):
        monkeypatch.setattr(finders, "SECONDS", 0.2)
        with pytest.raises(TooSlowError, match="takes too long"):
            finder.find(TRAP.encode())
        monkeypatch.setattr(finders, "SECONDS", PATIENCE)
        assert finder.find(b"aaa\n") == [0]


def test_a_watch_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finders, "SECONDS", 0.2)
    path = tmp_path / "log"
    path.write_text(TRAP + "needle\n")
    answers: list[Any] = []
    told = {"search": Event(), "filter": Event()}

    def post(what: Any) -> None:
        if isinstance(what, Answer):
            answers.append(what)
            told[what.name].set()

    watch = Watch(LogModel(path), every=0.01)
    watch.ask("search", pattern_finders(ENDLESS))
    thread = Thread(target=watch.run, args=(post,))
    thread.start()
    try:
        assert told["search"].wait(PATIENCE)
        assert "takes too long" in answers[-1].problem
        watch.ask("filter", Filter("needle").finder())
        assert told["filter"].wait(PATIENCE)
        assert len(answers[-1].hits) == 1
        assert sum(answer.name == "search" for answer in answers) == 1, "it is dropped"
    finally:
        watch.close()
        thread.join(PATIENCE)
