"""Pictures in the terminal: which protocol, decoding, and the samples tab driven by keys."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from textual.app import App
from textual.geometry import Region

from jobs.queue.states import State
from jobs.run.samples import Sample
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.driven_app import running, said
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.pilot import driven, until
from tests.support.waiting import PATIENCE
from tui.dashboard.screen import Exports
from tui.job.sample_screen import SampleScreen
from tui.job.sample_table import ZOOMS, Place, Table, about, shape_of, window
from tui.job.samples import SampleGrid, SamplesPane
from tui.job.screen import JobScreen
from tui.terminal import image_protocol
from tui.terminal.image import BlockPicture, Picture, fitted
from tui.terminal.image_protocol import choose, read_answer
from tui.terminal.thumbnails import BrokenPictureError, Thumbnails, decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from textual.pilot import Pilot

    from jobs.queue.store import Job, Store
    from tui.app.app import FsdpTui

SIXEL = b"\x1b[?62;4;22c"
PLAIN = b"\x1b[?62;22c"
KITTY = b"\x1b_Gi=31;OK\x1b\\"


# -- which protocol ------------------------------------------------------------------------


def never() -> bytes:
    pytest.fail("the terminal was asked")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "blocks"),
        (PLAIN, "blocks"),
        (SIXEL, "sixel"),
        (KITTY + PLAIN, "kitty"),
        (KITTY + SIXEL, "sixel"),  # claims kitty's protocol, and lacks what is needed of it
        (b"\x1b_Gi=31;ENOTSUPPORTED\x1b\\" + PLAIN, "blocks"),
        (b"jkl\x1b[6;20;10t" + KITTY + b"\x1b[?1;2c", "kitty"),
        (b"\x1b[?64;14c", "blocks"),
        (b"\x1b[?6", "blocks"),
    ],
)
def test_the_terminals_answer_decides(answer: bytes, expected: str) -> None:
    assert read_answer(answer) == expected
    assert choose({"TERM": "xterm-256color"}, None, True, lambda: answer) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"TERM": "xterm-kitty", "TMUX": "/tmp/tmux-0/default,1,0"},
        {"TERM": "tmux-256color"},
        {"TERM": "screen"},
        {"TERM": "xterm", "STY": "1.pts"},
        {"TERM": "linux"},
        {"TERM": "dumb"},
        {"TERM": ""},
        {},
        {"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"},
        {"TERM": "xterm-256color", "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver"},
        {"TERM": "xterm-kitty", "FSDP_TUI_PICTURES": "blocks"},
        {"TERM": "xterm-kitty", "FSDP_TUI_PICTURES": "off"},
    ],
)
def test_some_terminals_are_not_even_asked(environment: dict[str, str]) -> None:
    assert choose(environment, None, True, never) == "blocks"


def test_nobody_is_asked_where_there_is_no_terminal() -> None:
    assert choose({"TERM": "xterm-kitty"}, "kitty", False, never) == "blocks"


def test_a_person_may_force_it() -> None:
    assert choose({"TERM": "tmux", "TMUX": "x"}, "sixel", True, never) == "sixel"
    assert choose({"TERM": "tmux", "FSDP_TUI_PICTURES": "Kitty"}, None, True, never) == "kitty"
    assert choose({"TERM": "xterm"}, "nonsense", True, lambda: SIXEL) == "sixel"


def test_over_ssh_a_page_of_pictures_is_made_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.delenv("SSH_TTY", raising=False)
    monkeypatch.setattr(image_protocol, "_chosen", "kitty")
    assert image_protocol.for_many() == "kitty"
    monkeypatch.setenv("SSH_CONNECTION", "1.2.3.4 5 6.7.8.9 22")
    assert image_protocol.for_many() == "blocks"
    assert image_protocol.current() == "kitty"


class Ends:
    """Standard input and output on a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "expected"), [(KITTY + PLAIN, "kitty"), (b"", "blocks")])
