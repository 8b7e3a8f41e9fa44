"""The data screen, driven by keys, and the line that tells how far the ranks' work on data is."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from PIL import Image, ImageDraw
from textual.geometry import Region

from jobs.preflight.data import DataLook
from jobs.queue.states import State
from jobs.run.eventlog import Phase
from jobs.run.rundir import write_atomic
from jobs.service import Progress
from jobs.spec.data_tool import STRIP_GAP
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.tui.driven_app import another_look, running, shown
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.pilot import rest, until
from tui.dashboard.panels import activity_rows
from tui.form.data import BucketsPanel, DataScreen, bucket_rows, finding_rows, looking_row
from tui.form.screen import NewJobScreen
from tui.look.snapshot import JobView
from tui.terminal.thumbnails import draw, find_grid, pictures_of
from tui.text.data_text import headlines
from tui.text.format import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from textual.pilot import Pilot

    from jobs.queue.store import Store
    from tui.app.app import FsdpTui
    from tui.text.format import Row

SIZES = [(80, 24), (120, 40), (200, 60)]
BACK = (24, 26, 30)
MANY = 5000


pytestmark = pytest.mark.usefixtures("no_processes")


async def look(app: FsdpTui, pilot: Pilot[None], key: str = "d") -> DataScreen:
    """Open the screen and wait for what it finds."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(app.screen, DataScreen) and app.screen.is_mounted)
    screen = app.screen
    assert isinstance(screen, DataScreen)
    await until(pilot, lambda: not screen.has_class("-looking"))
    await until(
        pilot,
        lambda: (
            screen.has_class("-failed")
            or (screen.buckets.rows and screen.pictures.border_title and drawn(screen))
        ),
    )
    await rest(app)  # the pictures may be drawn once more, in another size
    return screen


def drawn(screen: DataScreen) -> str:
    """What the pictures look like: characters and their colours."""
    panel = screen.pictures
    lines = [panel.render_line(y) for y in range(panel.size.height)]
    seen = [(s.text, s.style.color, s.style.bgcolor) for line in lines for s in line if s.style]
    return repr(seen) if any(text.strip() or back for text, _, back in seen) else ""


def text_of(app: FsdpTui, name: str) -> str:
    return str(app.screen.query_one(name).content)  # type: ignore[attr-defined]


# -- made-up looks -------------------------------------------------------------------------


