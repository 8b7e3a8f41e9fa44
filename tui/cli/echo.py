"""Output of commands: all of it goes through here, so that text cannot control the terminal."""

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
# An escape sequence that the next chunk may complete.
_CUT_OFF: Final = re.compile(r"\x1b(?:\[[0-9;:]{0,40})?$")


def echo(text: Any = "", *, err: bool = False, nl: bool = True, coloured: bool = False) -> None:
    """Print a text.

    Args:
        text: What to print.
        err: Print to standard error.
        nl: End with a newline.
        coloured: Keep colors.
    """
    click.echo(in_colours(str(text)) if coloured else harmless(str(text)), err=err, nl=nl)


def in_colours(text: str) -> str:
    """Keep the colors and carriage returns of untrusted text, but no other escape sequences."""
    return "".join(
        part if at % 2 else "\r".join(map(harmless, part.split("\r")))
        for at, part in enumerate(_COLOURS.split(text))
    )


class Stream:
    """Filters colored, untrusted text that comes in chunks, which may end within a sequence.

    Args:
        dropped: An escape sequence to remove.
    """

    def __init__(self, dropped: str = "") -> None:
        self._dropped = dropped
        self._rest = ""

    def take(self, text: str) -> str:
        """Return the text that can be printed so far."""
        text = self._rest + text
        cut = _CUT_OFF.search(text)
        self._rest = text[cut.start() :] if cut else ""
        whole = text[: cut.start()] if cut else text
        return in_colours(whole.replace(self._dropped, "") if self._dropped else whole)

    def end(self) -> str:
        """Return the rest, at the end of the input."""
        rest, self._rest = self._rest, ""
        return in_colours(rest)


# -- progress line --------------------------------------------------------------------------
# Progress of a command, on standard error.


_BAR = 24


class ProgressLine:
    """A line on standard error that is overwritten, and erased at the end.

    Nothing is shown if standard error is not a terminal.

    Args:
        what: The operation in progress.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Erase the line, so that something else can be printed."""
        if self._shown:
            self._put("")

    def __call__(self, done: int, total: int, words: str | None = None) -> None:
        """Show progress, as numbers or in the given words."""
        if sys.stderr.isatty():
            share = done / total if total else 1.0
            self._put(f"{self._what} {plain(bar(share, _BAR))} {words or f'{done}/{total}'}")
            self._shown = True

    @staticmethod
    def _put(text: str) -> None:
        sys.stderr.write(f"\r{one_line(text)}\x1b[K")
        sys.stderr.flush()


# -- reader ---------------------------------------------------------------------------------
# Wait while the output is being read.


def pause(seconds: float) -> None:
    """Wait, or raise as soon as the reader is gone; over ssh, there is no other sign.

    Raises:
        BrokenPipeError: Nobody reads standard output any more.
    """
    try:
        watched = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or replaced by a test
        time.sleep(seconds)
        return
    poll = select.poll()
    poll.register(watched, 0)  # poll always reports the end of a pipe
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(seconds * 1000)):
        raise BrokenPipeError
