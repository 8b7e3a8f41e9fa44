"""Format numbers, times and bars. Pure functions; a missing value is `–`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobs import units
from jobs.queue.eta import TRAIN
from jobs.units import ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["ranges"]  # re-exported with the functions below

MISSING = "–"
BEST: Final = "★"  # marks the best checkpoint, or the best job of a sweep
_LEAST_PART: Final = 5.0  # seconds, and share of the whole, from which a part is mentioned
_LEAST_SHARE: Final = 0.1
_PARTS: Final = {"sample": "sampling", "score": "scoring"} | {
    "validate": "validating",
    "save": "saving",
    "export": "exporting",
}


class Span(NamedTuple):
    """A piece of a line and its color role (see `tui.widgets.lines`)."""

    text: str
    role: str = ""


Row = tuple[Span, ...]


def state_text(state: str, reason: str) -> str:
    """Return a job's state and its reason, or only the reason if it begins with the state."""
    if not reason:
        return str(state)
    begins = reason.partition(" ")[0].rstrip(":;,")
    return reason if begins == state else f"{state}: {reason}"


def size(count: float | None) -> str:
    """Format bytes with a unit: `610 MiB`, `1.2 GiB`."""
    return MISSING if count is None else units.size(count)


def gib(count: float | None) -> str:
    """Format bytes in GiB without a unit, for columns whose heading names it."""
    if count is None:
        return MISSING
    value = count / 2**30
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Return `0:42`, `12:05`, `3:20:11`, `2d 04h`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def eta(seconds: float | None, at_least: bool) -> str:
    """Format the remaining time for a column: `12:05`, `≥12:05`."""
    return f"≥{duration(seconds)}" if at_least and seconds is not None else duration(seconds)


def left_words(seconds: float, parts: Mapping[str, float], at_least: bool) -> list[str]:
    """Return the time left and its largest part besides steps, from long to short wordings.

    `5:44 left, 4:30 of it sampling`; `≥1:06 left` if something is unknown.
    """
    words = f"{'≥' * at_least}{duration(seconds)} left"
    what, most = max(
        ((what, each) for what, each in parts.items() if what != TRAIN),
        key=lambda part: part[1],
        default=("", 0.0),
    )
    if most < max(_LEAST_PART, _LEAST_SHARE * seconds):
        return [words]
    return [f"{words}, {duration(most)} of it {_PARTS[what]}", words]


def spent(seconds: float) -> str:
    """Format a duration: `12 s`, `1:05`."""
    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else duration(seconds)


def number(value: float | None, digits: int = 4) -> str:
    """Format a loss or a rate with about `digits` significant digits, at most eight characters."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    magnitude = abs(value)
    if magnitude != 0 and (magnitude < 1e-3 or magnitude >= 1e5):
        return _exponential(value, max(0, digits - 2))
    before = len(str(int(magnitude)))
    return f"{value:.{max(0, digits - before + (magnitude < 1))}f}"


def _exponential(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    text = f"{mantissa}e{int(exponent)}"
    return text if len(text) <= 8 or not digits else _exponential(value, digits - 1)


def pace(seconds: float | None) -> str:
    """Format seconds per step in at most five characters if possible."""
    if seconds is None:
        return MISSING
    if seconds >= 100:
        return duration(seconds)
    digits = 3 if seconds < 0.1 else 2 if seconds < 10 else 1
    return f"{seconds:.{digits}f}"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.0f}%"


def cut(text: str, width: int) -> str:
    """Cut the text to `width` cells; `…` replaces the end."""
    if len(text) <= width:
        return text
    return text[: width - 1] + "…" if width > 0 else ""


def left(text: str, width: int) -> str:
    return cut(text, width).ljust(width)


def steps_text(step: int, total: int | None) -> str:
    """Return `40/200`, or `40/?` while the job's epochs are not yet counted in steps."""
    return f"{step}/{total or '?'}"


def right(text: str, width: int) -> str:
    return cut(text, width).rjust(width)


def bar(fraction: float | None, width: int, role: str = "bar") -> Row:
    """Draw a bar of `width` cells in half-cell steps.

    Its shape shows the value too, not only its color.
    """
    if width <= 0:
        return ()
    if fraction is None:
        return (Span("┄" * width, "faint"),)
    halves = round(min(1.0, max(0.0, fraction)) * width * 2)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return tuple(
        span for span in (Span(done, role), Span("┄" * (width - len(done)), "faint")) if span.text
    )


_HEIGHTS: Final = "▁▂▃▄▅▆▇██"  # in eighths; a hundred percent is the ninth


def sparkline(shares: Sequence[float | None], width: int) -> str:
    """Draw the newest percentages as `width` columns with eight heights.

    Unknown values leave gaps.
    """
    newest = shares[len(shares) - width :] if len(shares) > width else shares
    marks = [" " if share is None else _HEIGHTS[min(8, int(share * 8 / 100))] for share in newest]
    return "".join(marks).rjust(width)


def load_role(fraction: float | None) -> str:
    """Return the color role of a memory bar by how full it is."""
    if fraction is None or fraction < 0.85:
        return "bar"
    return "warn" if fraction < 0.95 else "bad"


def plain(row: Sequence[Span]) -> str:
    """Return the characters of a row without its roles."""
    return "".join(span.text for span in row)


# -- value text -----------------------------------------------------------------------------
# Job values as text. Pure, and without Textual.


def in_words(value: Any) -> str:
    """Format a value as in a job file, on one line."""
    if value in (None, "", [], {}):
        return MISSING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
