"""The rows of the plots screen: tabs, readings, charts. Pure, but for a cache."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.run.rundir import write_atomic
from tui.plots.line_chart import Curve, View, ema, figure, gutter_of, smoothing_span
from tui.plots.measures import COMMON, LOSS, MEASURES, VALIDATION, place, series_of
from tui.text.format import Row, Span, cut, left, plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tui.plots.measures import Measure, Run, Series


# By run, so that color is not the only difference; the ASCII forms differ too.
MARKS: Final = ("●", "▲", "■", "+", "▼", "×")
MOST_RUNS: Final = len(MARKS)
SPANS: Final = (None, 1, 5, 10, 20, 50, 100, 200, 500)  # None: chosen by the number of values
_LEAST_RANGE: Final = 4.0
_TWO_BESIDE: Final = 70  # columns that two charts need
_THREE_BESIDE: Final = 170


@dataclass(frozen=True)
class Choices:
    """What is shown of the runs, and how. Each key of the plots screen changes one of these.

    Attributes:
        measure: Index into `MEASURES`.
        raw: Draw values behind their average; None: only for a single run.
        everything: Show all measures, small.
        span: Index into `SPANS`: the number of values averaged.
        extent: The visible part of the axis; None for all of it, also when it grows.
        cursor: Where values are read, on the axis.
    """

    measure: int = 0
    everything: bool = False
    by_time: bool = False
    log: bool = False
    whole: bool = False
    raw: bool | None = None
    span: int = 0
    extent: tuple[float, float] | None = None
    cursor: float | None = None

    @property
    def shown(self) -> tuple[Measure, ...]:
        return MEASURES if self.everything else (MEASURES[self.measure],)

    def has_raw(self, runs: int) -> bool:
        """Return whether values are drawn behind the averages of this many runs."""
        return self.raw if self.raw is not None else runs < 2


@dataclass
class Values:
    """The series of some runs and their averages, computed once."""

    runs: Sequence[Run] = ()
    _series: dict[tuple[int, str, bool], Series] = field(default_factory=dict)
    _averages: dict[tuple[int, str, int | None], Sequence[float]] = field(default_factory=dict)

    def of(self, run: int, measure: Measure, by_time: bool) -> Series:
        key = (run, measure.name, by_time)
        if key not in self._series:
            self._series[key] = series_of(self.runs[run], measure, by_time=by_time)
        return self._series[key]

    def average(self, run: int, measure: Measure, span: int | None) -> Sequence[float]:
        key = (run, measure.name, span)
        if key not in self._averages:
            ys = self.of(run, measure, False).ys
            self._averages[key] = ema(ys, span or smoothing_span(len(ys)))
        return self._averages[key]

    def extent(self, measures: Sequence[Measure], by_time: bool) -> tuple[float, float] | None:
        """Return the first and the last place with a value."""
        places = [
            self.of(run, measure, by_time).xs
            for run in range(len(self.runs))
            for measure in measures
        ]
        ends = [(xs[0], xs[-1]) for xs in places if xs]
        if not ends:
            return None
        first, last = min(a for a, _ in ends), max(b for _, b in ends)
        return first, max(last, first + 1)


def view_of(values: Values, choices: Choices) -> View | None:
    """Return the visible part of the axis; None if there is nothing."""
    extent = choices.extent or values.extent(choices.shown, choices.by_time)
    if extent is None:
        return None
    return View(
        *extent,
        log=choices.log,
        whole=choices.whole,
        cursor=choices.cursor,
        label=lambda x: place(x, by_time=choices.by_time),
    )


def screenful(
    values: Values, choices: Choices, width: int, height: int, *, numbered: bool = True
) -> list[Row]:
    """Return the whole screen: `height` rows of at most `width` columns."""
    rows: list[Row] = [_tabs(values, choices, width, numbered=numbered)]
    rows += legend(values, choices, width)
    view = view_of(values, choices)
    room = height - len(rows) - 1
    if view is None:
        title = "anything" if choices.everything else MEASURES[choices.measure].title
        rows += [(), (Span(f"no data yet: {title}", "dim"),)]
    elif choices.everything:
        rows += _charts(values, choices, view, width, room)
    else:
        rows += figure(curves_of(values, choices, choices.shown[0]), view, width, room)
    rows += [()] * (height - 1 - len(rows))
    return [*rows[: height - 1], (Span(cut(f" {settings(values, choices)}", width), "dim"),)]


def curves_of(values: Values, choices: Choices, measure: Measure) -> list[Curve]:
    """Return a measure's curves: raw values below, averages and validation above."""
    several, raw = len(values.runs) > 1, choices.has_raw(len(values.runs))
    below, above, points = [], [], []
    for run in range(len(values.runs)):
        series = values.of(run, measure, choices.by_time)
        role, mark = (f"run{run}", MARKS[run]) if several else ("smooth", "")
        average = SPANS[choices.span] != 1 and measure.smooth
        if average:
            ys = values.average(run, measure, SPANS[choices.span])
            above.append(Curve(series.xs, ys, role, mark, fits=not raw or several))
        if not average or raw:
            faint = f"faint{run}" if several else "raw"
            alone = not average  # else the axis fits the average, if several are drawn
            below.append(
                Curve(
                    series.xs,
                    series.ys,
                    role if alone else faint,
                    mark if alone else "",
                    fits=alone or not several,
                )
            )
        if measure is LOSS:
            held = values.of(run, VALIDATION, choices.by_time)
            points.append(Curve(held.xs, held.ys, role if several else "accent", "◇", "points"))
    return [*below, *above, *points]


