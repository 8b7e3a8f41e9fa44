"""Curves in braille dots, several over each other, with glyphs among them. Pure but for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tui.text.format import Row, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

# Bit of each dot in a braille cell, by [row][column]; a cell is 2 dots wide and 4 high.
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK: Final = 0x2800
ACROSS: Final = 2  # dots in a cell
DOWN: Final = 4


class Canvas:
    """Cells that are drawn on. What is drawn later hides what it meets.

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
        """Put a character where a dot would be."""
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
        """One row of cells."""
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
