"""Replacements made as a line is painted: control characters always, and every non-ASCII
character if the terminal supports ASCII only.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.segment import Segment
from textual.filter import LineFilter

from jobs.untrusted.text import harmless

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.color import Color

_OTHER: Final = "?"
_BRAILLE: Final = (0x2800, 0x28FF)
_BRAILLE_BY_DOTS: Final = " ..::**##"  # a curve's character has up to eight
# Characters, by their replacement.
_DRAWN: Final = {
    "|": "│┃┆┇┊┋╎╏║▌▐▍▎▏▕╵╷╹╻",
    "-": "─–—−╴╶▔¯",
    "+": "┌┐└┘├┤┬┴┼┏┓┗┛┣┫┳┻╋╭╮╯╰╔╗╚╝╠╣╦╩╬┴┷╪┱┲┡┢",
    "=": "═≡━╸╺",
    "_": "▁▂",
    ".": "·…∙⋅。┄┅┈┉╌╍",
    "*": "●◆★✶✱•⭑◉⬤♦",
    "o": "○◌◦◔◑◕◯⭘◎◇☆",
    "x": "×✗✘✕✖╳",
    "v": "✓✔↓▼▾⌄↡⇣",
    "^": "↑▲▴⌃↟⇡",
    ">": "→▸▶►‣›»⏵➜❯⟩⇢",
    "<": "←◂◀◄‹«⟨⇠",
    "#": "█■▓▇▆▇▉▊▋▪▀▄▅▃◼",
    ":": "▒░▞▚▖▗▘▝▙▛▜▟∶⁝⋮",
    "~": "≈∼∿",
    "'": "‘’′",
    '"': "“”″",
    "!": "⚠‼❗",
    "u": "µμ",
    "d": "°",
    "2": "²",
    "3": "³",
    " ": "\u00a0\u2009\u202f\u200a\u2003\u2002□◻",
    "L": "⏎↵",
    "z": "⏸",
    "@": "↻⟳↺",
    "$": "€£",
    "S": "σΣ∑⇧",
    "D": "Δ∆δ",
    "/": "⁄∕╱",
    "\\": "╲",
}
# Pairs of characters with one replacement.
_BY_MEANING: Final = {"≥": ">", "≤": "<", "↔": "-", "↕": "|", "∞": "8", "±": "+", "√": "v"}


class _Table(dict[int, str]):
    """Characters and their replacements; extended on demand."""

    def __missing__(self, code: int) -> str:
        self[code] = text = to_ascii(chr(code))
        return text


def replacements() -> Mapping[str, str]:
    """Map every character with a named ASCII replacement to it."""
    drawn = {char: plain for plain, chars in _DRAWN.items() for char in chars}
    return drawn | _BY_MEANING


_REPLACEMENTS: Final = replacements()


def to_ascii(char: str) -> str:
    """Replace a character by as many columns of ASCII."""
    if char.isascii() or char in _REPLACEMENTS:
        return _REPLACEMENTS.get(char, char)
    if _BRAILLE[0] <= ord(char) <= _BRAILLE[1]:
        return _BRAILLE_BY_DOTS[(ord(char) - _BRAILLE[0]).bit_count()]
    columns = cell_len(char)
    plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()  # é becomes e
    return plain if plain and len(plain) == columns else _OTHER * columns


class AsciiFilter(LineFilter):
    """Paints with ASCII characters; every line keeps its width."""

    def __init__(self) -> None:
        super().__init__()
        self._table = _Table()

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.control or segment.text.isascii()
            else Segment(segment.text.translate(self._table), segment.style)
            for segment in segments
        ]


class HarmlessFilter(LineFilter):
    """Removes control characters from any widget's text; they occupy no cell."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.control or segment.text.isprintable()
            else Segment(harmless(segment.text, ""), segment.style)
            for segment in segments
        ]