def test_a_real_terminal_is_asked_once_and_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, expected: str
) -> None:
    import termios

    monkeypatch.setattr(image_protocol, "_WITHIN", PATIENCE if answer else 0.05)
    monkeypatch.setattr(image_protocol, "_chosen", "blocks")
    monkeypatch.setattr(image_protocol, "_cell", None)
    for name in ("TMUX", "STY", "TEXTUAL_DRIVER", "TERM_PROGRAM", "FSDP_TUI_PICTURES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    monkeypatch.setattr(sys, "__stdin__", Ends(slave))
    monkeypatch.setattr(sys, "__stdout__", Ends(slave))
    asked: list[bytes] = []

    def terminal() -> None:
        said = b""
        while not said.endswith(b"\x1b[c"):
            said += os.read(master, 1024)
        asked.append(said)
        if answer:
            os.write(master, b"j\x1b[6;20;9t" + answer)

    thread = threading.Thread(target=terminal, daemon=True)
    thread.start()
    assert image_protocol.prepare() == expected
    thread.join(PATIENCE)
    assert len(asked) == 1
    assert termios.tcgetattr(slave) == before
    assert image_protocol.cell_size() == ((9, 20) if answer else None)
    os.close(master)
    os.close(slave)


def test_importing_the_library_asks_nobody() -> None:
    """In a process of its own, whose standard output is a terminal."""
    import subprocess

    master, slave = pty.openpty()
    script = (
        "from tui.terminal.image import picture_class; import sys; "
        "names = [picture_class(p).__name__ for p in ('kitty', 'sixel')]; "
        "sys.stderr.write(' '.join(names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stderr == "TGPImage Image"
    os.set_blocking(master, False)
    with pytest.raises(BlockingIOError):  # nothing was written
        os.read(master, 100)
    os.close(master)
    os.close(slave)


# -- decoding ------------------------------------------------------------------------------


def png(path: Path, size: tuple[int, int] = (64, 48), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def test_pictures_are_decoded_small_and_kept(tmp_path: Path) -> None:
    path = png(tmp_path / "a.png", (640, 480))
    kept = Thumbnails()
    image = kept.load(path, 1.0, 160)
    assert image.size == (160, 120)
    assert kept.load(path, 1.0, 160) is image
    assert kept.load(path, 2.0, 160) is not image, "it was written again"


def test_memory_has_a_limit(tmp_path: Path) -> None:
    paths = [png(tmp_path / f"{n}.png", (100, 100)) for n in range(10)]
    kept = Thumbnails(most=3 * 100 * 100 * 3)
    for path in paths:
        kept.load(path, 1.0, 100)
    assert [kept.cached(path, 1.0, 100) is not None for path in paths] == [False] * 7 + [True] * 3


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\nrest", b"text", None, "half"])
def test_what_is_no_picture_is_told(tmp_path: Path, content: bytes | str | None) -> None:
    path = tmp_path / "x.png"
    if content == "half":
        buffer = io.BytesIO()
        Image.effect_noise((200, 200), 90).save(buffer, format="PNG")
        path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(BrokenPictureError, match="gone" if content is None else "broken"):
        decode(path, 100)


# -- how large -----------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 4000), st.integers(1, 4000)), st.integers(1, 300), st.integers(1, 100)
)
def test_pictures_fit_and_keep_their_shape(size: tuple[int, int], width: int, height: int) -> None:
    columns, lines = fitted(size, width, height)
    assert 1 <= columns <= width
    assert 1 <= lines <= height
    assert columns == width or lines == height or min(columns, lines) == 1


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 49), st.integers(1, 50))
def test_the_chosen_one_is_always_seen(first: int, shown: int, chosen: int, count: int) -> None:
    chosen, shown = min(chosen, count - 1), min(shown, count)
    begin = window(min(first, count - 1), shown, chosen, count)
    assert 0 <= begin <= chosen < begin + shown <= count


def sample(number: int, step: int, **facts: Any) -> Sample:
    from pathlib import Path

    return Sample(number, step, Path(f"step-{step}/{number:02}.png"), facts=facts)


