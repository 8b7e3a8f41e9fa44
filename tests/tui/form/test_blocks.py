"""The modal in which blocks are chosen, driven by keys over the form of a new job."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import yaml
from rich.cells import cell_len
from textual.geometry import Region
from textual.widgets import Static

from jobs.errors import UserError
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.spec.file.load import load_spec
from tests.support.tui.detection import DOUBLE, SINGLE, flux
from tests.support.tui.driven_app import form, running
from tests.support.tui.pilot import until
from tui.form import draft, pages
from tui.form.blocks import DetectScreen, block_rows, looking_row
from tui.form.fields import FieldRow
from tui.form.screen import NewJobScreen
from tui.text.block_text import Model, about, cautions, headline, outcome, parameters, share, usable
from tui.text.format import plain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from textual.pilot import Pilot

    from jobs.models.blocks import Detection
    from jobs.queue.store import Store
    from tui.app.app import FsdpTui

SIZES = [(80, 24), (120, 40), (200, 60)]


pytestmark = pytest.mark.usefixtures("no_processes")


class Detector:
    """Stands in for `detect_blocks`: answers, fails, or works until it is told to stop.

    Attributes:
        asked: What it was called with, call by call.
        answer: What it finds, or what it raises.
        endless: Whether it works until nobody wants the answer any more.
        stopped: Set when it noticed that.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Detection | Exception = flux()
        self.endless = False
        self.stopped = threading.Event()

    def __call__(
        self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool], **asked: Any
    ) -> Detection:
        self.asked.append(asked)
        progress(1, 4)
        while self.endless:
            if cancelled():
                self.stopped.set()
                raise Cancelled
            time.sleep(0.005)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Detector:
    fake = Detector()
    monkeypatch.setattr("tui.form.blocks.detect_blocks", fake)
    return fake


@asynccontextmanager
async def looking_at(
    store: Store,
    path: str | None = None,
    size: tuple[int, int] = (120, 40),
    chosen: list[str] | None = None,
) -> AsyncIterator[tuple[DetectScreen, Pilot[None], list[list[str] | None]]]:
    """The modal by itself, over the dashboard, and where its answer will be."""
    answers: list[list[str] | None] = []
    async with running(store, size) as (app, pilot):
        screen = DetectScreen(Model("flux", None, path), chosen, 1)
        await app.push_screen(screen, answers.append)
        yield screen, pilot, answers


@asynccontextmanager
async def found_in(
    store: Store, path: str | None = None, **options: Any
) -> AsyncIterator[tuple[DetectScreen, Pilot[None], list[list[str] | None]]]:
    """The modal by itself, after its first look."""
    async with looking_at(store, path, **options) as (screen, pilot, answers):
        await until(pilot, lambda: screen.panel.rows or screen.has_class("-failed"))
        yield screen, pilot, answers


async def modal(app: FsdpTui, pilot: Pilot[None], key: str = "f2") -> DetectScreen:
    """Open the modal and wait for its end of looking."""
    await pilot.press(key)
    await until(pilot, lambda: isinstance(app.screen, DetectScreen) and app.screen.is_mounted)
    screen = app.screen
    assert isinstance(screen, DetectScreen)
    await until(pilot, lambda: screen.panel.rows or screen.has_class("-failed"))
    return screen


def row(app: FsdpTui, name: str) -> FieldRow:
    return next(s for s in app.screen_stack if isinstance(s, NewJobScreen)).query_one(
        f"#row-{name}", FieldRow
    )


def checked(screen: DetectScreen) -> list[str]:
    """What the boxes on the screen say."""
    lines = [plain(line) for line in screen.panel.rows[1:]]
    return [line.replace("★", " ").split("■")[1].split()[0] for line in lines if "■" in line]


def text_of(screen: DetectScreen, name: str) -> str:
    return str(screen.query_one(f"#detect-{name}", Static).content)


