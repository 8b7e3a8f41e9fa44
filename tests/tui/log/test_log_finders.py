"""What finds lines in a log: patterns, levels, times; pages of folded lines; places. No widgets."""

from __future__ import annotations

import random
import re
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import UserError
from tests.support.waiting import PATIENCE
from tui.log.finders import (
    Both,
    Level,
    LevelFinder,
    PatternFinder,
    TimeFinder,
    compile_pattern,
    level_of,
)
from tui.log.log_model import LogModel
from tui.log.reader import last_page, last_top, page, top_for
from tui.log.scan import Answer, Hits, Scan, Watch, nearest, step_from
from tui.log.search import Filter, Line, Share, Time, place_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tui.log.finders import Finder

TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "trainer.py", line 12, in step\n'
    "    loss.backward()\n"
    "torch.OutOfMemoryError: CUDA out of memory\n"
)


def model_of(path: Path, text: str | bytes, tail: int = 256 << 10) -> LogModel:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    model = LogModel(path, tail)
    model.poll()
    model.index_older()
    return model


def found(model: LogModel, make: Callable[[], Finder], tail: int = 4 << 20) -> list[str]:
    scan = Scan(model, make, tail)
    while scan.work(1.0):
        pass
    hits = scan.hits
    assert hits.complete
    return [model.line(model.index_of(hits[n])) for n in range(len(hits))]


# -- levels --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("12:00:00 step 3/9  loss 0.1", Level.PLAIN),
        ("12:00:00 WARNING step 3 was left out", Level.WARNING),
        ("utils.py:485: UserWarning: torch.distributed is disabled", Level.WARNING),
        ("ERROR torch.distributed.elastic: failed", Level.ERROR),
        ("Traceback (most recent call last):", Level.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory", Level.ERROR),
        ("[rank1]: ValueError: bad", Level.ERROR),
        ("KeyboardInterrupt", Level.ERROR),
        ("no errors so far", Level.PLAIN),
        ("DEBUG nothing", Level.DEBUG),
    ],
)
def test_a_line_has_the_level_that_it_names(text: str, level: Level) -> None:
    assert level_of(text) is level
    assert level.mark == {0: "D", 1: " ", 2: "W", 3: "E"}[level]


def test_errors_are_found_with_their_tracebacks(tmp_path: Path) -> None:
    text = f"one\n{TRACEBACK}two\nWARNING three\nERROR four\n"
    model = model_of(tmp_path / "log", text)
    lines = TRACEBACK.splitlines()
    assert found(model, partial(LevelFinder, Level.ERROR)) == [*lines, "ERROR four"]
    assert found(model, partial(LevelFinder, Level.WARNING)) == [
        *lines,
        "WARNING three",
        "ERROR four",
    ]
    assert found(model, partial(LevelFinder, Level.ERROR, heads=True)) == [lines[0], "ERROR four"]


def test_a_traceback_of_the_launcher_keeps_its_ranks_together(tmp_path: Path) -> None:
    text = "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines())
    model = model_of(tmp_path / "log", f"{text}[rank1]: going on\n")
    assert len(found(model, partial(LevelFinder, Level.ERROR))) == 4


@given(st.integers(1, 400), st.randoms())
def test_levels_do_not_depend_on_the_pieces(size: int, chance: random.Random) -> None:
    kinds = ["plain\n", "WARNING w\n", "ERROR e\n", TRACEBACK, "\n", "  indented\n"]
    data = "".join(chance.choice(kinds) for _ in range(30)).encode()
    for heads in (False, True):
        whole = LevelFinder(Level.ERROR, heads=heads).find(data)
        finder, at, pieces = LevelFinder(Level.ERROR, heads=heads), 0, []
        while at < len(data):
            stop = data.find(b"\n", min(at + size, len(data) - 1)) + 1
            pieces += [at + start for start in finder.find(data[at:stop])]
            at = stop
        assert pieces == whole


