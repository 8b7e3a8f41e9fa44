"""The rows of the caches screen, and the summary of clearing. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tui.text.data_text import some
from tui.text.format import Row, Span, bar, left, right, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.service.caches import Cache, Cleared

_SIZE: Final = 9
_FILES: Final = 9
_GAP: Final = "  "
_LEAST_BAR: Final = 6
_WIDEST_BAR: Final = 30
_MOST_TITLE: Final = 48


def cache_rows(caches: Sequence[Cache], width: int) -> list[Row]:
    """Return a heading, and a row for each cache; cut at the right if they do not fit.

    Args:
        caches: One for each row; at least one.
        width: Columns.
    """
    names = max(6, *(len(cache.name) for cache in caches))
    most = max(cache.bytes for cache in caches)
    room = width - names - _SIZE - _FILES - len(_GAP)
    titles = min(_MOST_TITLE, max(len(cache.title) for cache in caches))
    length = min(_WIDEST_BAR, room - titles - len(_GAP))
    if length < _LEAST_BAR:
        length = 0
    space = length + len(_GAP) if length else 0
    titles = max(0, min(titles, room - space))
    heading = left("cache", names) + right("size", _SIZE) + right("files", _FILES)
    rows: list[Row] = [(Span(heading + _GAP + " " * space + left("contents", titles), "dim"),)]
    for cache in caches:
        row = [
            Span(left(cache.name, names), "strong"),
            Span(right(size(cache.bytes), _SIZE), "" if cache.bytes else "dim"),
            Span(right(str(cache.files), _FILES) + _GAP, "" if cache.files else "dim"),
        ]
        if length:
            row += [*bar(cache.bytes / most if most else 0.0, length), Span(_GAP)]
        rows.append((*row, Span(left(cache.title, titles), "dim")))
    return rows


def amount(caches: Sequence[Cache | Cleared]) -> str:
    """Return the size of the caches: `1.2 GiB in 40 files`."""
    files = some(sum(cache.files for cache in caches), "file")
    return f"{size(sum(cache.bytes for cache in caches))} in {files}"


def freed(cleared: Cleared) -> str:
    """Return how much was cleared."""
    what = f"{listed(cleared.names)} cache{'s' * (len(cleared.names) != 1)}"
    if not cleared.files:
        return f"nothing to clear in the {what}"
    return f"freed {amount([cleared])} from the {what}"


def listed(names: Sequence[str]) -> str:
    """Join names: `a`, `a and b`, `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
