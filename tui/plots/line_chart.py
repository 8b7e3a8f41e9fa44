"""Line charts in braille dots, of one curve or of several. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from tui.plots.braille import ACROSS, Canvas
from tui.plots.scales import Scale, scale_of
from tui.text.format import Row, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LEAST_WIDTH: Final = 12
_LEAST_HEIGHT: Final = 3
_MARK_EVERY: Final = 20  # columns from one glyph on a curve to the next


@dataclass(frozen=True)
class Curve:
    """Values over an axis.

    Attributes:
        xs: Ascending.
        ys: Finite values, as many.
        role: What its colour follows from.
        mark: A glyph that tells it from others without colour; on a line now and then.
        kind: Connected, or only points.
        fits: Whether the value axis is made to hold it.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    role: str
    mark: str = ""
    kind: Literal["line", "points"] = "line"
    fits: bool = True


@dataclass(frozen=True)
class View:
    """What of the curves is shown, and how.

    Attributes:
        first: The left end of the axis.
        last: The right end, more than `first`.
        log: Whether the value axis is logarithmic.
        whole: Whether it covers the most extreme values too.
        cursor: Where a line is drawn from top to bottom.
        label: Names a place on the axis.
    """

    first: float
    last: float
    log: bool = False
    whole: bool = False
    cursor: float | None = None
    label: Callable[[float], str] = lambda x: str(round(x))


def ema(values: Sequence[float], span: int) -> list[float]:
    """Exponential moving average, free of the start's bias (as Adam corrects its moments).

    Args:
        values: Finite numbers.
        span: The number of values after which a value's weight has fallen to about 1/e².
    """
    keep = 1 - 2 / (max(1, span) + 1)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1
        smoothed.append(total / weight)
    return smoothed