def back(app: FsdpTui) -> bool:
    return isinstance(app.screen, NewJobScreen)


# -- looking -------------------------------------------------------------------------------


async def test_what_is_recommended_is_checked_and_judged(store: Store, detector: Detector) -> None:
    async with form(store, "n", (120, 40)) as (app, pilot):
        row(app, "num_processes").put(4)
        row(app, "model_flavour").put("dev")
        screen = await modal(app, pilot)
        assert detector.asked == [
            {
                "model_family": "flux",
                "model_flavour": "dev",
                "pretrained_model": None,
                "refresh": False,
            },
        ]
        assert checked(screen) == [SINGLE, DOUBLE]
        assert text_of(screen, "model") == (
            "FluxTransformer2DModel · 11.9 B parameters · flux dev · black-forest-labs/FLUX.1-dev "
            "· cached"
        )
        assert text_of(screen, "outcome") == (
            "wraps 99.5% in 57 units · largest unit 648 MiB · root 122 MiB gathered on each rank "
            "· 5.5 GiB per rank on 4 ranks"
        )
        assert not screen.query_one("#detect-cautions").display
        (first,) = (plain(line) for line in screen.panel.rows if SINGLE in plain(line))
        assert first.split()[:8] == ["▸", "■", "★", SINGLE, "no-split", "38", "5.4", "B"]
        assert "━" in first
        assert "single_transformer_blocks.0" in first


@pytest.mark.slow
async def test_a_bad_path_is_told_in_words_and_can_be_tried_again(
    store: Store, detector: Detector
) -> None:
    detector.answer = UserError("no such model directory: /no/where", "check the path")
    async with found_in(store, "/no/where", size=(80, 24)) as (screen, pilot, answers):
        assert detector.asked[0]["pretrained_model"] == "/no/where"
        problem = screen.query_one("#detect-problem")
        assert text_of(screen, "problem") == (
            "! no such model directory: /no/where; check the path"
        )
        assert problem.display
        await pilot.press("enter", "space", "a", "slash")  # nothing to choose from
        assert screen.is_current
        assert answers == []
        detector.answer = flux(model_family=None)
        await pilot.press("r")
        await until(pilot, lambda: screen.panel.rows)
        assert not problem.display
        assert checked(screen) == [SINGLE, DOUBLE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ToolError("python -m engine.blocks failed: killed"), "! python -m engine.blocks failed"),
        (KeyError("parts"), "! KeyError: 'parts'"),
    ],
)
async def test_a_failure_of_ours_is_told_too(
    store: Store, detector: Detector, error: Exception, told: str
) -> None:
    detector.answer = error
    async with found_in(store) as (screen, pilot, answers):
        assert text_of(screen, "problem").startswith(told)
        await pilot.press("escape")
        await until(pilot, lambda: answers == [None])


@pytest.mark.slow
async def test_escape_stops_the_first_look_and_leaves(store: Store, detector: Detector) -> None:
    detector.endless = True
    async with looking_at(store, size=(80, 24)) as (screen, pilot, answers):
        await until(pilot, lambda: "━" in plain(screen.looking.rows[0]))
        assert screen.looking.display
        await pilot.press("escape")
        await until(pilot, lambda: answers == [None])
        await until(pilot, detector.stopped.is_set)


async def test_a_second_look_keeps_the_choice_and_can_be_stopped(
    store: Store, detector: Detector
) -> None:
    async with found_in(store) as (screen, pilot, answers):
        await pilot.press("space")
        await until(pilot, lambda: checked(screen) == [DOUBLE])
        detector.answer = flux(cached=False)
        await pilot.press("r")
        await until(pilot, lambda: "cached" not in text_of(screen, "model"))
        assert detector.asked[-1]["refresh"]
        assert checked(screen) == [DOUBLE]
        detector.endless = True
        await pilot.press("r")
        await until(pilot, lambda: len(detector.asked) == 3)
        await pilot.press("j", "j", "space")  # nobody waits for it
        await until(pilot, lambda: checked(screen) == [DOUBLE, "AdaLayerNormZero"])
        await pilot.press("escape")
        await until(pilot, detector.stopped.is_set)
        await until(pilot, lambda: not screen.looking.display)
        assert answers == []
        await pilot.press("escape")
        await until(pilot, lambda: answers == [None])


