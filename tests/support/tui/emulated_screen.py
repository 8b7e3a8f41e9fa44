"""A terminal's screen, as far as Textual draws on it: cells with what they are written in."""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len

_TOKEN: Final = re.compile(
    r"\x1b\[(?P<place>\d+;\d+)H|\x1b\[(?P<by>\d*)(?P<to>[BC])|(?P<back>\x08)|\x1b\[(?P<erased>\d+)X|\x1b\[(?P<sgr>[\d;]*)m|(?P<newline>\n)"
    r"|\x1b\[\?(?P<mode>\d+)[hl]|(?P<other>\x1b\[[0-9;?<>=$]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[P_^][^\x1b]*\x1b\\|\x07|\r)|(?P<text>[^\x00-\x1f])"
)
_COLOURS: Final = {"3": "text", "9": "text", "4": "background", "10": "background"}
_ENDS: Final[dict[str, tuple[str, ...]]] = {
    "22": ("1", "2"),
    "23": ("3",),
    "24": ("4",),
    "39": ("text",),
    "49": ("background",),
}
_UNSEEN: Final = {"text", "background", "1", "2", "3"}
Style = frozenset[tuple[str, str]]


class EmulatedScreen:
    """Applies what a program sends. Lines do not wrap, as Textual asks of the terminal."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.resize(size)

    def resize(self, size: tuple[int, int]) -> None:
        """Another size; what the cells hold then is nothing to rely on."""
        self.width, self.height = size
        self.cells: list[list[tuple[str, Style]]] = [
            [("#", frozenset())] * self.width for _ in range(self.height)
        ]
        self.x = self.y = 0
        self.style: dict[str, str] = {}

    @property
    def lines(self) -> list[str]:
        return ["".join(text for text, _ in line) for line in self.cells]

    def feed(self, data: str) -> None:
        end = 0
        for found in _TOKEN.finditer(data):
            assert found.start() == end, f"not understood: {data[end : found.start()]!r}"
            end = found.end()
            if found["text"]:
                self._put(found["text"])
            elif found["place"]:
                y, x = map(int, found["place"].split(";"))
                self.x, self.y = min(x, self.width) - 1, min(y, self.height) - 1
            elif found["to"] == "C":
                self.x = min(self.x + int(found["by"] or 1), self.width - 1)
            elif found["to"] == "B":
                self.y = min(self.y + int(found["by"] or 1), self.height - 1)
            elif found["erased"]:
                self._erase(int(found["erased"]))
            elif found["back"]:
                self.x = max(self.x - 1, 0)
            elif found["sgr"] is not None:
                self._render(found["sgr"].split(";"))
            elif found["mode"] == "1049":
                self.resize((self.width, self.height))
            elif found["newline"]:
                self.x, self.y = 0, min(self.y + 1, self.height - 1)
        assert end == len(data), f"not understood: {data[end:]!r}"

    def _erase(self, count: int) -> None:
        """Blank cells from the cursor on, which stays; they take the background."""
        start = self.x
        for x in range(start, min(start + count, self.width)):
            self.x = x
            self._put(" ")
        self.x = start

    def _put(self, text: str) -> None:
        width = cell_len(text)
        line, style = self.cells[self.y], frozenset(self.style.items())
        if text == " " and self.style.keys() <= _UNSEEN:  # of a blank its background is seen
            style = frozenset((kind, code) for kind, code in style if kind == "background")
        if not width:
            return
        at = min(self.x, self.width - 1)
        for x in (at, at + width):  # half of a wide character does not stay
            if x < self.width and line[x][0] == "":
                line[x - 1], line[x] = (" ", line[x - 1][1]), (" ", line[x][1])
        line[at] = text, style
        if width == 2 and at + 1 < self.width:
            line[at + 1] = "", style
        self.x = at + width

    def _render(self, codes: list[str]) -> None:
        while codes:
            code = codes.pop(0)
            if code in ("", "0"):
                self.style.clear()
            elif code in _ENDS:
                for kind in _ENDS[code]:
                    self.style.pop(kind, None)
            elif code in ("38", "48"):
                taken = 4 if codes[0] == "2" else 2
                self.style[_COLOURS[code[0]]] = ";".join((code, *codes[:taken]))
                del codes[:taken]
            elif kind := _COLOURS.get(code[:-1]):
                self.style[kind] = code
            else:
                assert len(code) == 1, code
                self.style[code] = code
