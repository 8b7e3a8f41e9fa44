"""The value axis of a chart, linear or logarithmic, with round numbers on it. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_LABEL: Final = 7
_SAMPLED: Final = 4000  # of more values than this, some tell as well where nearly all of them are


@dataclass(frozen=True)
class Scale:
    """The value axis: its ends, and the round numbers between them, lowest first.

    On a logarithmic one the ends are exponents of ten; `ticks` are values on both.
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
        log: Whether it is logarithmic, which values up to zero have no place on.
        whole: Cover all of them, and not leave the most extreme hundredth at either end out.

    Returns:
        None when no value has a place on it.
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
    if high - low <= max(abs(low), abs(high), 1e-200) * 1e-9:  # equal but for rounding
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
    if last - first < 1:  # less than a decade: round numbers are the better ones
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
    """Round numbers in a range, and how many digits they have after the point."""
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
