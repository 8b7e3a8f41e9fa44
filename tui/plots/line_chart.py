"""Line charts in braille dots, of one curve or of several. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from tui.text.format import Row, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# -- braille --------------------------------------------------------------------------------
# Curves in braille dots, several over each other, with glyphs among them. Pure but for
# the canvas.


# Bit of each dot in a braille cell, by [row][column]; a cell is 2 dots wide and 4 high.
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK: Final = 0x2800
ACROSS: Final = 2  # dots in a cell
DOWN: Final = 4


class Canvas:
    """Cells to draw on. Later drawings hide earlier ones.

    Args:
        columns: Cells in a row.
        lines: Rows of cells.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self.columns = columns
        self.lines = lines
        self._cells: list[list[tuple[int, str]]] = [[(0, "")] * columns for _ in range(lines)]
        self._glyphs: dict[tuple[int, int], Span] = {}

    def row(self, share: float) -> int:
        """Return the dot row of a height from 0 to 1."""
        return round((1 - share) * (self.lines * DOWN - 1))

    def stroke(self, points: Sequence[tuple[int, int, int]], role: str) -> None:
        """Connect strokes: column, first row and last row of each, in dots, left to right."""
        bits: dict[tuple[int, int], int] = {}
        before: tuple[int, int] | None = None
        for x, enter, leave in points:
            if before is not None:
                _segment(bits, before, (x, enter))
            _segment(bits, (x, enter), (x, leave))
            before = x, leave
        for (line, column), dots in bits.items():
            if 0 <= line < self.lines and 0 <= column < self.columns:
                drawn, whose = self._cells[line][column]
                self._cells[line][column] = (dots | drawn if whose == role else dots), role

    def glyph(self, x: int, y: int, text: str, role: str) -> None:
        """Put a character at a dot."""
        line, column = y // DOWN, x // ACROSS
        if 0 <= line < self.lines and 0 <= column < self.columns:
            self._glyphs[line, column] = Span(text, role)

    def upright(self, x: int, role: str) -> None:
        """Draw a vertical line, behind everything."""
        column = x // ACROSS
        for line in range(self.lines):
            if not self._cells[line][column][0] and (line, column) not in self._glyphs:
                self._glyphs[line, column] = Span("│", role)

    def spans(self, line: int) -> Row:
        """Return one row of cells."""
        row: list[Span] = []
        for column, (dots, role) in enumerate(self._cells[line]):
            span = self._glyphs.get((line, column))
            if span is None:
                span = Span(chr(_BLANK | dots), role) if dots else Span(" ")
            if row and row[-1].role == span.role:
                row[-1] = Span(row[-1].text + span.text, span.role)
            else:
                row.append(span)
        return tuple(row)


def _segment(
    bits: dict[tuple[int, int], int], start: tuple[int, int], end: tuple[int, int]
) -> None:
    (x0, y0), (x1, y1) = start, end
    length = max(abs(x1 - x0), abs(y1 - y0), 1)
    for index in range(length + 1):
        x = x0 + round((x1 - x0) * index / length)
        y = y0 + round((y1 - y0) * index / length)
        cell = y // DOWN, x // ACROSS
        bits[cell] = bits.get(cell, 0) | _DOTS[y % DOWN][x % ACROSS]


# -- scales ---------------------------------------------------------------------------------
# The value axis of a chart, linear or logarithmic, with round numbers on it. Pure functions.


_MAX_LABEL: Final = 7
_SAMPLED: Final = 4000  # sample at most this many values to find the range