def smoothing_span(count: int) -> int:
    """Choose the averaging window: a tenth of the values, between 5 and 200."""
    return min(200, max(5, count // 10))


def chart(
    steps: Sequence[int], values: Sequence[float], width: int, height: int
) -> tuple[Row, ...]:
    """Draw values over steps and their moving average, with axes.

    Args:
        steps: Ascending step numbers.
        values: One value a step; those that are not finite are skipped.
        width: Cells to fill.
        height: Lines to fill, the one with step numbers included.

    Returns:
        `height` rows of at most `width` cells; roles `raw` and `smooth`, axes `dim`.
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not points:
        return ()
    xs, ys = [s for s, _ in points], [v for _, v in points]
    smooth = ema(ys, smoothing_span(len(ys)))
    curves = (Curve(xs, ys, "raw"), Curve(xs, smooth, "smooth", fits=False))
    return figure(curves, View(xs[0], max(xs[-1], xs[0] + 1)), width, height)


def gutter_of(curves: Sequence[Curve], view: View, height: int) -> int:
    """Columns that a figure of this height needs for the labels of its values."""
    scale = _scale(curves, view, height - 1)
    return max(map(len, scale.labels), default=0) + 1 if scale is not None else 0


def figure(
    curves: Sequence[Curve], view: View, width: int, height: int, *, gutter: int = 0
) -> tuple[Row, ...]:
    """Draw curves over each other, the last on top, with axes.

    Args:
        curves: What to draw; what is outside the view is skipped.
        view: The part to draw.
        width: Cells to fill.
        height: Lines to fill, the one with the axis' labels included.
        gutter: Columns for the labels of the values at least, so that axes of several figures
            stand under each other.

    Returns:
        `height` rows of at most `width` cells, or none when there is nothing to draw, or no room.
    """
    if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        return ()
    lines = height - 1
    scale = _scale(curves, view, lines)
    if scale is None:
        return ()
    gutter = max(gutter, max(map(len, scale.labels), default=0) + 1)
    canvas = Canvas(width - gutter - 1, lines)
    for number, curve in enumerate(curves):
        _draw(canvas, curve, view, scale, stagger=number * _MARK_EVERY // 3)
    if view.cursor is not None and view.first <= view.cursor <= view.last:
        canvas.upright(dot_of(view.cursor, view, canvas.columns), "faint")
    places = {_line_of(tick, scale, lines): label for tick, label in zip(scale.ticks, scale.labels)}  # noqa: B905
    rows = []
    for line in range(lines):
        label = places.get(line, "")
        axis = Span(label.rjust(gutter - 1) + (" ┤" if label else " │"), "dim")
        rows.append((axis, *canvas.spans(line)))
    rows.append((Span(_axis(view, gutter, canvas.columns), "dim"),))
    return tuple(rows)


def plot_columns(rows: Sequence[Row], width: int) -> int:
    """Count the columns of a figure's curves, in which the cursor moves."""
    return max(1, width - len(rows[0][0].text)) if rows else width


def dot_of(x: float, view: View, columns: int) -> int:
    """Return the dot column of a place on the axis."""
    across = columns * ACROSS - 1
    return round((x - view.first) / (view.last - view.first) * across)


# -- inside ------------------------------------------------------------------------------------


def _scale(curves: Sequence[Curve], view: View, lines: int) -> Scale | None:
    """Return the value axis of these curves; None when there is nothing on it."""
    held = [y for curve in curves if curve.fits for y in _within(curve, view)]
    held = held or [y for curve in curves for y in _within(curve, view)]
    return scale_of(held, lines, log=view.log, whole=view.whole)


def _within(curve: Curve, view: View) -> Sequence[float]:
    """Return the values that are in the view."""
    return curve.ys[bisect_left(curve.xs, view.first) : bisect_right(curve.xs, view.last)]


def _draw(canvas: Canvas, curve: Curve, view: View, scale: Scale, stagger: int) -> None:
    strokes = _strokes(canvas, curve, view, scale)
    if curve.kind == "points":
        for x, y, _ in strokes:
            canvas.glyph(x, y, curve.mark, curve.role)
        return
    canvas.stroke(strokes, curve.role)
    if not curve.mark or not strokes:
        return
    due = stagger * ACROSS
    for x, _, y in strokes:
        if x >= due:
            canvas.glyph(x, y, curve.mark, curve.role)
            due = x + _MARK_EVERY * ACROSS
    x, _, y = strokes[-1]
    canvas.glyph(x, y, curve.mark, curve.role)


def _strokes(canvas: Canvas, curve: Curve, view: View, scale: Scale) -> list[tuple[int, int, int]]:
    """Return a stroke for each dot column that has values: from the lowest to the highest of them.

    However many values there are, only columns are counted; the values between are found by
    `min` and `max` alone.
    """
    xs, ys = curve.xs, curve.ys
    begin, end = bisect_left(xs, view.first), bisect_right(xs, view.last)
    across = canvas.columns * ACROSS - 1
    strokes = []

    def height(value: float) -> int:
        return canvas.row(scale.share(value))

    def drawn(value: float) -> bool:
        return value > 0 or not scale.log

    if curve.kind == "line" and 0 < begin < len(xs) and xs[begin] > view.first:
        y = height(_between(curve, begin, view.first))
        strokes.append((0, y, y))
    at = begin
    while at < end:
        x = dot_of(xs[at], view, canvas.columns)
        beyond = view.first + (x + 0.5) / across * (view.last - view.first)
        stop = max(at + 1, bisect_right(xs, beyond, at, end))
        values = ys[at:stop]
        low, high = min(values), max(values)
        if drawn(high):
            falling = values[-1] < values[0]
            enter, leave = (high, low) if falling else (low, high)
            strokes.append((x, height(enter), height(leave)))
        at = stop
    if curve.kind == "line" and 0 < end < len(xs) and xs[end - 1] < view.last:
        y = height(_between(curve, end, view.last))
        strokes.append((across, y, y))
    return strokes


def _between(curve: Curve, right: int, x: float) -> float:
    """Return the value of a line at `x`, between the points `right - 1` and `right`."""
    x0, x1 = curve.xs[right - 1], curve.xs[right]
    y0, y1 = curve.ys[right - 1], curve.ys[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1


def _line_of(tick: float, scale: Scale, lines: int) -> int:
    return min(lines - 1, round((1 - scale.share(tick)) * (lines - 1)))


def _axis(view: View, gutter: int, columns: int) -> str:
    """Labels under the chart: both ends, and the middle where there is room."""
    line = [" "] * columns
    first, last = view.first, view.last
    start, end, middle = view.label(first), view.label(last), view.label((first + last) / 2)
    line[: len(start)] = start[:columns]
    if len(start) + len(end) + 2 <= columns and end != start:
        line[columns - len(end) :] = end
    if len(start) + len(end) + len(middle) + 8 <= columns and middle not in (start, end):
        at = (columns - len(middle)) // 2
        line[at : at + len(middle)] = middle
    return " " * (gutter + 1) + "".join(line)