def strip(colours: Sequence[str], size: tuple[int, int]) -> bytes:
    """A strip of plain pictures, as the engine makes it."""
    width, height = size
    row = Image.new(
        "RGB", ((width + STRIP_GAP) * len(colours) + STRIP_GAP, height + STRIP_GAP), BACK
    )
    for number, colour in enumerate(colours):
        tile = Image.new("RGB", size, colour)
        ImageDraw.Draw(tile).rectangle((0, 0, width // 2, height // 2), fill="black")
        row.paste(tile, (STRIP_GAP + number * (width + STRIP_GAP), 0))
    file = io.BytesIO()
    row.save(file, format="PNG")
    return file.getvalue()


def made_up(buckets: int = 3, **changes: Any) -> DataLook:
    """A look that found so many buckets, each of another shape."""
    shapes = [(64 + 16 * (number % 7), 128 - 16 * (number // 7)) for number in range(buckets)]
    counts = [max(1, 20 - number) for number in range(buckets)]
    report: dict[str, Any] = {
        "samples": sum(counts),
        "skipped": [[0, "bare.png", "no caption"]],
        "reasons": [{"count": 1, "text": "no caption", "examples": ["bare.png"]}],
        "handled": [{"count": 2, "text": "CMYK, converted to RGB", "examples": ["a.jpg", "b.jpg"]}],
        "cautions": [{"count": 3, "text": "enlarged", "examples": ["猫.png"] * 3}],
        "datasets": [
            {
                "path": "/data/cats",
                "layout": "folder",
                "samples": sum(counts),
                "skipped": 1,
                "draws": sum(counts),
                "others": {},
            }
        ],
        "buckets": [
            {
                "size": list(shape),
                "samples": count,
                "draws": count,
                "cut_mean": 0.3,
                "cut_most": 0.4,
            }
            for shape, count in zip(shapes, counts, strict=True)
        ],
        "texts": 40,
        "views": 1,
        "longest": 77,
        "global_batch": 2,
        "steps_per_epoch": 10 * buckets,
        "draws_per_epoch": sum(counts),
        "epochs": 2.5,
        "total_steps": 9,
    }
    colours = ["red", "green", "blue", "orange", "purple", "teal", "pink", "navy"]
    strips = tuple(
        strip([colours[(number + i) % 8] for i in range(min(8, count))], shape)
        for number, (shape, count) in enumerate(zip(shapes, counts, strict=True))
    )
    return DataLook(report | changes, strips)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[DataLook], None]:
    """Sets what a look finds."""

    def put(result: DataLook) -> None:
        monkeypatch.setattr("tui.form.data.look_at_data", lambda *_, **__: result)

    return put


@pytest.fixture
def ended_job(store: Store, job_values: dict[str, Any]) -> Any:
    values = job_values | {"resolution": 16}
    return add_job(
        store, "cats", state=State.COMPLETED, job_file=dump_spec(load_spec(None, values))
    )


# -- a real look ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_job_s_data_is_looked_at_and_shown(store: Store, ended_job: Any) -> None:
    async with running(store) as (app, pilot):
        screen = await look(app, pilot)
        assert "data of job 1 “cats”" in text_of(app, "#data-title")
        assert "3 samples · 3 captions" in text_of(app, "#data-totals")
        assert "1.5 steps of 2 per epoch" in text_of(app, "#data-totals")
        assert "16x16" in shown(screen.buckets)
        assert screen.pictures.border_title == "16x16 · 3 samples, cropped as for training"
        assert [p.getpixel((2, 2)) for p in screen.pictures.pictures] == [
            (0, 90, 120),
            (40, 90, 120),
            (80, 90, 120),
        ], "each picture of the strip, without what is between them"
        assert all(
            len({p.tobytes()[i : i + 3] for i in range(0, len(p.tobytes()), 3)}) == 1
            for p in screen.pictures.pictures
        )
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)


@pytest.mark.slow
async def test_what_is_wrong_with_the_data_is_one_line_on_the_screen(
    store: Store, ended_job: Any, job_values: dict[str, Any]
) -> None:
    ended_job.run_dir.job_file.write_text(
        dump_spec(load_spec(None, job_values | {"dataset": "/no/such"}))
    )
    async with running(store) as (app, pilot):
        screen = await look(app, pilot)
        assert text_of(app, "#data-problem") == "! no such dataset folder: /no/such"
        assert screen.query_one("#data-problem").display
        assert not screen.query_one("#data-body").display
        ended_job.run_dir.job_file.write_text(
            dump_spec(load_spec(None, job_values | {"resolution": 16}))
        )
        await pilot.press("r")
        await until(pilot, lambda: screen.has_class("-looked"))
        assert not screen.query_one("#data-problem").display


@pytest.mark.slow
async def test_escape_ends_the_process_that_looks(
    store: Store, ended_job: Any, job_values: dict[str, Any], tmp_path: Path
) -> None:
    many(tmp_path / "data")
    async with running(store) as (app, pilot):
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, DataScreen))
        await until(pilot, looking_processes)
        (process,) = looking_processes()
        line = app.screen.looking  # type: ignore[attr-defined]
        await until(pilot, lambda: f"/{MANY}  " in shown(line))
        assert len(shown(line)) <= line.size.width
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: not process.is_running() or not looking_processes())


@pytest.mark.slow
async def test_leaving_the_dashboard_ends_the_process_that_looks(
    store: Store, ended_job: Any, tmp_path: Path
) -> None:
    many(tmp_path / "data")
    async with running(store) as (app, pilot):
        await pilot.press("d")
        await until(pilot, looking_processes)
        app.exit()
        await until(pilot, lambda: not looking_processes())


def many(folder: Path) -> None:
    """Enough images that scanning them takes a while."""
    for number in range(3, MANY):
        os.link(folder / "0.png", folder / f"{number}.png")
        os.link(folder / "0.txt", folder / f"{number}.txt")


def looking_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if "engine.data" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
async def test_the_form_shows_the_data_of_what_it_says(
    store: Store, job_values: dict[str, Any]
) -> None:
    async with running(store, (80, 24)) as (app, pilot):
        await pilot.press("n")
        await until(pilot, lambda: app.screen.query("#field-name"))
        form = app.screen
        assert isinstance(form, NewJobScreen)
        await pilot.press("ctrl+l")
        model = form.query_one("#field-pretrained_model_name_or_path")
        await until(pilot, lambda: model.has_focus)  # nothing to look at yet
        assert app.screen is form
        for name in ("pretrained_model_name_or_path", "dataset"):
            form.query_one(f"#field-{name}").value = job_values[name]  # type: ignore[attr-defined]
        form.query_one("#field-resolution").value = "16"  # type: ignore[attr-defined]
        screen = await look(app, pilot, "ctrl+l")
        assert "data of the new job “job”" in text_of(app, "#data-title")
        assert "16x16" in shown(screen.buckets)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is form)
        assert form.values["dataset"] == job_values["dataset"]


