"""How serious a log line is, by its words. Pure."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Final


class Level(IntEnum):
    """From what can be overlooked to what cannot. `PLAIN` is a line that says nothing of it."""

    DEBUG = 0
    PLAIN = 1
    WARNING = 2
    ERROR = 3

    @property
    def mark(self) -> str:
        """The letter that stands before such a line, so that colour is not all that tells."""
        return "D WE"[self]

    @property
    def role(self) -> str:
        """The role its colour follows from."""
        return ("dim", "", "warn", "bad")[self]


# torch's launcher puts the rank before what a rank wrote: `[rank0]: Traceback …`.
_RANK: Final = r"^(?:\[rank\d+\]: )?"
_LEVELS: Final = (
    (
        Level.ERROR,
        re.compile(
            r"\b(?:ERROR|CRITICAL|FATAL)\b|Traceback \(most recent|Fatal Python error|"
            r"Segmentation fault|\b(?:CUDA|NCCL) error\b|"
            + _RANK
            + r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)"
        ),
    ),
    (Level.WARNING, re.compile(r"\bWARN(?:ING)?\b|Warning:")),
    (Level.DEBUG, re.compile(r"\bDEBUG\b")),
)
# A line without any of these is neither a warning nor an error; bytes, to pass over much quickly.
NEEDLES: Final = {
    Level.ERROR: (
        b"ERROR",
        b"CRITICAL",
        b"FATAL",
        b"Traceback",
        b"Fatal Python",
        b"Segmentation fault",
        b" error",
        b"Error",
        b"Exception",
        b"Interrupt",
    ),
    Level.WARNING: (b"WARN", b"Warning:"),
}

_TRACEBACK: Final = "Traceback (most recent call last)"
_INDENTED: Final = re.compile(_RANK + r"(?:\s|$)")


def level_of(text: str) -> Level:
    """Classify one line."""
    return next((level for level, pattern in _LEVELS if pattern.search(text)), Level.PLAIN)


def begins_traceback(text: str) -> bool:
    """Whether the lines after this one, to the first that is not indented, belong to it."""
    return _TRACEBACK in text


def goes_on(text: str) -> bool:
    """Whether a line within a traceback is not its last."""
    return _INDENTED.match(text) is not None