def legend(values: Values, choices: Choices, width: int) -> list[Row]:
    """Return a row for each run: glyph, name, and its values at the cursor or the newest ones."""
    rows: list[Row] = []
    names = max((len(f"{run.job} {run.name}") for run in values.runs), default=0)
    names = min(names, max(8, width // 3))
    for number, run in enumerate(values.runs):
        several = len(values.runs) > 1
        mark = Span(f" {MARKS[number]} " if several else " ", f"run{number}")
        name = Span(left(f"{run.job} {run.name}", names) + "  ", "strong")
        values_text = reading(values, choices, number)
        rows.append((mark, name, Span(cut(values_text, max(0, width - names - 5)))))
    return rows


def reading(values: Values, choices: Choices, run: int) -> str:
    """Format the values of a run at the cursor, or its newest ones."""
    texts = []
    for measure in choices.shown:
        series = values.of(run, measure, choices.by_time)
        at = series.at(choices.cursor) if choices.cursor is not None else len(series.xs) - 1
        if at is None or at < 0:
            continue
        value = f"{measure.title} {measure.text(series.ys[at])}"
        if measure.smooth and SPANS[choices.span] != 1 and not choices.everything:
            average = values.average(run, measure, SPANS[choices.span])[at]
            value += f"  average {measure.text(average)}"
        texts.append(value)
    if choices.shown == (LOSS,) and (held := values.of(run, VALIDATION, choices.by_time)).xs:
        at = held.at(choices.cursor) if choices.cursor is not None else len(held.xs) - 1
        if at is not None:
            texts.append(f"◇ validation {LOSS.text(held.ys[at])} at {held.steps[at]}")
    return "  ".join(texts) or "no data yet"


def settings(values: Values, choices: Choices) -> str:
    """Describe how the curves are drawn."""
    span = SPANS[choices.span]
    by = "time" if choices.by_time else "step"
    parts = ["over time" if choices.by_time else "over steps"]
    if choices.cursor is not None:
        where = place(choices.cursor, by_time=choices.by_time)
        parts.insert(0, f"values at {by} {where}")
    if any(measure.smooth for measure in choices.shown):
        if span == 1:
            parts.append("no smoothing")
        elif span is None:
            count = max(
                (
                    len(values.of(run, choices.shown[0], choices.by_time).ys)
                    for run in range(len(values.runs))
                ),
                default=0,
            )
            parts.append(f"average of {smoothing_span(count)}")
        else:
            parts.append(f"average of {span}")
    parts += ["log scale"] if choices.log else []
    parts += ["no raw values"] if not choices.has_raw(len(values.runs)) and span != 1 else []
    parts += ["outliers included"] if choices.whole else []
    parts += ["zoomed"] if choices.extent is not None else []
    return " · ".join(parts)


def zoomed(choices: Choices, whole: tuple[float, float], factor: float) -> Choices:
    """Scale the visible part of the axis by `factor`, around the cursor or the middle."""
    first, last = choices.extent or whole
    if choices.cursor is not None and first <= choices.cursor <= last:
        centre = choices.cursor
    else:  # the newest values are the interesting ones
        centre = last if last >= whole[1] else (first + last) / 2
    size = max(_LEAST_RANGE, (last - first) * factor)
    if size >= whole[1] - whole[0]:
        return replace(choices, extent=None)
    share = (centre - first) / (last - first)
    return _held(choices, whole, centre - share * size, size)


def panned(choices: Choices, whole: tuple[float, float], by: float) -> Choices:
    """Shift the visible part of the axis by `by` times its length."""
    first, last = choices.extent or whole
    if choices.extent is None:
        return choices
    return _held(choices, whole, first + by * (last - first), last - first)


def _held(choices: Choices, whole: tuple[float, float], first: float, size: float) -> Choices:
    """Clamp a view to the data."""
    first = max(whole[0], min(first, whole[1] - size))
    return replace(choices, extent=(first, first + size))


def tabs_of(values: Values, choices: Choices) -> list[Measure]:
    """Return the measures that have a tab; few jobs have a loss to the base, or scores."""
    runs = range(len(values.runs))
    return [
        measure
        for number, measure in enumerate(MEASURES)
        if number < COMMON
        or choices.shown == (measure,)
        or any(values.of(run, measure, choices.by_time).xs for run in runs)
    ]


def _tabs(values: Values, choices: Choices, width: int, *, numbered: bool) -> Row:
    """Return the measures and their keys, the current one in brackets."""
    tabs: list[Span] = []
    titled = tabs_of(values, choices)
    short = sum(len(measure.title) + 5 for measure in titled) + 8 > width
    names = {
        "learning rate": "lr",
        "gradient norm": "grad",
        "validation loss": "val",
        "images/s": "img/s",
        "memory": "mem",
        "loss to the base": "base",
    }
    for number, measure in enumerate(titled):
        title = f"{number + 1} " if numbered else ""
        title += names.get(measure.title, measure.title) if short else measure.title
        here = choices.shown == (measure,)
        tabs.append(
            Span(
                f"[{title}]" if here else f" {title} ",
                "accent" if here else "dim",
            )
        )
    tabs.append(
        Span(
            "[a all]" if choices.everything else " a all ",
            "accent" if choices.everything else "dim",
        )
    )
    return tuple(tabs)


def _charts(values: Values, choices: Choices, view: View, width: int, height: int) -> list[Row]:
    """Draw a small chart of each measure that has values, some side by side."""
    runs = range(len(values.runs))
    some = [m for m in MEASURES if any(values.of(run, m, choices.by_time).ys for run in runs)]
    beside = 3 if width >= _THREE_BESIDE else 2 if width >= _TWO_BESIDE else 1
    bands = -(-len(some) // beside)
    each, wide = max(4, height // max(1, bands)), width // beside
    rows: list[Row] = []
    curves = {measure: curves_of(values, choices, measure) for measure in some}
    gutter = max((gutter_of(curves[measure], view, each - 1) for measure in some), default=0)
    for start in range(0, len(some), beside):
        parts = []
        for measure in some[start : start + beside]:
            title: Row = (Span(f" {measure.title}", "title"),)
            drawn = figure(curves[measure], view, wide - 1, each - 1, gutter=gutter)
            parts.append([title, *(drawn or [(Span(" no data in this range", "dim"),)])])
        for line in range(each):
            row: list[Span] = []
            for part in parts:
                spans = part[line] if line < len(part) else ()
                row += [*spans, Span(" " * (wide - len(plain(spans))))]
            rows.append(tuple(row))
    return rows


# -- files ----------------------------------------------------------------------------------
# The visible curves, as a file or as text to paste. Independent of widgets.


def write_csv(values: Values, choices: Choices) -> Path:
    """Write the visible values into the first run's directory.

    Returns:
        The file, which has a new name each time.

    Raises:
        UserError: There is nothing to write, or it cannot be written.
    """
    if not values.runs or view_of(values, choices) is None:
        raise UserError("nothing to write yet: no steps recorded")
    what = "all" if choices.everything else choices.shown[0].name
    jobs = "-".join(str(run.job) for run in values.runs)
    folder = values.runs[0].root / "plots"
    path = folder / f"{what}-of-{jobs}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(path, as_csv(values, choices), durable=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {path}: {reason}") from None
    return path


def as_csv(values: Values, choices: Choices) -> str:
    """Return a line for each value in the visible part of the axis.

    Columns: `job`, `name`, `measure`, `step`, `seconds` since the run's first step, `value`, and
    `average`, which is empty if none is drawn.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["job", "name", "measure", "step", "seconds", "value", "average"])
    view = view_of(values, choices)
    for number, run in enumerate(values.runs):
        for measure in choices.shown:
            series = values.of(number, measure, choices.by_time)
            over_time = values.of(number, measure, True)
            averaged = measure.smooth and SPANS[choices.span] != 1
            averages = values.average(number, measure, SPANS[choices.span]) if averaged else None
            for at, x in enumerate(series.xs):
                if view is not None and view.first <= x <= view.last:
                    writer.writerow(
                        [
                            run.job,
                            run.name,
                            measure.name,
                            series.steps[at],
                            f"{over_time.xs[at]:.3f}",
                            series.ys[at],
                            averages[at] if averages is not None else "",
                        ]
                    )
    return file.getvalue()


def as_text(values: Values, choices: Choices) -> str:
    """Return the values at the cursor, or the newest ones, as text.

    There is a line for each run and measure, with tabs between columns.
    """
    lines = []
    for number, run in enumerate(values.runs):
        for measure in choices.shown:
            series = values.of(number, measure, choices.by_time)
            cursor = choices.cursor
            at = series.at(cursor) if cursor is not None else len(series.xs) - 1
            if at is None or at < 0:
                continue
            where = place(series.xs[at], by_time=choices.by_time)
            axis = "time" if choices.by_time else "step"
            line = f"{run.job} {run.name}\t{axis} {where}\t{measure.title}\t{series.ys[at]!r}"
            if measure.smooth and SPANS[choices.span] != 1:
                average = values.average(number, measure, SPANS[choices.span])[at]
                line += f"\taverage\t{average:.6g}"
            lines.append(line)
    return "\n".join(lines)