# -- made-up data --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "buckets"), [(SIZES[0], 1), (SIZES[0], 40), (SIZES[1], 40), (SIZES[2], 1)]
)
async def test_everything_has_room(
    store: Store,
    ended_job: Any,
    found: Callable[[DataLook], None],
    size: tuple[int, int],
    buckets: int,
) -> None:
    found(made_up(buckets))
    async with running(store, size) as (app, pilot):
        screen = await look(app, pilot)
        whole = Region(0, 0, *size)
        for panel in (screen.buckets, screen.pictures, screen.findings):
            assert panel.region in whole
            assert panel.size.height >= 2, panel
        assert screen.pictures.size.height >= 7
        assert screen.findings.size.height >= min(4, len(screen.findings.rows))
        await pilot.press("G")
        await until(pilot, lambda: screen.buckets.index == buckets - 1)
        await pilot.pause()
        lines = [screen.buckets.render_line(y).text for y in range(screen.buckets.size.height)]
        assert any(line.startswith("▸") for line in lines), "the highlighted one can be seen"
        assert lines[0].split()[:2] == ["bucket", "samples"], "the heading stays"


async def test_keys_move_between_buckets_and_their_pictures(
    store: Store, ended_job: Any, found: Callable[[DataLook], None]
) -> None:
    found(made_up(12))
    async with running(store, (80, 24)) as (app, pilot):
        screen = await look(app, pilot)
        first = drawn(screen)
        await pilot.press("j")
        await until(pilot, lambda: drawn(screen) != first)
        assert screen.buckets.index == 1
        await pilot.press("k", "up")
        await until(pilot, lambda: drawn(screen) == first)
        await pilot.press("down", "down", "k", "pagedown", "pagedown")
        assert screen.buckets.index == 11
        await pilot.press("g")
        await until(pilot, lambda: str(screen.pictures.border_title).startswith("64x128 "))
        assert str(screen.pictures.border_subtitle).startswith("← 1–")
        await pilot.press("right")
        await until(pilot, lambda: str(screen.pictures.border_subtitle).endswith("8 of 8 →"))
        assert screen.pictures.first > 0
        await pilot.press("h", "left")
        await until(pilot, lambda: drawn(screen) == first)
        await pilot.click(BucketsPanel, offset=(5, 4))
        await until(pilot, lambda: screen.buckets.index == 2)


async def test_what_was_left_out_takes_room_on_a_low_screen_while_it_is_read(
    store: Store, ended_job: Any, found: Callable[[DataLook], None]
) -> None:
    reasons = [{"count": n, "text": f"reason {n}", "examples": ["a.png"]} for n in range(30, 0, -1)]
    found(made_up(reasons=reasons))
    async with running(store, (80, 24)) as (app, pilot):
        screen = await look(app, pilot)
        assert screen.findings.size.height == 4
        await pilot.press("tab")
        await until(pilot, lambda: screen.findings.size.height > 10)
        assert not screen.pictures.display
        bucket = screen.buckets.index
        await pilot.press("j", "j")
        await until(pilot, lambda: screen.findings.scroll_y == 2)
        assert screen.buckets.index == bucket
        await pilot.press("tab")
        await until(pilot, lambda: screen.pictures.display)


@pytest.mark.slow
async def test_changed_data_is_told(
    store: Store, ended_job: Any, found: Callable[[DataLook], None]
) -> None:
    import json

    found(made_up())
    write_atomic(ended_job.run_dir.data_report, json.dumps(made_up(samples=11).report))
    async with running(store) as (app, pilot):
        screen = await look(app, pilot)
        assert "since the job read it: samples 11 → 57." in text_of(app, "#data-changed")
        assert screen.query_one("#data-changed").display
        write_atomic(ended_job.run_dir.data_report, json.dumps(made_up().report))
        await pilot.press("r")
        await until(pilot, lambda: not screen.query_one("#data-changed").display)


