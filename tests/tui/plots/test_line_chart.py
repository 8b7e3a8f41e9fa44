"""Charts of several curves, their axes, and what the plots screen draws: pure functions."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import UserError
from jobs.run.events import Step
from tui.plots.drawing import (
    MARKS,
    SPANS,
    Choices,
    Values,
    as_csv,
    as_text,
    panned,
    screenful,
    settings,
    write_csv,
    zoomed,
)
from tui.plots.line_chart import Curve, View, figure, log_scale, scale_of
from tui.plots.measures import COMMON, LOSS, MEASURES, Run, nearest, series_of
from tui.text.format import plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tui.text.format import Row


def run_of(job: int = 1, count: int = 100, root: Path | None = None, **changes: float) -> Run:
    steps = [
        Step(
            step=n,
            t=1000.0 + 2 * n,
            loss=1 / n,
            lr=1e-3,
            grad_norm=0.5,
            seconds=2.0,
            images_per_second=4.0,
            **changes,
        )
        for n in range(1, count + 1)
    ]
    held = [(n, 0.5 + 1 / n) for n in range(20, count + 1, 20)]
    return Run(job, f"run-{job}", root, steps, held)  # type: ignore[arg-type]


def text(rows: Sequence[Row]) -> str:
    return "\n".join(plain(row) for row in rows)


# -- figures -------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e9, 1e9), max_size=200),
    st.floats(0, 100),
    st.floats(0.1, 300),
    st.booleans(),
    st.booleans(),
    st.integers(0, 80),
    st.integers(0, 30),
)
def test_a_figure_never_leaves_its_box(
    ys: list[float], first: float, size: float, log: bool, whole: bool, width: int, height: int
) -> None:
    curve = Curve(range(len(ys)), ys, "raw", "●")
    points = Curve(range(len(ys)), ys, "accent", "◇", "points")
    view = View(first, first + size, log=log, whole=whole, cursor=first + size / 2)
    rows = figure((curve, points), view, width, height)
    assert len(rows) in (0, height)
    assert all(len(plain(row)) <= width for row in rows)


def test_curves_are_told_apart_by_glyphs() -> None:
    up = Curve(range(100), [n / 100 for n in range(100)], "run0", "●")
    down = Curve(range(100), [1 - n / 100 for n in range(100)], "run1", "▲")
    rows = figure((up, down), View(0, 99), 80, 20)
    assert text(rows[:4]).count("●") >= 1, "it ends high"
    assert text(rows[:4]).count("▲") >= 1, "it begins high"
    assert "●" in plain(rows[0])
    assert "▲" in plain(rows[-3]) + plain(rows[-2])


def test_a_peak_between_many_values_is_drawn() -> None:
    ys = [0.0] * 50_000
    ys[31_234] = 1.0
    rows = figure((Curve(range(len(ys)), ys, "raw"),), View(0, len(ys), whole=True), 60, 10)
    drawn = [max(map(ord, plain(row).split("│")[-1].split("┤")[-1] or " ")) for row in rows[:-1]]
    assert all(code > 0x2800 for code in drawn), "a stroke over the whole height"


def test_a_line_runs_on_to_values_outside_the_view() -> None:
    curve = Curve([0, 100], [0.0, 1.0], "raw")
    assert figure((curve,), View(40, 60), 40, 10) == (), "no value is in the view"
    curve = Curve([0, 50, 100], [0.0, 0.5, 1.0], "raw")
    rows = figure((curve,), View(40, 60, whole=True), 40, 10)
    assert sum(char > "\u2800" for char in text(rows)) > 20


def test_the_cursor_is_an_upright_line() -> None:
    curve = Curve(range(11), [0.5] * 11, "raw")
    rows = figure((curve,), View(0, 10, cursor=5), 45, 9)
    columns = {plain(row).rindex("│") for row in rows[:3]}
    assert len(columns) == 1
    assert 22 <= columns.pop() <= 28


def test_a_logarithmic_axis_has_decades_and_no_place_for_zero() -> None:
    scale = scale_of([0.0, 1e-4, 1e-2, 1.0], 20, log=True, whole=True)
    assert scale is not None
    assert scale.labels == ("0.0001", "0.001", "0.01", "0.1", "1")
    assert scale.share(0.01) == pytest.approx(0.5)
    assert scale.share(0) == 0
    assert scale_of([0.0, -1.0], 20, log=True) is None
    assert log_scale(0.3, 0.4, 5).labels[:2] == ("0.300", "0.325")


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=50), st.booleans())
def test_every_value_has_a_place_between_the_ends(values: list[float], log: bool) -> None:
    scale = scale_of(values, 12, log=log, whole=True)
    assert scale is not None
    assert len(scale.labels) == len(scale.ticks) <= 12
    assert all(0 <= scale.share(value) <= 1 for value in values)
    assert scale.share(max(values)) >= scale.share(min(values))


# -- series --------------------------------------------------------------------------------


def test_values_that_are_no_numbers_are_left_out() -> None:
    steps = [Step(n, loss, t=10.0 + n) for n, loss in enumerate([1.0, math.nan, 3.0], 1)]
    run = Run(1, "x", None, steps, [(2, math.inf), (3, 0.5)])  # type: ignore[arg-type]
    assert series_of(run, LOSS, by_time=False).ys == [1.0, 3.0]
    assert list(series_of(run, LOSS, by_time=True).xs) == [0.0, 2.0]
    assert series_of(run, MEASURES[5], by_time=True).ys == [0.5]
    assert series_of(run, MEASURES[1], by_time=False).ys == []


def test_a_clock_that_was_set_back_does_not_turn_the_axis_round() -> None:
    steps = [Step(n, 1.0, t=t) for n, t in enumerate([10.0, 20.0, 15.0, 30.0], 1)]
    run = Run(1, "x", None, steps)  # type: ignore[arg-type]
    assert list(series_of(run, LOSS, by_time=True).xs) == [0, 10, 10, 20]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(-120, 120))
def test_the_nearest_place(places: list[float], x: float) -> None:
    places.sort()
    found = places[nearest(places, x)]
    assert abs(found - x) == min(abs(place - x) for place in places)


# -- screenfuls ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 21), (120, 37), (200, 57), (20, 5), (1, 1)])
@pytest.mark.parametrize("runs", [0, 1, 3])
@pytest.mark.parametrize(
    "choices",
    [
        Choices(),
        Choices(everything=True),
        Choices(measure=6),
        Choices(by_time=True, log=True),
        Choices(measure=1, cursor=40.0),
        Choices(extent=(10.0, 30.0), cursor=20.0, whole=True),
        Choices(span=1),
        Choices(raw=True, measure=5),
    ],
)
def test_a_screenful_fills_its_room(size: tuple[int, int], runs: int, choices: Choices) -> None:
    values = Values([run_of(n + 1) for n in range(runs)])
    rows = screenful(values, choices, *size)
    assert len(rows) == size[1]
    if size[0] >= 80:
        assert all(len(plain(row)) <= size[0] for row in rows)


def test_the_legend_reads_values_and_names_runs_by_glyphs() -> None:
    values = Values([run_of(1), run_of(2)])
    shown = text(screenful(values, Choices(cursor=50.0), 100, 30))
    assert f"{MARKS[0]} 1 run-1" in shown
    assert f"{MARKS[1]} 2 run-2" in shown
    assert "loss 0.0200" in shown
    assert "average " in shown
    assert "◇ validation 0.525" in shown
    assert "values at step 50" in shown
    assert "no raw values" in shown
    assert MARKS[0] not in text(screenful(Values([run_of(1)]), Choices(), 100, 30))


def test_memory_is_shown_in_gib() -> None:
    values = Values([run_of(peak_bytes=3 * 2**30)])
    assert "memory 3.0 GiB" in text(screenful(values, Choices(measure=6), 80, 24))
    assert "no data yet: memory" in text(screenful(Values([run_of()]), Choices(measure=6), 80, 24))


def test_the_settings_are_said_in_words() -> None:
    values = Values([run_of()])
    assert settings(values, Choices()) == "over steps · average of 10"
    said = settings(
        values, Choices(by_time=True, log=True, span=SPANS.index(50), raw=False, extent=(1.0, 2.0))
    )
    assert said == "over time · average of 50 · log scale · no raw values · zoomed"
    assert "average" not in settings(values, Choices(measure=1))


def test_zooming_stays_within_what_there_is() -> None:
    whole = (0.0, 100.0)
    end = zoomed(Choices(), whole, 0.5)
    assert end.extent == (50.0, 100.0), "the newest values are what is looked for"
    around = zoomed(Choices(cursor=20.0), whole, 0.5)
    assert around.extent == (10.0, 60.0), "what was under the cursor stays there"
    assert panned(end, whole, 0.25).extent == (50.0, 100.0)
    assert panned(end, whole, -0.5).extent == (25.0, 75.0)
    assert panned(end, whole, -9).extent == (0.0, 50.0)
    assert zoomed(end, whole, 2.0).extent is None
    near = Choices()
    for _ in range(20):
        near = zoomed(near, whole, 0.5)
    assert near.extent == (96.0, 100.0)
    assert panned(Choices(), whole, 1).extent is None


# -- files ---------------------------------------------------------------------------------


def test_the_file_has_what_is_shown(tmp_path: Path) -> None:
    values = Values([run_of(3, root=tmp_path), run_of(4)])
    choices = Choices(extent=(10.0, 12.0))
    path = write_csv(values, choices)
    assert path.parent == tmp_path / "plots"
    assert path.name.startswith("loss-of-3-4-")
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [(row["job"], row["step"]) for row in rows] == [
        ("3", "10"),
        ("3", "11"),
        ("3", "12"),
        ("4", "10"),
        ("4", "11"),
        ("4", "12"),
    ]
    assert float(rows[0]["value"]) == 0.1
    assert float(rows[0]["seconds"]) == 18.0
    assert float(rows[0]["average"]) > 0.1
    both = list(csv.DictReader(io.StringIO(as_csv(values, Choices(everything=True)))))
    assert {row["measure"] for row in both} == {m.name for m in MEASURES[:COMMON]} - {"memory"}
    assert next(row for row in both if row["measure"] == "lr")["average"] == ""


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to write yet"):
        write_csv(Values([Run(1, "x", tmp_path, ())]), Choices())
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*plots"):
        write_csv(Values([run_of(root=tmp_path)]), Choices())


def test_values_are_copied_with_tabs_between() -> None:
    values = Values([run_of(1), run_of(2)])
    lines = as_text(values, Choices(cursor=4.2, span=1)).splitlines()
    assert lines == ["1 run-1\tstep 4\tloss\t0.25", "2 run-2\tstep 4\tloss\t0.25"]
    assert as_text(Values(), Choices()) == ""


def test_charts_under_each_other_have_their_axes_in_one_column() -> None:
    rows = [plain(row) for row in screenful(Values([run_of()]), Choices(everything=True), 80, 40)]
    axes = [min(row.find(sign) % 1000 for sign in "│┤") for row in rows if set(row) & set("│┤")]
    assert len(axes) > 12
    assert len(set(axes)) == 1