@pytest.mark.slow
async def test_a_second_look_that_fails_leaves_what_was_found(
    store: Store, detector: Detector
) -> None:
    async with found_in(store, size=(80, 24)) as (screen, pilot, answers):
        detector.answer = UserError("the disk is gone")
        await pilot.press("r")
        await until(pilot, lambda: screen.has_class("-failed"))
        assert screen.query_one("#detect-problem").display
        assert checked(screen) == [SINGLE, DOUBLE]
        await pilot.press("enter")
        await until(pilot, lambda: answers == [[SINGLE, DOUBLE]])


# -- choosing ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_what_is_applied_is_what_would_be_submitted(
    store: Store, detector: Detector, job_values: dict[str, Any]
) -> None:
    async with form(store, "n", (120, 40)) as (app, pilot):
        for name, value in job_values.items():
            if name in pages.SHOWN:
                row(app, name).put(value)
        await modal(app, pilot)
        await pilot.press("down", "space", "enter")
        await until(pilot, lambda: back(app))
        await until(pilot, lambda: row(app, pages.BLOCKS).control.has_focus)
        screen = app.screen
        assert isinstance(screen, NewJobScreen)
        preview = screen.query_one("#yaml", Static)
        await until(pilot, lambda: SINGLE in str(preview.content))
        assert yaml.safe_load(str(preview.content))[pages.BLOCKS] == [SINGLE]
        assert draft.spec_of(screen.values).fsdp_transformer_layer_cls_to_wrap == [SINGLE]


@pytest.mark.slow
async def test_the_recommended_choice_is_in_the_file_of_the_queued_job(
    store: Store, detector: Detector, job_values: dict[str, Any]
) -> None:
    async with form(store) as (app, pilot):
        for name, value in job_values.items():
            if name in pages.SHOWN:
                row(app, name).put(value)
        await modal(app, pilot, "f2")
        await pilot.press("enter")
        await until(pilot, lambda: back(app) and row(app, pages.BLOCKS).value)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: app.screen is app.dashboard)
        spec = load_spec(store.all()[0].run_dir.job_file)
        assert spec.fsdp_transformer_layer_cls_to_wrap == [SINGLE, DOUBLE]


@pytest.mark.slow
async def test_what_the_field_says_is_checked_at_first_and_stays_on_escape(
    store: Store, detector: Detector
) -> None:
    said = [DOUBLE, "FluxSingelTransformerBlock", "Conv"]
    async with form(store) as (app, pilot):
        row(app, "num_processes").put(2)
        control = row(app, pages.BLOCKS).control
        row(app, pages.BLOCKS).put(said)
        await until(pilot, lambda: not control.disabled)
        control.focus()
        await until(pilot, lambda: control.has_focus)
        screen = await modal(app, pilot, "enter")
        assert checked(screen) == [DOUBLE]
        told = text_of(screen, "cautions")
        assert told.splitlines() == [
            "! the model has no FluxSingelTransformerBlock, named in the field; did you mean "
            f'"{SINGLE}"?',
            "! the model has no Conv, named in the field",
        ]
        await pilot.press("a", "escape")
        await until(pilot, lambda: back(app))
        assert row(app, pages.BLOCKS).value == ", ".join(said)
        await modal(app, pilot)
        await pilot.press("enter")
        await until(pilot, lambda: row(app, pages.BLOCKS).value == DOUBLE)


