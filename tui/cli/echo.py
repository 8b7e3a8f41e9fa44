"""The one way out for what commands print: foreign text in it cannot steer the terminal."""

from __future__ import annotations

import re
import select
import sys
import time
from typing import Any, Final

import click

from jobs.untrusted.text import harmless, one_line
from tui.text.format import bar, plain

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


# -- progress line --------------------------------------------------------------------------
# How far a command has come, on standard error.


_BAR = 24


class ProgressLine:
    """A line on standard error that is overwritten, and taken away at the end.

    Nothing is shown where nobody looks, as in a pipe.

    Args:
        what: What is being done.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the line away, so that something else can be printed."""
        if self._shown:
            self._put("")

    def __call__(self, done: int, total: int, words: str | None = None) -> None:
        """Say that so much of it is done; in other words than the numbers, if there are any."""
        if sys.stderr.isatty():
            share = done / total if total else 1.0
            self._put(f"{self._what} {plain(bar(share, _BAR))} {words or f'{done}/{total}'}")
            self._shown = True

    @staticmethod
    def _put(text: str) -> None:
        sys.stderr.write(f"\r{one_line(text)}\x1b[K")
        sys.stderr.flush()


# -- reader ---------------------------------------------------------------------------------
# Wait while someone reads what is printed.


def pause(seconds: float) -> None:
    """Wait, and end at once when the reader is gone: over ssh, nothing else tells.

    Raises:
        BrokenPipeError: Nobody reads standard output any more.
    """
    try:
        watched = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # a test's, or closed
        time.sleep(seconds)
        return
    poll = select.poll()
    poll.register(watched, 0)  # poll reports the end of a pipe unasked
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(seconds * 1000)):
        raise BrokenPipeError
