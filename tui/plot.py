"""A line chart in braille dots: raw values and their moving average over steps. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tui.format import Row, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

# Bit of each dot in a braille cell, by [row][column]; a cell is 2 dots wide and 4 high.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_MAX_LABEL = 7


@dataclass(frozen=True)
class Scale:
    """The value axis: its ends, and the round numbers between them, lowest first."""

    low: float
    high: float
    ticks: tuple[float, ...]
    digits: int


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
    """How wide the average is for so many values: a tenth of them, between 5 and 200."""
    return min(200, max(5, count // 10))


def nice_scale(low: float, high: float, most: int) -> Scale:
    """A scale a little wider than `low` to `high`, with about `most` round numbers on it."""
    if high - low <= max(abs(low), abs(high), 1e-200) * 1e-9:  # equal but for rounding
        spread = max(abs(low) * 0.05, 1e-200) if low else 0.5
        low, high = low - spread, high + spread
    margin = (high - low) * 0.03
    low, high = low - margin, high + margin
    step = _nice((high - low) / max(2, most))
    ticks = tuple(i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Scale(low, high, ticks, max(0, -math.floor(math.log10(step) + 1e-9)))


def chart(
    steps: Sequence[int], values: Sequence[float], width: int, height: int
) -> tuple[Row, ...]:
    """Draw values over steps with axes.

    Args:
        steps: Ascending step numbers.
        values: One value a step; those that are not finite leave a gap.
        width: Cells to fill.
        height: Lines to fill, the one with step numbers included.

    Returns:
        `height` rows of at most `width` cells; roles `raw` and `smooth`, axes `dim`.
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not points or width < 12 or height < 3:
        return ()
    smooth = ema([v for _, v in points], smoothing_span(len(points)))
    scale = _scale(points, height - 1)
    labels = _labels(scale)
    gutter = max(len(label) for label in labels) + 1
    columns, lines = width - gutter - 1, height - 1
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    raw_dots = _Canvas(columns, lines)
    smooth_dots = _Canvas(columns, lines)
    across = columns * 2 - 1
    xs = [round((s - first) / (last - first) * across) for s, _ in points]
    raw_dots.draw(xs, [raw_dots.y(v, scale) for _, v in points])
    smooth_dots.draw(xs, [smooth_dots.y(v, scale) for v in smooth])

    by_line = {_line_of(tick, scale, lines): label for tick, label in zip(scale.ticks, labels)}  # noqa: B905
    rows = []
    for line in range(lines):
        label = by_line.get(line)
        axis = Span((label or "").rjust(gutter - 1) + (" ┤" if label else " │"), "dim")
        rows.append((axis, *_cells(raw_dots.cells[line], smooth_dots.cells[line])))
    rows.append((Span(_step_axis(first, points[-1][0], gutter, columns), "dim"),))
    return tuple(rows)


class _Canvas:
    """A grid of braille cells."""

    def __init__(self, columns: int, lines: int) -> None:
        self.cells = [[0] * columns for _ in range(lines)]
        self.rows = lines * 4

    def y(self, value: float, scale: Scale) -> int:
        """The dot row of a value; what lies outside the scale sticks to its edge."""
        share = (value - scale.low) / (scale.high - scale.low)
        return min(self.rows - 1, max(0, round((1 - share) * (self.rows - 1))))

    def draw(self, xs: Sequence[int], ys: Sequence[int]) -> None:
        """Connect the points; many in one dot column become one vertical stroke."""
        at = 0
        while at < len(xs):
            x, begin = xs[at], at
            while at < len(xs) and xs[at] == x:
                at += 1
            column = ys[begin:at]
            if begin:
                self._segment((xs[begin - 1], ys[begin - 1]), (x, column[0]))
            self._segment((x, min(column)), (x, max(column)))

    def _segment(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        (x0, y0), (x1, y1) = start, end
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for index in range(length + 1):
            x = x0 + round((x1 - x0) * index / length)
            y = y0 + round((y1 - y0) * index / length)
            self.cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]


def _scale(points: Sequence[tuple[int, float]], lines: int) -> Scale:
    """Cover the values without the most extreme hundredth at either end."""
    ordered = sorted(v for _, v in points)
    spare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
    return nice_scale(ordered[spare], ordered[-1 - spare], min(6, max(3, lines // 2)))


def _labels(scale: Scale) -> list[str]:
    labels = [f"{tick:.{scale.digits}f}" for tick in scale.ticks]
    if max(map(len, labels)) > _MAX_LABEL:
        labels = [f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e") for tick in scale.ticks]
    return labels


def _line_of(tick: float, scale: Scale, lines: int) -> int:
    share = (tick - scale.low) / (scale.high - scale.low)
    return min(lines - 1, round((1 - share) * (lines - 1)))


def _cells(raw: Sequence[int], smooth: Sequence[int]) -> Row:
    """One line of cells; where both curves meet, only the average is drawn."""
    spans: list[Span] = []
    for below, above in zip(raw, smooth, strict=True):
        role = "smooth" if above else "raw" if below else ""
        char = chr(_BLANK | (above or below)) if role else " "
        if spans and spans[-1].role == role:
            spans[-1] = Span(spans[-1].text + char, role)
        else:
            spans.append(Span(char, role))
    return tuple(spans)


def _step_axis(first: int, last: int, gutter: int, columns: int) -> str:
    """Step numbers under the chart: both ends, and the middle where there is room."""
    line = [" "] * columns
    start, end, middle = str(first), str(last), str((first + last) // 2)
    line[: len(start)] = start
    if len(start) + len(end) + 2 <= columns and last > first:
        line[columns - len(end) :] = end
    if len(start) + len(end) + len(middle) + 8 <= columns and last > first + 1:
        at = (columns - len(middle)) // 2
        line[at : at + len(middle)] = middle
    return " " * (gutter + 1) + "".join(line)


def _nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0):
        if value <= factor * power * (1 + 1e-9):
            return factor * power
    return 10.0 * power
