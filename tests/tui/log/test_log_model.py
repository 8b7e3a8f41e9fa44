"""The log model: tail first, growth, truncation, rotation, control codes."""

from __future__ import annotations

import os
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from tui.log.log_model import Change, LogModel, clean

if TYPE_CHECKING:
    from pathlib import Path


def lines_of(model: LogModel) -> list[str]:
    return [model.line(index) for index in range(len(model))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.log"


def test_a_file_that_is_not_there_yet_is_empty_and_then_appears(path: Path) -> None:
    model = LogModel(path)
    assert model.poll() is Change.NOTHING
    assert len(model) == 0
    path.write_text("one\ntwo\n")
    assert model.poll() is Change.REPLACED
    assert lines_of(model) == ["one", "two"]


def test_growth_is_read_as_it_comes(path: Path) -> None:
    path.write_text("one\n")
    model = LogModel(path)
    model.poll()
    assert model.poll() is Change.NOTHING
    with path.open("a") as file:
        file.write("two\nthr")
    assert model.poll() is Change.GREW
    assert lines_of(model) == ["one", "two", "thr"]
    with path.open("a") as file:
        file.write("ee\n")
    assert model.poll() is Change.GREW
    assert lines_of(model) == ["one", "two", "three"]


def test_an_unfinished_line_gets_another_key_when_it_grows(path: Path) -> None:
    path.write_text("ab")
    model = LogModel(path)
    model.poll()
    before = model.raw(0)
    with path.open("a") as file:
        file.write("c")
    model.poll()
    assert model.raw(0) != before


def test_truncation_starts_over(path: Path) -> None:
    path.write_text("one\ntwo\n")
    model = LogModel(path)
    model.poll()
    path.write_text("new\n")
    assert model.poll() is Change.REPLACED
    assert lines_of(model) == ["new"]


def test_a_file_rewritten_to_more_than_before_is_noticed(path: Path) -> None:
    path.write_text("one\ntwo\n")
    model = LogModel(path)
    model.poll()
    path.write_text("another text that is longer\n")
    assert model.poll() is Change.REPLACED
    assert lines_of(model) == ["another text that is longer"]


def test_rotation_starts_over(path: Path) -> None:
    path.write_text("one\n")
    model = LogModel(path)
    model.poll()
    path.rename(path.with_suffix(".1"))
    path.write_text("first of the next file\n")
    assert model.poll() is Change.REPLACED
    assert lines_of(model) == ["first of the next file"]


def test_the_end_comes_first_and_the_rest_on_request(path: Path) -> None:
    whole = [f"line {number}" for number in range(5000)]
    path.write_text("\n".join(whole) + "\n")
    model = LogModel(path, tail=1000)
    model.poll()
    shown = lines_of(model)
    assert 50 < len(shown) < 200
    assert shown == whole[-len(shown) :]
    assert not model.complete
    added = model.index_older()
    assert added + len(shown) == 5000
    assert model.complete
    assert lines_of(model) == whole
    assert model.index_older() == 0


def test_growth_while_the_rest_is_indexed_is_kept(path: Path) -> None:
    path.write_text("".join(f"line {number}\n" for number in range(900)))
    model = LogModel(path, tail=500)
    model.poll()

    def grow() -> bool:
        with path.open("a") as file:
            file.write("late\n")
        model.poll()
        return False

    model.index_older(grow)
    assert lines_of(model) == [*(f"line {number}" for number in range(900)), "late"]


def test_indexing_stops_when_asked(path: Path) -> None:
    path.write_text("line\n" * 1000)
    model = LogModel(path, tail=100)
    model.poll()
    assert model.index_older(lambda: True) == 0


def test_a_line_is_found_by_any_of_its_bytes(path: Path) -> None:
    lengths = [(n * 37) % 300 for n in range(3000)]  # over several blocks, empty lines among them
    path.write_text("".join("x" * length + "\n" for length in lengths) + "no end")
    model = LogModel(path, tail=1000)
    model.poll()
    assert model.index_of(0) == 0, "what is not indexed yet is before the first one"
    model.index_older()
    assert len(model) == 3001
    for index in (0, 1, 299, 1500, 2998, 2999, 3000):
        start, stop = model.raw(index)
        assert {model.index_of(offset) for offset in (start, stop - 1)} == {index}


def test_memory_does_not_grow_with_the_lines(path: Path) -> None:
    path.write_text("x\n" * 500_000)
    tracemalloc.start()
    try:
        model = LogModel(path)
        model.poll()
        model.index_older()
        assert len(model) == 500_000
        assert [model.line(n) for n in range(0, 500_000, 10_000)] == ["x"] * 50
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 3 << 20


@pytest.mark.parametrize("seed", range(5))
def test_however_it_is_written_the_same_lines_come_out(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    data = "".join(
        "x" * chance.randrange(40) + chance.choice(["\n", "\n", "\n\n", "é\n"]) for _ in range(200)
    ).encode()
    model = LogModel(path, tail=chance.randrange(1, 500))
    at = 0
    with path.open("ab", buffering=0) as file:
        while at < len(data):
            step = chance.randrange(1, 200)
            file.write(data[at : at + step])
            at += step
            model.poll(limit=chance.randrange(1, 100))
    while model.poll(limit=64) is Change.GREW:
        pass
    model.index_older()
    assert "\n".join(lines_of(model)).split("\n")[-50:] == data.decode().splitlines()[-50:]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\r\n", "plain"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        (b"\x1b[2J\x1b[1;1Hgone", "gone"),
        (b"\x1b]0;a title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"bell\x07 back\x08space\x00", "bell backspace"),
        (b"a\tb", "a       b"),
        (b"half an escape \x1b[3", "half an escape "),
        (b"bad \xff byte", "bad � byte"),
        (b"\r 10%|#   |\r 50%|##  |\r100%|####|", "100%|####|"),
        (b" 50%|##  |\r", " 50%|##  |"),
        (b"\rload:  33%|###    | 1/3 [00:01<00:02,  1.0it/s]WARNING late", "WARNING late"),
        (
            b"load: 100%|####| 3/3 [00:03<00:00,  1.0it/s]",
            "load: 100%|####| 3/3 [00:03<00:00,  1.0it/s]",
        ),
    ],
)
def test_only_text_and_colours_reach_the_terminal(raw: bytes, text: str) -> None:
    assert clean(raw) == text


def test_a_progress_bar_redrawn_for_hours_shows_its_last_state(path: Path) -> None:
    path.write_bytes(b"".join(b"\r%6d/100000 steps" % n for n in range(50_000)) + b"\nend\n")
    model = LogModel(path)
    model.poll()
    model.index_older()
    assert lines_of(model)[-2:] == [" 49999/100000 steps", "end"]


def test_a_very_long_line_is_cut_and_says_so(path: Path) -> None:
    path.write_text("x" * 100_000 + "\n")
    model = LogModel(path)
    model.poll()
    assert len(model.line(0)) < 10_000
    assert model.line(0).endswith("…")


def is_open(path: Path) -> bool:
    """Whether this process has a descriptor of a file."""
    here = "/proc/self/fd"
    return any(os.path.realpath(f"{here}/{number}") == str(path) for number in os.listdir(here))


def test_a_closed_model_reads_nothing(path: Path) -> None:
    path.write_text("one\n")
    model = LogModel(path)
    model.poll()
    assert is_open(path)
    model.close()
    assert not is_open(path)
    assert model.line(0) == ""