@pytest.mark.slow
async def test_a_screen_that_nothing_happens_on_is_not_painted(
    store: Store,
    ended_job: Any,
    found: Callable[[DataLook], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found(made_up())
    running_job = add_job(store, "runs", state=State.RUNNING)
    async with running(store) as (app, pilot):
        await pilot.press("j")
        await look(app, pilot)
        await rest(app)
        painted: list[str] = []
        display = app._display

        def note(screen: Any, what: Any) -> None:
            painted.append(str(screen))
            display(screen, what)

        monkeypatch.setattr(app, "_display", note)
        for _ in range(3):  # what happens on the dashboard meanwhile
            add_job(store)
            running_job.run_dir.rank_log(0).write_text("a line\n")
            await another_look(app, pilot)
        assert painted == []
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.dashboard)
        await until(pilot, lambda: len(app.dashboard.snapshot.jobs) == 5)


@pytest.mark.slow
async def test_the_pictures_lie_on_the_background_of_the_theme(
    store: Store, ended_job: Any, found: Callable[[DataLook], None]
) -> None:
    found(made_up(1))
    async with running(store) as (app, pilot):
        screen = await look(app, pilot)
        dark = drawn(screen)
        await pilot.press("t")
        await until(pilot, lambda: drawn(screen) != dark)
        red, green, blue = screen.pictures.background_colors[1].rgb
        assert min(red, green, blue) > 200
        assert f"({red}, {green}, {blue})" in drawn(screen).replace("red=", "").replace(
            "green=", ""
        ).replace("blue=", "")


async def test_without_a_job_there_is_no_data(store: Store) -> None:
    async with running(store) as (app, pilot):
        await pilot.press("d")
        await rest(app)
        assert app.screen is app.dashboard


# -- rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 76, 110, 190])
def test_rows_fit(width: int) -> None:
    from rich.cells import cell_len

    long = "a/long/path/of/folders/" * 9 + "猫.png"
    found = [
        {"count": 12345, "text": "a reason of many words " * 3, "examples": [long] * 8},
        {"count": 1, "text": "short", "examples": ["猫" * 60]},
    ]
    report = made_up(40, reasons=found).report
    report["datasets"] = report["datasets"] * 2
    report["datasets"][1] = report["datasets"][1] | {"path": "/data/猫" * 30}
    report["buckets"][0] |= {"size": [1024, 1024, 81], "samples": 1_234_567}
    rows: list[Row] = [
        *finding_rows(report, width),
        *bucket_rows(report["buckets"], width),
        looking_row(0, 0, width),
        looking_row(1234, 20000, width),
    ]
    for row in rows:
        assert cell_len(plain(row)) <= width, plain(row)


def test_columns_stand_below_their_headings() -> None:
    heading, *rows = (plain(row) for row in bucket_rows(made_up(3).report["buckets"], 76))
    for name, text in (("cropped", "30%"), ("max crop", "40%")):
        end = heading.index(name) + len(name)
        assert all(row[:end].endswith(text) for row in rows)
    end = heading.index("per epoch") + len("per epoch")
    assert [row[:end].split()[-1] for row in rows] == ["20", "19", "18"]


def test_the_totals_fit_80_columns() -> None:
    report = made_up(
        samples=20_000, texts=20_000, views=8, longest=1234, steps_per_epoch=2_500, epochs=8.12
    ).report
    assert all(len(line) <= 78 for line in headlines(report))


def test_the_totals_name_sound_and_what_lies_beside_each_sample() -> None:
    for values, end in (
        ({"sound": [0, 3]}, "sound in none of 3 videos"),
        ({"references": ["layer", 2, 2]}, "each with 2 layers"),
        ({"references": ["conditioning image", 0, 1]}, "each with 0 to 1 conditioning image"),
    ):
        assert headlines(made_up(**values).report)[0].endswith(f" · {end}")


def test_many_examples_are_told_apart_from_all() -> None:
    few = {"count": 2, "text": "grey", "examples": ["a.png", "b.png"]}
    many = {"count": 20, "text": "grey", "examples": ["a.png", "b.png"]}
    report = made_up(reasons=[few, many], handled=[], cautions=[]).report
    assert [plain(row).split("grey")[1].strip() for row in finding_rows(report, 76)] == [
        "a.png, b.png",
        "a.png, b.png, …",
    ]


# -- pictures ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 128), (128, 40), (40, 128), (100, 128)])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_a_strip_is_taken_apart(shape: tuple[int, int], count: int) -> None:
    colours = ["red", "green", "blue", "orange", "purple", "teal", "pink", "navy"][:count]
    found = pictures_of(strip(colours, shape), shape[0] / shape[1])
    assert [picture.size for picture in found] == [shape] * count
    assert BACK not in {colour for picture in found for _, colour in picture.getcolors() or ()}


@pytest.mark.parametrize("aspect", [0.25, 0.56, 1.0, 1.78, 4.0])
@pytest.mark.parametrize("area", [(76, 8), (116, 14), (118, 32), (24, 30)])
def test_a_grid_stays_in_its_area(aspect: float, area: tuple[int, int]) -> None:
    columns, lines = area
    for count in (1, 3, 8):
        grid = find_grid(count, aspect, columns, lines)
        assert grid is not None
        assert grid.columns * (grid.width + 2) - 2 <= columns
        assert grid.rows * (grid.height + 2) - 2 <= lines * 2
        assert abs(grid.width / grid.height / aspect - 1) < 0.4
        tiles = pictures_of(strip(["red"] * count, (64, 64)), 1.0)
        rows = draw(tiles, grid, columns, BACK)
        assert len(rows) <= lines
        assert all(sum(len(segment.text) for segment in row) == columns for row in rows)


def test_no_picture_is_drawn_where_none_can_be_made_out() -> None:
    assert find_grid(8, 1.0, 76, 4) is None
    assert find_grid(8, 1.0, 5, 40) is None


def test_few_large_pictures_are_all_shown() -> None:
    grid = find_grid(3, 1.0, 76, 13)
    assert grid is not None
    assert (grid.columns, grid.rows) == (3, 1)


def test_two_pixels_share_a_character_and_alike_neighbours_an_escape_sequence() -> None:
    picture = Image.new("RGB", (16, 16), (200, 0, 0))
    picture.paste((0, 0, 200), (0, 8, 16, 16))
    picture.putpixel((3, 0), (204, 3, 0))  # nobody sees this
    grid = find_grid(1, 1.0, 16, 8)
    assert grid is not None
    first, *_, last = draw([picture], grid, 16, BACK)
    assert [(s.text, s.style.bgcolor.triplet) for s in first if s.style and s.style.bgcolor] == [
        (" " * 16, (200, 0, 0))
    ]
    assert len(last) == 1
    odd = Image.new("RGB", (16, 16), "black")
    odd.paste((255, 255, 255), (0, 0, 16, 5))
    lines = draw([odd], grid, 16, BACK)
    (edge,) = lines[2]
    assert edge.text == "▀" * 16
    assert edge.style is not None
    assert edge.style.color is not None
    assert edge.style.color.triplet == (255, 255, 255)


# -- how far the ranks are -----------------------------------------------------------------


def activity(store: Store, phase: Phase, width: int, name: str = "demo") -> str:
    job = next((j for j in store.all() if j.name == name), None)
    job = job or add_job(store, name, state=State.RUNNING)
    view = JobView(
        job, phase=phase, strategy="fsdp2", strategy_reason="a full copy would fill a GPU"
    )
    (row,) = activity_rows(view, width)
    return plain(row)


TWO = Phase("latents", 1234, 20_000, seconds_left=180, ranks=(617, 617))
EIGHT = Phase(
    "latents", 1234, 20_000, seconds_left=180, ranks=(154, 155, 154, 154, 155, 154) + (154,) * 2
)


def test_shared_work_tells_how_long_it_takes_and_what_each_rank_has_done(store: Store) -> None:
    text = activity(store, TWO, 116)
    assert "caching latents" in text
    assert "1234/20000  6%  3:00 left  ranks 617 + 617" in text
    assert "1234/20000  6%  3:00 left" in activity(store, TWO, 78)
    assert "154 + 155 + 154" in activity(store, EIGHT, 196)
    assert "3:00 left  8 ranks: 154 to 155" in activity(store, EIGHT, 116)
    even = Phase("encode", 1232, 20_000, ranks=(154,) * 8)
    assert "8 ranks: 154 each" in activity(store, even, 84)


@pytest.mark.parametrize("name", ["demo", "a-name-that-is-too-long-for-a-line"])
def test_the_bar_of_shared_work_is_never_squeezed_away(store: Store, name: str) -> None:
    for phase in (TWO, EIGHT, Phase("index", 1234, 20_000), Phase("check", 1, 3, seconds_left=9)):
        for width in range(78, 200):
            text = activity(store, phase, width, name)
            assert len(text) <= width
            assert sum(char in "━╸┄" for char in text) >= 6, text
            assert phase.seconds_left is None or "left" in text


def test_the_pace_gives_way_before_the_time_that_is_left(store: Store) -> None:
    job = add_job(store, "a-name-that-is-too-long-for-a-line", state=State.RUNNING)
    view = JobView(job, Progress(120, 0.4, 0.5, 60.0))
    (wide,), (narrow,) = activity_rows(view, 116), activity_rows(view, 64)
    assert "0.50 s/step  1:00 left" in plain(wide)
    assert "s/step" not in plain(narrow)
    assert "1:00 left" in plain(narrow)
