"""Which lines fill a page when long ones are folded into several rows. Pure.

`rows_of` gives the rows of a line. Lines are read from where the page is, so that a page of a
log with millions of them costs as much as one of a short log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Page = list[tuple[int, int]]  # line and which of its rows, for each row of the screen


def page(top: int, height: int, count: int, rows_of: Callable[[int], int]) -> Page:
    """Return the rows starting at line `top`.

    At the end of the log, they may be fewer than `height`.
    """
    rows: Page = []
    line = top
    while line < count and len(rows) < height:
        rows += [(line, row) for row in range(rows_of(line))]
        line += 1
    return rows[:height]


def last_page(height: int, count: int, rows_of: Callable[[int], int]) -> Page:
    """Return the rows that end with the end of the log."""
    top = top_for(count - 1, height, rows_of)
    rows = page(top, height, count, rows_of) if count else []
    while top > 0 and len(rows) < height:
        top -= 1
        rows = [(top, row) for row in range(rows_of(top))] + rows
    if rows and rows[-1][0] == count - 1:  # a last line that is higher than the page shows its end
        end = rows_of(count - 1)
        rows += [(count - 1, row) for row in range(rows[-1][1] + 1, end)]
    return rows[-height:] if height else []


def top_for(line: int, height: int, rows_of: Callable[[int], int]) -> int:
    """Return the first line of a page that ends with all of `line`."""
    top, left = max(0, line), height - (rows_of(line) if line >= 0 else 0)
    while top > 0 and (left := left - rows_of(top - 1)) >= 0:
        top -= 1
    return top


def last_top(height: int, count: int, rows_of: Callable[[int], int]) -> int:
    """Return the last line that a page may begin with: that page shows the log's end."""
    return top_for(count - 1, height, rows_of)
