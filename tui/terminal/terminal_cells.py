"""The cells that a terminal shows, and the fewest bytes that update them.

Textual sends a widget's line from its left edge to the last cell that changed, with all colors at
every change of style. Here each frame is compared with the last one sent: unchanged cells are
skipped, and of a style only the differences are written. Understands the sequences that Textual 8
writes (cursor position, SGR, text); after any other, every cell counts as unknown.
"""

from __future__ import annotations

import re
from functools import lru_cache
from sys import intern
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN: Final = re.compile(
    r"\x1b\[([\d;]*)([mH])"  # SGR, or the cursor position: line, column, from 1
    r"|([^\x00-\x1f\x7f-\x9f]+)"  # text
    r"|([\s\S])"  # a line feed, behind which a cursor position follows, or anything else
)
_PLACE: Final = re.compile(r"\d+;\d+")
_PICTURE: Final = re.compile(r"\n*\x1b\[\d+;\d+H")  # how one begins
# Modes (but for the alternate screen), titles, clipboard, bell, keyboard: they leave the cells.
_HARMLESS: Final = re.compile(
    r"(?:\x1b\[\?(?!1049|1047|47)\d+(?:[hl]|\$p)|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x07"
    r"|\x1b\[[<>]\d*u)+"
)
_NEAR: Final = 6  # unchanged cells between two that change: writing them costs less than moving
_BEHIND: Final = -1  # the column behind text of which the width is not known


class TerminalCells:
    """The cells of a terminal as far as they are known. No other code may draw on it."""

    def __init__(self) -> None:
        self._size = (0, 0)
        self._texts: list[list[str]] = []  # a character for each cell; "" where it is not known
        self._styles: list[list[str]] = []  # SGR parameters from a reset
        self._out: list[str] = []
        self._at: tuple[int, int] | None = None  # the cursor, column and line, if it is known
        self._style = ""  # what is written in
        self._rest: tuple[int, int] | None = None  # where the last frame left the cursor

    def forget(self) -> None:
        """Take nothing as known: the next frames are sent whole."""
        width, height = self._size
        self._texts = [[""] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]
        self._rest = None

    def shorten(self, data: str, size: tuple[int, int]) -> str:
        """Return what to send in place of `data`; "" where everything is shown already.

        Args:
            data: What Textual sends.
            size: Columns and lines of the terminal.
        """
        if size != self._size:  # its cells may have moved
            self._size = size
            self.forget()
        if not is_picture(data):
            if _HARMLESS.fullmatch(data) is None:
                self.forget()
            return data
        return self._picture(data)

    # -- inside ----------------------------------------------------------------------------

    def _picture(self, data: str) -> str:
        self._out, self._at, self._style = [], self._rest, ""
        x = y = 0
        style, knows_place = "", False
        for numbers, code, text, other in _TOKEN.findall(data):
            if code == "m":
                both = f"{style};{numbers}" if style else numbers
                style = "" if numbers in ("", "0") else intern(both)
            elif text and knows_place:
                x = self._text(x, y, text, style)
            elif code == "H" and _PLACE.fullmatch(numbers):
                line, column = numbers.split(";")
                x, y, knows_place = int(column) - 1, int(line) - 1, True
            elif other == "\n":
                knows_place = False
            else:
                self.forget()
                return data
        if not self._out and self._rest == (x, y):
            return ""
        self._write_in("")
        if x != _BEHIND:
            self._go_to(x, y)
        self._rest = self._at
        return "".join(self._out)

    def _text(self, x: int, y: int, text: str, style: str) -> int:
        """Write the cells of a piece of text that are not there yet; where the next one begins."""
        width, height = self._size
        stop = x + len(text)
        if x == _BEHIND or stop > width or y >= height or not is_plain(text):
            self._unsure(x, y, text, style)
            return _BEHIND
        texts, styles, new = self._texts[y], self._styles[y], list(text)
        if texts[x:stop] != new or styles[x:stop] != [style] * len(new):
            old = zip(texts[x:stop], styles[x:stop], strict=True)
            changed = [at for at, was in enumerate(old) if was != (new[at], style)]
            for first, last in _near(changed):
                self._write(x + first, y, text[first : last + 1], style)
            texts[x:stop], styles[x:stop] = new, [style] * len(new)
        return stop

    def _unsure(self, x: int, y: int, text: str, style: str) -> None:
        """Write text of which it is not known which cells it fills: to the end of its line."""
        width, height = self._size
        if y >= height:
            self.forget()  # a terminal that became lower draws it on its last line
        elif x != _BEHIND:
            at = min(x, width - 1)
            self._texts[y][at:] = [""] * (width - at)
        self._write_in(style)
        if x != _BEHIND:
            self._go_to(x, y)
        self._out.append(text)
        self._at = None

    def _write(self, x: int, y: int, text: str, style: str) -> None:
        self._write_in(style)
        self._go_to(x, y)
        self._out.append(text)
        self._at = (x + len(text), y) if x + len(text) < self._size[0] else None

    def _write_in(self, style: str) -> None:
        if style != self._style:
            self._out.append(change_of_style(self._style, style))
            self._style = style

    def _go_to(self, x: int, y: int) -> None:
        if self._at != (x, y):
            near = self._at is not None and self._at[1] == y and x > self._at[0]
            right = f"\x1b[{x - self._at[0]}C" if near and self._at is not None else ""
            self._out.append(right or f"\x1b[{y + 1};{x + 1}H")
            self._at = (x, y)


def _near(cells: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last cell of each group that is written at once; `cells` is not empty."""
    first = last = cells[0]
    for cell in cells:
        if cell - last > _NEAR:
            yield first, last
            first = cell
        last = cell
    yield first, last


@lru_cache(4096)
def change_of_style(before: str, after: str) -> str:
    """Return the codes that change one style to another, both SGR parameters from a reset. Pure."""
    if not after:
        return "\x1b[m"
    was, now = _parts(before), _parts(after)
    # What a style no longer has only a reset takes away; colours replace each other.
    if was is None or now is None or not was.keys() <= now.keys():
        return f"\x1b[0;{after}m" if before else f"\x1b[{after}m"
    return f"\x1b[{';'.join(code for kind, code in now.items() if was.get(kind) != code)}m"


def _parts(style: str) -> dict[str, str] | None:
    """Parse a style into its parts, by kind.

    Text colour, background, each attribute. None if unsure.
    """
    codes = style.split(";") if style else []
    parts: dict[str, str] = {}
    at = 0
    while at < len(codes):
        code = codes[at]
        taken = 1
        if code in ("38", "48"):
            taken = 5 if codes[at + 1 : at + 2] == ["2"] else 3
        tens, ones = code[:-1], code[-1:]
        if tens in ("3", "9") and ones <= "8":
            kind = "text"
        elif tens in ("4", "10") and ones <= "8":
            kind = "background"
        elif not tens and ones != "0":
            kind = code
        else:
            return None
        parts[kind] = ";".join(codes[at : at + taken])
        at += taken
    return parts


_narrow: set[str] = set()  # characters of one cell that have been seen


def is_picture(data: str) -> bool:
    """Whether this draws on cells, as Textual says it."""
    return _PICTURE.match(data) is not None


def is_plain(text: str) -> bool:
    """Whether every character fills one cell on every terminal."""
    if text.isascii():
        return True
    unknown = set(text) - _narrow
    _narrow.update(character for character in unknown if cell_len(character) == 1)
    return unknown <= _narrow
