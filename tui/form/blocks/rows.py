"""The rows of the block modal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tui.text.block_text import NO_SPLIT, RECOMMENDED, parameters, paths, share
from tui.text.format import Row, Span, bar, left, right

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from jobs.models.blocks.detection import BlockClass

_BOX: Final = 2  # columns, with the space after it
_STAR: Final = 2
_COUNT: Final = 6
_TOTAL: Final = 8
_SHARE: Final = 6
_LEAST_NAME: Final = 16
_LEAST_BAR: Final = 5
_BAR: Final = 14
_LEAST_PATHS: Final = 20
_GAP: Final = "  "


def block_rows(
    classes: Sequence[BlockClass], chosen: Collection[str], width: int, names: int
) -> list[Row]:
    """Return a heading, and a row for each class.

    Columns that do not fit are dropped, the rightmost first.

    Args:
        classes: In the order of the rows.
        chosen: Names of the checked classes.
        width: Columns.
        names: Columns of the longest name of all classes, so that a search moves no column.
    """
    numbers = _COUNT + _TOTAL + _SHARE + len(_GAP)
    room = width - _BOX - _STAR - numbers - 1
    badges = len(_GAP) + len(NO_SPLIT) if room >= _LEAST_NAME + len(_GAP) + len(NO_SPLIT) else 0
    names = min(names, room - badges)
    room -= names + badges
    length = min(_BAR, room - 1) if room > _LEAST_BAR else 0
    where = room - 1 - length - len(_GAP)
    if where < _LEAST_PATHS:
        where = 0
    heading = " " * (_BOX + _STAR) + left("class", names) + " " * badges + right("count", _COUNT)
    heading += right("total", _TOTAL) + _GAP + right("share", _SHARE)
    heading += (" " * (1 + length) + _GAP + "at") if where else ""
    rows: list[Row] = [(Span(heading, "dim"),)]
    for block_class in classes:
        on = block_class.class_name in chosen
        badge = _GAP + (NO_SPLIT if block_class.in_no_split_modules else "").ljust(len(NO_SPLIT))
        row: list[Span] = [
            Span("■ " if on else "□ ", "good" if on else "dim"),
            Span(RECOMMENDED.ljust(_STAR) if block_class.recommended else " " * _STAR, "accent"),
            Span(left(block_class.class_name, names), "strong" if on else ""),
            Span(badge if badges else "", "title"),
            Span(
                right(str(block_class.count), _COUNT)
                + right(parameters(block_class.params_total), _TOTAL)
            ),
            Span(_GAP + right(share(block_class.share), _SHARE)),
        ]
        if length:
            row += [Span(" "), *bar(block_class.share, length)]
        if where:
            row.append(Span(_GAP + left(paths(block_class), where), "dim"))
        rows.append(tuple(row))
    return rows


def looking_row(done: int, total: int, width: int) -> Row:
    """How far looking at a model has come."""
    words = "building the model without its weights "
    if not total or done >= total:
        return (Span(words + "…", "accent"),)
    count = f" {done}/{total}"
    length = max(0, min(40, width - len(words) - len(count)))
    return (Span(words, "accent"), *bar(done / total, length), Span(count, "strong"))