def test_the_table_has_a_place_for_every_sample() -> None:
    table = Table.of([sample(0, 10), sample(2, 10), sample(0, 30, prompt="newer")])
    assert table.prompts == (0, 2)
    assert table.steps == (10, 30)
    assert table.at(Place(1, 1)) is None
    assert table.find(2, 10) == Place(1, 0)
    assert table.find(1, 10) is None
    assert (table.prompt(0), table.prompt(1)) == ("newer", "prompt 2")
    assert table.clamp(Place(9, -9)) == Place(1, 0)
    assert Table.of([]).at(Place(0, 0)) is None


@pytest.mark.parametrize("zoom", range(len(ZOOMS)))
def test_there_is_always_room_for_one(zoom: int) -> None:
    table = Table.of([sample(n, s) for n in range(9) for s in range(40)])
    for width, height in ((1, 1), (78, 18), (198, 54)):
        shape = shape_of(table, width, height, zoom)
        assert shape.columns >= 1
        assert shape.rows >= 1
    assert shape_of(table, 198, 54, 0) > shape_of(table, 198, 54, 3)


def test_what_a_picture_was_made_from() -> None:
    facts = {"prompt": "x", "seed": 7, "size": [64, 32], "steps": 20, "guidance": 3.5}
    assert about(sample(0, 5, **facts)).startswith(
        "step 5 · 64×32 · seed 7 · 20 steps · guidance 3.5"
    )
    assert "no settings recorded (yet)" in about(sample(0, 5))


# -- widgets -------------------------------------------------------------------------------


async def test_blocks_are_painted_only_when_the_picture_changes() -> None:
    class One(App[None]):
        def compose(self) -> Any:
            yield BlockPicture()

    async with driven(One(), (40, 12)) as pilot:
        picture = pilot.app.query_one(BlockPicture)
        image = Image.new("RGB", (10, 10), "red")
        picture.image = image
        await pilot.pause()
        colours = {
            segment.style.bgcolor.name
            for y in range(12)
            for segment in picture.render_line(y)
            if segment.style and segment.style.bgcolor
        }
        assert "#ff0000" in colours
        painted: list[object] = []
        picture.refresh = lambda *_, **__: painted.append(1)  # type: ignore[assignment,method-assign]
        picture.image = image
        assert painted == []


