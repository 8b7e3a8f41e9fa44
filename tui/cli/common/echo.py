"""The one way out for what commands print: foreign text in it cannot steer the terminal."""

from __future__ import annotations

import re
from typing import Any, Final

import click

from jobs.untrusted.text import harmless

_COLOURS: Final = re.compile(r"(\x1b\[[0-9;:]*m)")
# An escape sequence that the next piece may end.
_CUT_OFF: Final = re.compile(r"\x1b(?:\[[0-9;:]{0,40})?$")


def echo(text: Any = "", *, err: bool = False, nl: bool = True, coloured: bool = False) -> None:
    """Print it.

    Args:
        text: What to print.
        err: On standard error.
        nl: With a line feed behind it.
        coloured: Whether it has colours, which are kept.
    """
    click.echo(in_colours(str(text)) if coloured else harmless(str(text)), err=err, nl=nl)


def in_colours(text: str) -> str:
    """Foreign text with its colours, and carriage returns, but no other escape sequence."""
    return "".join(
        part if at % 2 else "\r".join(map(harmless, part.split("\r")))
        for at, part in enumerate(_COLOURS.split(text))
    )


class Stream:
    """Foreign text with colours that comes in pieces, which may end within a sequence.

    Args:
        dropped: A sequence that is not printed.
    """

    def __init__(self, dropped: str = "") -> None:
        self._dropped = dropped
        self._rest = ""

    def take(self, text: str) -> str:
        """Return what can be printed of it by now."""
        text = self._rest + text
        cut = _CUT_OFF.search(text)
        self._rest = text[cut.start() :] if cut else ""
        whole = text[: cut.start()] if cut else text
        return in_colours(whole.replace(self._dropped, "") if self._dropped else whole)

    def end(self) -> str:
        """Return what is left when no more comes."""
        rest, self._rest = self._rest, ""
        return in_colours(rest)