# -- patterns ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        ("loss", ["loss 1", "Loss 2", "a loss"]),
        ("Loss", ["Loss 2"]),
        ("^loss", ["loss 1", "Loss 2"]),
        (r"loss \d$", ["loss 1", "Loss 2"]),
        ("(", ["odd ("]),
        ("a{99999999999}", []),  # what Python cannot make a pattern of
        ("(" * 3000 + ")" * 3000, []),
        (r"1\s+L", []),  # not over the end of a line
        ("red", ["\x1b[31mred\x1b[0m"]),
        (r"\[31m", []),  # what is not printed is not found
        ("50%", []),
        ("100%", ["100%|###|"]),
        ("é", ["café É"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_pattern_finds_what_is_printed(tmp_path: Path, pattern: str, lines: list[str]) -> None:
    text = "loss 1\nLoss 2\na loss\nodd (\n\x1b[31mred\x1b[0m\n 50%|#  |\r100%|###|\ncafé É\n"
    model = model_of(tmp_path / "log", text)
    assert found(model, partial(PatternFinder, compile_pattern(pattern))) == lines


@given(st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "Zs")), max_size=8)))
def test_plain_lines_are_found_as_one_by_one(lines: list[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    for text in ("a", "A", "a*b", "^$", "$", "x|", r"\s"):
        pattern = compile_pattern(text)
        starts, at = [], 0
        for line in lines:
            starts += [at] if pattern.search(line) else []
            at += len(line) + 1
        assert PatternFinder(pattern).find(data) == starts


def test_what_both_find(tmp_path: Path) -> None:
    model = model_of(tmp_path / "log", "WARNING a\nWARNING b\nb\n")
    chosen = Filter("b", Level.WARNING)
    make = chosen.finder()
    assert make is not None
    assert isinstance(make(), Both)
    assert found(model, make) == ["WARNING b"]
    assert chosen.words == "“b” · warnings and errors"
    assert Filter().finder() is None


# -- times ---------------------------------------------------------------------------------


def test_a_time_is_found_on_each_day_of_the_log(tmp_path: Path) -> None:
    times = [f"{hour % 24:02}:{minute:02}:00" for hour in range(22, 50) for minute in (0, 30)]
    model = model_of(tmp_path / "log", "".join(f"{t} step\n  more\n" for t in times))
    at = partial(TimeFinder, 23 * 3600 + 60)
    assert found(model, at, 0) == ["23:30:00 step", "23:30:00 step"]
    midnights = found(model, partial(TimeFinder, 0), 0)
    assert midnights == ["22:00:00 step", "00:00:00 step", "00:00:00 step"]
    early = found(model, partial(TimeFinder, 22 * 3600), 0)
    assert early == ["22:00:00 step", "22:00:00 step"]


def test_times_with_dates_and_out_of_order_lines(tmp_path: Path) -> None:
    text = (
        "2026-01-02 10:00:00 a\n2026-01-02 10:00:05 b\n10:00:04 late\nno time\n"
        "2026-01-02 10:00:09 c\n"
    )
    model = model_of(tmp_path / "log", text)
    assert found(model, partial(TimeFinder, 36005), 0) == ["2026-01-02 10:00:05 b"]
    assert found(model, partial(TimeFinder, 36006), 0) == ["2026-01-02 10:00:09 c"]
    assert found(model, partial(TimeFinder, 40000), 0) == []


# -- scans ---------------------------------------------------------------------------------


def test_the_end_is_looked_at_first_and_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    whole = [f"line {n} {'needle' if n % 7 == 0 else 'hay'}" for n in range(60_000)]
    model = model_of(tmp_path / "log", "\n".join(whole) + "\n")
    scan = Scan(model, partial(PatternFinder, compile_pattern("needle")), tail=1000)
    assert scan.work(0.0)
    first = scan.hits
    assert 0 < len(first) < 20
    assert not first.complete
    assert model.line(model.index_of(first[len(first) - 1])) == whole[59_997]
    while scan.work(1.0):
        pass
    hits = scan.hits
    assert [model.index_of(hits[n]) for n in range(len(hits))] == list(range(0, 60_000, 7))
    assert len(first) < 20, "an earlier picture does not change"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_appended_is_found_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "log"
    path.write_text("hit 0\n")
    model = LogModel(path)
    model.poll()
    scan = Scan(model, partial(PatternFinder, compile_pattern("hit")), tail=3)
    data = "".join(chance.choice(["hit\n", "miss\n", "hit", "\n", "x" * 300]) for _ in range(200))
    at = 0
    while at < len(data):
        step = chance.randrange(1, 60)
        with path.open("a") as file:
            file.write(data[at : at + step])
        at += step
        model.poll()
        while scan.work(0.0):
            pass
    lines = ("hit 0\n" + data).split("\n")
    hits = scan.hits
    assert hits.complete
    wanted = [n for n, line in enumerate(lines) if "hit" in line]
    assert [model.index_of(hits[n]) for n in range(len(hits))] == wanted


def test_a_last_line_without_an_end_is_found_too(tmp_path: Path) -> None:
    model = model_of(tmp_path / "log", "fine\nSegmentation fault")
    assert found(model, partial(LevelFinder, Level.ERROR)) == ["Segmentation fault"]


def test_a_line_longer_than_a_piece_is_one_line(tmp_path: Path) -> None:
    text = "x" * 600_000 + " needle\nneedle " + "y" * 600_000 + "\nneedle\n"
    model = model_of(tmp_path / "log", text)
    make = partial(PatternFinder, compile_pattern("needle"))
    assert [line[:6] for line in found(model, make)] == ["needle", "needle"]


def hits_of(*offsets: int, split: int = 0, share: float = 1.0) -> Hits:
    from array import array

    older = array("Q", [o for o in offsets if o < split])
    newer = array("Q", [o for o in offsets if o >= split])
    return Hits(older, newer, len(older), len(newer), share=share, split=split)


def test_the_next_hit_and_the_one_before() -> None:
    hits = hits_of(10, 20, 30, split=20)
    assert [step_from(hits, at, True) for at in (0, 10, 11, 31)] == [0, 0, 1, -1]
    assert [step_from(hits, at, False) for at in (31, 30, 10, 11)] == [2, 1, -1, 0]
    assert [nearest(hits, at) for at in (0, 10, 25, 99)] == [0, 0, 1, 2]
    partly = hits_of(10, 30, 40, split=30, share=0.5)
    assert step_from(partly, 5, True) == 0
    assert step_from(partly, 11, True) is None, "what lies between may not have been looked at"
    assert step_from(partly, 30, True) == 1
    assert step_from(partly, 30, False) is None
    assert step_from(partly, 40, False) == 1


def test_a_watch_answers_what_is_asked_and_no_more_when_asked_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("needle\nhay\n")
    answers: list[Any] = []
    came = Event()

    def post(what: Any) -> None:
        if isinstance(what, Answer):
            answers.append(what)
            came.set()

    watch = Watch(LogModel(path), every=0.01)
    number = watch.ask("search", partial(PatternFinder, compile_pattern("needle")))
    thread = Thread(target=watch.run, args=(post,))
    thread.start()
    try:
        assert came.wait(PATIENCE)
        assert (answers[-1].number, len(answers[-1].hits)) == (number, 1)
        came.clear()
        with path.open("a") as file:
            file.write("another needle\n")
        assert came.wait(PATIENCE)
        assert len(answers[-1].hits) == 2
        came.clear()
        path.write_text("rewritten\n")
        assert came.wait(PATIENCE)
        assert len(answers[-1].hits) == 0
        assert watch.ask("search", None) > number
    finally:
        watch.close()
        thread.join(PATIENCE)
    assert not thread.is_alive()


# -- pages ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(1, 12))
def test_every_row_is_on_a_page(heights: list[int], height: int) -> None:
    count, rows_of = len(heights), heights.__getitem__
    last = last_top(height, count, rows_of)
    seen = set(last_page(height, count, rows_of))
    for top in range(last):
        rows = page(top, height, count, rows_of)
        assert len(rows) <= height
        assert rows[0] == (top, 0)
        seen |= set(rows)
    if max(heights) <= height:
        assert seen == {(line, row) for line in range(count) for row in range(heights[line])}
    end = last_page(height, count, rows_of)
    assert end[-1] == (count - 1, heights[-1] - 1)
    assert len(end) == min(height, sum(heights))


def test_a_page_that_ends_with_a_line() -> None:
    heights = [1, 2, 3, 1, 1]
    assert top_for(3, 4, heights.__getitem__) == 2
    assert top_for(2, 2, heights.__getitem__) == 2, "a line higher than the page begins it"
    assert page(0, 4, 0, heights.__getitem__) == []
    assert last_page(4, 0, heights.__getitem__) == []


# -- places --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("120", Line(120)),
        (" 7 ", Line(7)),
        ("50%", Share(0.5)),
        ("0%", Share(0.0)),
        ("14:05", Time(50700)),
        ("7:05:30", Time(25530)),
    ],
)
def test_a_place_is_a_line_a_part_or_a_time(text: str, place: object) -> None:
    assert place_of(text) == place


@pytest.mark.parametrize("text", ["x", "25:00", "12:61", "101%", "", "-3", "12:00:99"])
def test_what_is_no_place_is_told(text: str) -> None:
    with pytest.raises(UserError, match=re.escape("a time (14:05)")):
        place_of(text)