@pytest.mark.parametrize("kind", ["kitty", "sixel", "blocks"])
async def test_every_protocol_has_a_widget_that_fits(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()  # kitty's pictures go past Textual
    monkeypatch.setattr(sys, "__stdout__", terminal)

    class One(App[None]):
        def compose(self) -> Any:
            yield Picture(kind)

    async with driven(One(), (40, 12)) as pilot:
        picture = pilot.app.query_one(Picture)
        picture.say("waiting")
        await pilot.pause()
        picture.show(Image.new("RGB", (300, 100), "red"))
        await pilot.pause()
        assert picture.inner.display
        assert picture.inner.region in Region(0, 0, 40, 12)
        assert picture.inner.size.width == 40
        assert picture.inner.size.height < 12 or kind == "blocks"
        picture.say("broken", bad=True)
        await pilot.pause()
        assert not picture.inner.display
        early = Picture(kind)
        early.show(Image.new("RGB", (300, 100), "red"))  # decoded before there was a widget
        await pilot.app.mount(early)
        assert early.inner.display
    assert terminal.getvalue().startswith("\x1b_G") == (kind == "kitty")


# -- the tab -------------------------------------------------------------------------------


def write(job: Job, step: int, number: int, **facts: Any) -> Path:
    path = png(
        job.run_dir.samples / f"step-{step}" / f"{number:02d}.png",
        (64, 64),
        ("red", "green", "blue")[number % 3],
    )
    path.with_suffix(".json").write_text(
        json.dumps({"prompt": f"prompt {number}", "seed": 1, "size": [64, 64]} | facts)
    )
    return path


@pytest.fixture
def job(store: Store) -> Job:
    """A running job with samples of three prompts at six steps; one of them is broken."""
    job = add_job(store, "cats", state=State.RUNNING)
    for step in range(100, 700, 100):
        for number in range(3):
            write(job, step, number)
    (job.run_dir.samples / "step-500" / "00.png").write_bytes(b"half")
    return job


@asynccontextmanager
async def opened(
    store: Store, size: tuple[int, int]
) -> AsyncIterator[tuple[FsdpTui, Pilot[None], SampleGrid]]:
    """The samples tab of the first job."""
    async with running(store, size) as (app, pilot):
        await pilot.press("i")
        await until(pilot, lambda: isinstance(app.screen, JobScreen))
        await pilot.press("5")
        await until(pilot, lambda: app.screen.query(SamplesPane))
        yield app, pilot, app.screen.query_one(SampleGrid)


def steps_of(grid: SampleGrid) -> list[list[int]]:
    """The steps of the pictures that are shown, row by row."""
    return [
        [cell.sample.step if cell.picture.inner.display and cell.sample else 0 for cell in cells]
        for cells in grid._cells
    ]


def captions(grid: SampleGrid) -> str:
    return "\n".join(str(cell.caption.content) for cells in grid._cells for cell in cells)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_grid_is_walked_by_keys(
    store: Store, job: Job, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(
        "tui.terminal.clipboard.copy", lambda app, text: copied.append(text) or "copied"
    )
    async with opened(store, size) as (app, pilot, grid):
        await until(pilot, lambda: grid._cells and steps_of(grid)[0][-1] == 600)
        assert grid.place == Place(0, 5), "the newest first"
        assert "▸ step 600" in captions(grid)
        whole = Region(0, 0, *size)
        assert all(cell.region in whole for cells in grid._cells for cell in cells)
        await pilot.press("left")
        await until(pilot, lambda: "▸ step 500" in captions(grid))
        await pilot.press("g")
        await until(pilot, lambda: steps_of(grid)[0][0] == 100)
        about_line = app.screen.query_one("#sample-about")
        await until(pilot, lambda: "step 100 · 64×64 · seed 1" in str(about_line.content))  # type: ignore[attr-defined]
        await pilot.press("j", "down")
        await until(pilot, lambda: grid.place == Place(2, 0))
        assert "3  prompt 2" in "\n".join(grid._prompt_texts)
        await pilot.press("k", "l", "right", "h", "up", "up", "o")
        await until(pilot, lambda: grid.place == Place(0, 1) and copied)
        assert copied[0].endswith("step-200/00.png")
        cells = len(grid._cells) * len(grid._cells[0])
        await pilot.press("plus", "plus")
        await until(pilot, lambda: len(grid._cells) * len(grid._cells[0]) < cells)
        await pilot.press("minus", "minus")
        await until(pilot, lambda: len(grid._cells) * len(grid._cells[0]) == cells)
        await until(pilot, lambda: 200 in steps_of(grid)[0])
        await pilot.press("G")
        await until(pilot, lambda: steps_of(grid)[0][-1] == 600)


@pytest.mark.slow
async def test_what_is_broken_is_told_in_its_place(store: Store, job: Job) -> None:
    async with opened(store, (80, 24)) as (_, pilot, grid):
        await until(pilot, lambda: grid._cells)

        def told() -> bool:
            cells = [cell for cells in grid._cells for cell in cells]
            words = {
                cell.sample.step: cell.picture._shown_words
                for cell in cells
                if cell.sample and cell.sample.number == 0
            }
            return "broken" in words.get(500, "")

        await until(pilot, told)


@pytest.mark.slow
async def test_new_samples_appear_and_the_chosen_one_stays(store: Store, job: Job) -> None:
    async with opened(store, (120, 40)) as (_, pilot, grid):
        await until(pilot, lambda: grid._cells and steps_of(grid)[0][-1] == 600)
        await pilot.press("left", "left")
        await until(pilot, lambda: grid.place == Place(0, 3))
        write(job, 50, 0)
        write(job, 700, 0)
        await until(pilot, lambda: grid.table.steps[-1] == 700)
        assert grid.table.steps[grid.place.column] == 400


@pytest.mark.slow
async def test_a_new_layout_shows_decoded_images_at_once(store: Store, job: Job) -> None:
    async with opened(store, (120, 40)) as (_, pilot, grid):

        def shown() -> set[Path]:
            cells = [cell for cells in grid._cells for cell in cells]
            return {c.sample.picture for c in cells if c.sample and c.picture.image is not None}

        await until(pilot, lambda: len(shown()) > 2)
        before, cells = shown(), grid._cells
        grid.zoom_by(1)
        assert grid._cells is not cells
        assert shown(), "not first without them"
        assert shown() <= before


@pytest.mark.slow
async def test_before_there_are_samples_it_says_what_to_do(store: Store) -> None:
    job = add_job(store, state=State.RUNNING)
    async with opened(store, (80, 24)) as (app, pilot, grid):
        line = app.screen.query_one("#sample-none")
        await until(pilot, lambda: "No samples yet" in str(line.content))  # type: ignore[attr-defined]
        await pilot.press("left", "j", "enter", "v", "space", "o", "plus", "G")
        assert isinstance(app.screen, JobScreen)
        write(job, 10, 0)
        await until(pilot, lambda: grid._cells and steps_of(grid) == [[10]])


@pytest.mark.slow
async def test_one_picture_fills_the_screen_and_two_are_compared(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(
        "tui.terminal.clipboard.copy", lambda app, text: copied.append(text) or "copied"
    )
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(Exports, "start", lambda _, job, step: started.append((job.id, step)))
    async with opened(store, (80, 24)) as (app, pilot, grid):
        await until(pilot, lambda: grid._cells and steps_of(grid)[0][-1] == 600)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, SampleScreen))
        screen = app.screen
        assert isinstance(screen, SampleScreen)
        await until(pilot, lambda: screen.right.picture.image is not None)
        assert not screen.left.display
        assert screen.right.region.height >= 20
        await pilot.press("left")
        await until(pilot, lambda: "broken" in screen.right.picture._shown_words)
        await pilot.press("h", "j")
        await until(pilot, lambda: screen.place == Place(1, 3))
        title = screen.query_one("#sample-title")
        await until(pilot, lambda: "prompt 1" in str(title.content))  # type: ignore[attr-defined]
        await pilot.press("v")
        await until(pilot, lambda: screen.left.display and screen.left.picture.image is not None)
        assert screen.beside is not None
        assert (screen.beside.number, screen.beside.step) == (1, 100)
        await pilot.press("right_square_bracket", "right_square_bracket", "left_square_bracket")
        await until(pilot, lambda: screen.beside and screen.beside.step == 200)
        await pilot.press("up")
        await until(pilot, lambda: screen.beside and screen.beside.number == 0)
        await pilot.press("e")
        await until(pilot, lambda: "no checkpoint of step 400" in "".join(said(app)[-1:]))
        save_checkpoint(job.run_dir, 400)
        await pilot.press("e")
        await until(pilot, lambda: started == [(job.id, 400)])
        await pilot.press("o", "c")
        await until(pilot, lambda: len(copied) == 2)
        assert copied[0].endswith("step-400/00.png")
        assert copied[1] == "prompt 0"
        await pilot.press("v")
        await until(pilot, lambda: not screen.left.display)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, JobScreen))
        await until(pilot, lambda: grid.place == Place(0, 3))


@pytest.mark.slow
async def test_a_marked_picture_is_compared_with_others(store: Store, job: Job) -> None:
    async with opened(store, (120, 40)) as (app, pilot, grid):
        await until(pilot, lambda: grid._cells and steps_of(grid)[0][-1] == 600)
        await pilot.press("left", "left", "space")
        await until(pilot, lambda: "step 400 · marked" in captions(grid))
        await pilot.press("right", "right", "v")
        await until(pilot, lambda: isinstance(app.screen, SampleScreen))
        screen: Any = app.screen
        await until(pilot, lambda: screen.left.sample is not None)
        assert (screen.left.sample.step, screen.right.sample.step) == (400, 600)
        await pilot.press("q")
        await until(pilot, lambda: isinstance(app.screen, JobScreen))
        await pilot.press("left", "left", "space")
        await until(pilot, lambda: grid.marked is None)
