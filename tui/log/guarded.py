"""Regular expressions that may take forever get a deadline.

`(a|aa)+$` needs longer than the universe for a line of a hundred letters, and Python's `re` lets no
other thread run meanwhile: the screen would freeze. The `regex` library lets go of the interpreter
while it searches, and stops when it is asked to.
"""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from tui.log.finders import PatternFinder, compile_pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.log.finders import Finder

SECONDS: Final = 2.0  # for one piece of a log, which takes milliseconds otherwise
_QUOTED: Final = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)
_CHOICES: Final = re.compile(r"[*+?{|]")
_GROUP_AGAIN: Final = re.compile(r"\)[*+?{]")
# Characters of a line in which a pattern with that number of choices is always found soon.
_MARKED_UP_TO: Final = {0: 1 << 20, 1: 1 << 20, 2: 200, 3: 60}


class TooSlowError(UserError):
    """A pattern took longer than it may."""


def choices(text: str) -> int:
    """Count the places where a pattern can continue in several ways. Pure."""
    return len(_CHOICES.findall(_QUOTED.sub("", text)))


def marked_up_to(text: str) -> int:
    """Characters of the longest line in which matches may be looked for at once. Pure."""
    if _GROUP_AGAIN.search(_QUOTED.sub("", text)):
        return 0
    return _MARKED_UP_TO.get(choices(text), 0)


def pattern_finders(text: str) -> Callable[[], Finder]:
    """Return a factory of finders of the lines that match; one may raise `TooSlowError`."""
    pattern = compile_pattern(text)
    if choices(pattern.pattern) < 2:
        return partial(PatternFinder, pattern)
    return partial(_GuardedFinder, pattern)


class _GuardedFinder(PatternFinder):
    """Finds what a `PatternFinder` does, or gives up."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        import regex  # 1 % of the dashboard's start, and few searches need it

        super().__init__(pattern)
        self._guarded = regex.compile(pattern.pattern, pattern.flags)
        self._deadline = 0.0

    def find(self, data: bytes) -> list[int]:
        self._deadline = time.monotonic() + SECONDS
        try:
            return super().find(data)
        except TimeoutError:
            raise TooSlowError(f"“{self._guarded.pattern}” takes too long", "simplify it") from None

    def _search(self, text: str, at: int = 0) -> tuple[int, int] | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        match = self._guarded.search(text, at, timeout=left, concurrent=True)
        return match.span() if match else None
