"""Log lines as strips: coloured by level, with matches marked. Pure but for a cache."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from rich.segment import Segment
from rich.text import Text
from textual.strip import Strip

from tui.log.levels import level_of
from tui.log.log_model import without_colours

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from rich.console import Console
    from rich.style import Style

GUTTER: Final = 2  # columns of the level's letter and the room after it


def paint(
    line: str,
    style: Callable[[str], Style],
    console: Console,
    *,
    gutter: bool = False,
    marked: re.Pattern[str] | None = None,
) -> Strip:
    """One line.

    Args:
        line: Its text, which may hold SGR codes.
        style: Gives the style of a role; `""` is that of a plain line.
        console: Resolves the styles.
        gutter: Begin with the letter of its level.
        marked: What to mark in it.
    """
    printed = without_colours(line)
    level = level_of(printed)
    segments = []
    if gutter:
        segments.append(Segment(level.mark.ljust(GUTTER), style(level.role)))
    spans = [match.span() for match in marked.finditer(printed)] if marked is not None else []
    if "\x1b" not in line and not spans:
        return Strip([*segments, Segment(line, style(level.role))])
    base = style("")
    if "\x1b" in line:
        text = Text.from_ansi(line)
    else:
        text, base = Text(line), style(level.role)
    for start, stop in spans:
        text.stylize(style("match"), start, stop)
    segments += [
        Segment(piece, base + own if own else base)
        for piece, own, _ in text.render(console)
        if piece
    ]
    return Strip(segments)


def folded(strip: Strip, width: int, indent: int = 0) -> list[Strip]:
    """Wrap a strip into pieces of at most `width` columns.

    All but the first are indented by `indent`.
    """
    length = strip.cell_length
    if length <= width or width <= indent:
        return [strip]
    cuts = [0, *range(width, length, width - indent), length]
    pieces = [strip.crop(a, b) for a, b in pairwise(cuts)]
    room = Strip([Segment(" " * indent)])
    return [pieces[0], *(Strip.join([room, piece]) for piece in pieces[1:])] if indent else pieces


def pieces_of(length: int, width: int, indent: int = 0) -> int:
    """Count the pieces that `folded` makes of a number of columns."""
    if length <= width or width <= indent:
        return 1
    return 1 + -(-(length - width) // (width - indent))