@pytest.mark.slow
async def test_choosing_nothing_is_a_choice_that_is_remembered_for_this_model(
    store: Store, detector: Detector
) -> None:
    async with form(store, "n", (120, 40)) as (app, pilot):
        screen = await modal(app, pilot)
        await pilot.press("space", "j", "space")
        await until(pilot, lambda: checked(screen) == [])
        assert text_of(screen, "outcome").startswith("nothing checked: the field stays blank")
        await pilot.press("enter")
        await until(pilot, lambda: back(app))
        assert row(app, pages.BLOCKS).value is None
        screen = await modal(app, pilot)
        assert checked(screen) == []
        await pilot.press("escape")
        await until(pilot, lambda: back(app))
        row(app, "model_flavour").put("schnell")
        screen = await modal(app, pilot)
        assert checked(screen) == [SINGLE, DOUBLE]


async def test_nested_choices_are_warned_about_until_the_recommended_are_taken(
    store: Store, detector: Detector
) -> None:
    async with found_in(store, size=(80, 24)) as (screen, pilot, _):
        await pilot.press("G", "space")
        line = screen.query_one("#detect-cautions")
        await until(pilot, lambda: line.display)
        assert text_of(screen, "cautions") == (
            f"! nested: AdaLayerNormZeroSingle is inside {SINGLE}; only the rest of the outer "
            "class is its own unit"
        )
        await pilot.press("k", "space")
        await until(pilot, lambda: "FluxAttention" in text_of(screen, "cautions"))
        assert f"inside {SINGLE} and {DOUBLE}; only" in text_of(screen, "cautions")
        await pilot.press("a")
        await until(pilot, lambda: not line.display)
        assert checked(screen) == [SINGLE, DOUBLE]


@pytest.mark.slow
async def test_the_mouse_checks_and_the_keys_below_can_be_clicked(
    store: Store, detector: Detector
) -> None:
    async with found_in(store) as (screen, pilot, _):
        await pilot.click(screen.panel, offset=(10, 4))
        await until(pilot, lambda: "FeedForward" in checked(screen))
        assert "145 MiB" in text_of(screen, "about")
        assert text_of(screen, "paths").startswith("at transformer_blocks.0.ff, ")
        await pilot.click("#detect-keys", offset=(1, 0))
        await until(pilot, lambda: "FeedForward" not in checked(screen))


# -- searching -----------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_search_lists_names_and_paths(store: Store, detector: Detector) -> None:
    async with found_in(store, size=(80, 24)) as (screen, pilot, answers):
        names = lambda: [one.class_name for one in screen.panel.listed]  # noqa: E731
        await pilot.press("slash")
        field = screen.query_one("#detect-search")
        await until(pilot, lambda: field.has_focus)
        await pilot.press(*"SINGLE")
        await until(pilot, lambda: names() == [SINGLE, "AdaLayerNormZeroSingle"])
        await pilot.press("down", "enter")
        await until(pilot, lambda: screen.panel.has_focus)
        await pilot.press("space")
        await until(pilot, lambda: checked(screen) == [SINGLE, "AdaLayerNormZeroSingle"])
        assert screen.chosen == [SINGLE, DOUBLE, "AdaLayerNormZeroSingle"], "hidden ones stay"
        await pilot.press("escape")  # out of the search
        await until(pilot, lambda: len(names()) == 6)
        assert answers == []
        assert not field.display
        highlighted = screen.panel.highlighted
        assert highlighted is not None
        assert highlighted.class_name == "AdaLayerNormZeroSingle"
        await pilot.press("slash", *"no such")
        await until(pilot, lambda: names() == [])
        assert "no class matches" in plain(screen.panel.rows[-1])
        field.value = "0.ff"  # type: ignore[attr-defined]
        await until(pilot, lambda: names() == ["FeedForward"])
        await pilot.press("escape")
        await until(pilot, lambda: len(names()) == 6)
        await pilot.press("escape")
        await until(pilot, lambda: answers == [None])