@dataclass(frozen=True)
class Scale:
    """The value axis: its ends, and the round numbers between them, lowest first.

    On a logarithmic scale the ends are exponents of ten; `ticks` are always values.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Map a value to 0 to 1; values outside are clamped."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def scale_of(
    values: Sequence[float], lines: int, *, log: bool = False, whole: bool = False
) -> Scale | None:
    """Return the axis for these values.

    Args:
        values: Finite numbers.
        lines: Rows of the chart.
        log: Whether it is logarithmic, which excludes values up to zero.
        whole: Cover all values, instead of leaving out the most extreme hundredth at either end.

    Returns:
        None if no value can be shown on it.
    """
    if log:
        values = [value for value in values if value > 0]
    if not values:
        return None
    if whole:
        low, high = min(values), max(values)
    else:
        ordered = sorted(values[:: max(1, len(values) // _SAMPLED)])
        spare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
        low, high = ordered[spare], ordered[-1 - spare]
    most = min(6, max(3, lines // 2))
    return log_scale(low, high, most) if log else nice_scale(low, high, most)


def nice_scale(low: float, high: float, most: int) -> Scale:
    """Return a scale a little wider than `low` to `high`, with about `most` round numbers on it."""
    if high - low <= max(abs(low), abs(high), 1e-200) * 1e-9:  # equal except for rounding
        spread = max(abs(low) * 0.05, 1e-200) if low else 0.5
        low, high = low - spread, high + spread
    margin = (high - low) * 0.03
    low, high = low - margin, high + margin
    ticks, digits = _round_numbers(low, high, most)
    return Scale(low, high, ticks, labels_of(ticks, digits))


def log_scale(low: float, high: float, most: int) -> Scale:
    """Return a logarithmic scale; `low` is more than zero."""
    first, last = math.log10(low), math.log10(high)
    if last - first < 1e-6:
        first, last = first - 0.05, last + 0.05
    margin = (last - first) * 0.03
    first, last = first - margin, last + margin
    if last - first < 1:  # less than a decade: use the linear scale's round numbers
        ticks, digits = _round_numbers(10**first, 10**last, most)
        return Scale(first, last, ticks, labels_of(ticks, digits), log=True)
    every = max(1, math.ceil((last - first) / most))
    decades = range(math.ceil(first), math.floor(last) + 1, every)
    factors = (1, 2, 5) if (last - first) * 3 <= most else (1,)
    around = range(math.floor(first), math.floor(last) + 1) if len(factors) > 1 else decades
    ticks = tuple(
        value
        for exponent in around
        for factor in factors
        if first <= math.log10(value := factor * 10.0**exponent) <= last
    )
    return Scale(first, last, ticks, tuple(_short(tick) for tick in ticks), log=True)


def labels_of(ticks: Sequence[float], digits: int) -> tuple[str, ...]:
    """Format the numbers of an axis, all with the same number of digits."""
    labels = tuple(f"{tick:.{digits}f}" for tick in ticks)
    if max(map(len, labels), default=0) > _MAX_LABEL:
        return tuple(f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e") for tick in ticks)
    return labels


def _round_numbers(low: float, high: float, most: int) -> tuple[tuple[float, ...], int]:
    """Return round numbers in a range, and their number of decimals."""
    step = _nice((high - low) / max(2, most))
    ticks = tuple(i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return ticks, digits + (abs(round(step, digits) - step) > step * 1e-6)  # 0.25 needs two


def _short(value: float) -> str:
    text = f"{value:g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _nice(value: float) -> float:
    """Return the next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0):
        if value <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power


# -- line chart -----------------------------------------------------------------------------


_LEAST_WIDTH: Final = 12
_LEAST_HEIGHT: Final = 3
_MARK_EVERY: Final = 20  # columns between glyphs on a curve


@dataclass(frozen=True)
class Curve:
    """Values over an axis.

    Attributes:
        xs: Ascending.
        ys: Finite values, one for each x.
        role: Its color role.
        mark: A glyph that identifies it without color; drawn on a line at intervals.
        kind: Connected, or only points.
        fits: Whether the value axis must fit it.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    role: str
    mark: str = ""
    kind: Literal["line", "points"] = "line"
    fits: bool = True


@dataclass(frozen=True)
class View:
    """The part of the curves that is shown, and how.

    Attributes:
        first: The left end of the axis.
        last: The right end, more than `first`.
        log: Whether the value axis is logarithmic.
        whole: Whether it covers the most extreme values too.
        cursor: Where a vertical line is drawn.
        label: Names a place on the axis.
    """

    first: float
    last: float
    log: bool = False
    whole: bool = False
    cursor: float | None = None
    label: Callable[[float], str] = lambda x: str(round(x))


def ema(values: Sequence[float], span: int) -> list[float]:
    """Return the exponential moving average, corrected for the start's bias as in Adam.

    Args:
        values: Finite numbers.
        span: The number of values after which a value's weight falls to about 1/e².
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
        values: One value a step; nonfinite ones are skipped.
        width: Cells to fill.
        height: Lines to fill, including the one with step numbers.

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
    """Return the columns that a figure of this height needs for its value labels."""
    scale = _scale(curves, view, height - 1)
    return max(map(len, scale.labels), default=0) + 1 if scale is not None else 0


def figure(
    curves: Sequence[Curve], view: View, width: int, height: int, *, gutter: int = 0
) -> tuple[Row, ...]:
    """Draw curves over each other, the last on top, with axes.

    Args:
        curves: What to draw; parts outside the view are skipped.
        view: The part to draw.
        width: Cells to fill.
        height: Lines to fill, including the one with the axis labels.
        gutter: Minimum columns for value labels, so that the axes of several figures
            align.

    Returns:
        `height` rows of at most `width` cells; none if there is nothing to draw, or no room.
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
    """Return the value axis of these curves; None if nothing is on it."""
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
    """Return a stroke for each dot column with values: from the lowest to the highest of them.

    Only columns are iterated, however many values there are; the values between are found
    by `min` and `max` alone.
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
    """Return the labels below the chart: both ends, and the middle if it fits."""
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
