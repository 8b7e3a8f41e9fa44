"""How far a command has come, on standard error."""

from __future__ import annotations

import sys

from jobs.untrusted.text import one_line
from tui.text.format import bar, plain

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