# -- real models ---------------------------------------------------------------------------


def looking_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if "engine.blocks" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def model(make_model: Callable[..., Path]) -> Path:
    """A small FLUX.1 without weights."""
    root = make_model()
    config = {
        "_class_name": "FluxTransformer2DModel",
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": [2, 2, 4],
    }
    (root / "transformer" / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
async def test_a_real_model_is_looked_at_in_a_process_and_remembered(
    store: Store, model: Path
) -> None:
    async with found_in(store, str(model), size=(80, 24)) as (screen, _, _):
        assert sorted(checked(screen)) == [SINGLE, DOUBLE]
        assert " in 5 units" in text_of(screen, "outcome")
        assert "cached" not in text_of(screen, "model")
    async with found_in(store, str(model)) as (screen, _, _):
        assert screen.detection is not None
        assert screen.detection.cached
        assert not looking_processes()


async def test_escape_ends_the_process_that_looks(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"  # it looks forever, whatever it is asked
    python.write_text(f"#!{sys.executable} -S\nimport time\ntime.sleep(6000)\n")
    python.chmod(0o700)
    monkeypatch.setattr("jobs.machine.engine_tools.sys.executable", str(python))
    async with looking_at(store, str(model)) as (_, pilot, answers):
        await until(pilot, looking_processes)
        (process,) = looking_processes()
        process.suspend()  # nor does SIGTERM end it
        try:
            await pilot.press("escape")
            await until(pilot, lambda: answers == [None])
            await until(pilot, lambda: not looking_processes())
        finally:
            with suppress(psutil.NoSuchProcess):
                process.kill()


async def test_a_path_without_a_model_is_an_error_in_words(store: Store, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    async with found_in(store, nowhere, size=(80, 24)) as (screen, _, _):
        assert text_of(screen, "problem").startswith(f"! no such model directory: {nowhere}")
        assert not looking_processes()


# -- room ----------------------------------------------------------------------------------


def many() -> Detection:
    """A model with more classes than a screen has lines, and long names."""
    found = flux()
    last = found.classes[-1]
    more = [
        replace(
            last,
            class_name=f"HunyuanVideoTokenReplaceSingleTransformerBlock{number}",
            sample_paths=[f"a.long.path.to.some.module.{number}.{i}" for i in range(3)],
        )
        for number in range(30)
    ]
    return replace(found, classes=[*found.classes, *more])


@pytest.mark.slow
@pytest.mark.parametrize("size", [*SIZES, (80, 34), (100, 50)])
async def test_everything_has_room(store: Store, detector: Detector, size: tuple[int, int]) -> None:
    detector.answer = many()
    small = [one.class_name for one in flux().classes]
    chosen = [*small, "FluxSingleTransformerBlok", "Typo"]
    async with found_in(store, size=size, chosen=chosen) as (screen, pilot, _):
        await pilot.press("slash")
        await until(pilot, lambda: screen.query_one("#detect-search").has_focus)
        await pilot.press("enter", "G")
        await until(pilot, lambda: screen.panel.index == 35)
        assert text_of(screen, "cautions").endswith("\n! and 4 more")
        detector.endless = True
        await pilot.press("r")
        await until(pilot, lambda: screen.looking.size.height == 1)
        dialog = screen.query_one("#detect").region
        assert dialog in Region(0, 0, *size)
        for name in ("model", "blocks", "about", "paths", "looking", "outcome", "cautions", "keys"):
            widget = screen.query_one(f"#detect-{name}")
            assert widget.region in dialog, name
            assert widget.size.height >= 1, name
        assert screen.panel.size.height >= 5
        lines = [screen.panel.render_line(y).text for y in range(screen.panel.size.height)]
        assert any(line.startswith("▸") for line in lines), "the highlighted one can be seen"
        assert lines[0].split()[:2] == ["class", "count"], "the heading stays"


@pytest.mark.parametrize("width", [44, 60, 70, 90, 111, 190])
def test_rows_fit(width: int) -> None:
    found = many()
    names = max(len(one.class_name) for one in found.classes)
    rows = block_rows(found.classes, {SINGLE}, width, names)
    assert {cell_len(plain(line)) for line in rows[1:]} <= set(range(width + 1))
    columns = {plain(line).index("%") for line in rows[1:]}
    assert len(columns) == 1
    for done, total in ((0, 0), (1, 3), (3, 3)):
        assert cell_len(plain(looking_row(done, total, width))) <= width


# -- words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 K"),
        (141_600_000, "141.6 M"),
        (999_960_000, "1.0 B"),
        (999_400, "999.4 K"),
        (999_499, "999.5 K"),
        (11_901_408_320, "11.9 B"),
    ],
)
def test_numbers_of_parameters(count: int, text: str) -> None:
    assert parameters(count) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0%"), (0.0001, "<0.1%"), (0.978, "97.8%"), (0.99999, ">99.9%"), (1, "100%")],
)
def test_shares_never_claim_all_or_nothing(part: float, text: str) -> None:
    assert share(part) == text


def test_cautions_say_what_saves_little() -> None:
    found = flux()
    assert cautions(found, [SINGLE, DOUBLE]) == []
    assert cautions(found, []) == []
    (told,) = cautions(found, ["AdaLayerNormZeroSingle"])
    assert told.startswith("91.0% of the model stays in the root")
    whole = replace(found, total_params=found.total_params // 40)
    assert "one unit holds more than half" in cautions(whole, [DOUBLE])[0]


def test_a_choice_that_is_not_listed_is_named() -> None:
    found = flux()
    found = replace(found, classes=[one for one in found.classes if one.class_name != DOUBLE])
    assert cautions(found, [SINGLE, DOUBLE]) == [
        f"{DOUBLE} is checked but not repeated; a unchecks it"
    ]


def test_classes_that_cannot_be_units_are_named_and_left_out() -> None:
    found = flux()
    found = replace(found, parts=replace(found.parts, containers=("FeedForward",)))
    chosen = ["FluxTransformer2DModel", "FeedForward", "Fluxattention", DOUBLE]
    whole, container, typo = cautions(found, chosen)
    assert "is the full model" in whole
    assert "FeedForward, named in the field, has no forward" in container
    assert 'no Fluxattention, named in the field; did you mean "FluxAttention"?' in typo
    assert usable(found, chosen) == [DOUBLE]
    assert outcome(found, chosen[:3], 2).startswith("nothing checked")


def test_many_small_units_are_warned_about() -> None:
    found = flux()
    small = ["AdaLayerNormZero", "FeedForward", "FluxAttention", "AdaLayerNormZeroSingle"]
    (told,) = cautions(found, small)
    assert told.startswith("171 units (57 with the recommended blocks)")


def test_what_is_said_of_a_model_and_a_class() -> None:
    found = flux(cached=False)
    assert headline(found, Model("flux", None, "toy/model")) == (
        "FluxTransformer2DModel · 11.9 B parameters · flux · toy/model"
    )
    assert about(found.classes[0], 2) == (
        "each 141.0 M parameters, 269 MiB · ★ recommended · in _no_split_modules, _repeated_blocks"
    )
    assert outcome(found, [SINGLE], 1).endswith("22.1 GiB on 1 rank")


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ({}, 1),
        ({"num_processes": "4"}, 4),
        ({"num_processes": 2}, 2),
        ({"num_processes": "x"}, 1),
        ({"gpus": [0, 2, 5], "num_processes": 1}, 3),
        ({"gpus": 8}, 8),
        ({"num_processes": "0"}, 1),
    ],
)
def test_the_form_s_number_of_ranks(values: dict[str, Any], ranks: int) -> None:
    assert draft.ranks_of(values) == ranks
