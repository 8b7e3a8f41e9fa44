"""Text from files that others may have written: nothing in it may steer a terminal. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

# Controls (C0 but for tab and line feed, DEL, C1), what changes the direction of writing or the
# line, invisible tags, and halves of surrogate pairs, which no terminal can be sent.
_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_INSTEAD: Final = "?"
_DEEPEST: Final = 20  # levels of a value that are read; deeper ones are dropped


def harmless(text: str, instead: str = _INSTEAD) -> str:
    """Remove terminal control codes from a text; lines and tabs are kept."""
    if text.isprintable():  # nearly all of it is, and this is ten times as fast
        return text
    return _UNSAFE.sub(instead, text)


def one_line(text: str) -> str:
    """Return the text on one line, without terminal control codes."""
    return text if text.isprintable() else harmless(" ".join(text.split()))


def harmless_value(value: Any, depth: int = _DEEPEST) -> Any:
    """Remove terminal control codes from all texts of a JSON value, keys too."""
    if isinstance(value, str):
        return harmless(value)
    if isinstance(value, dict | list) and not depth:
        return None
    if isinstance(value, dict):
        return {harmless(str(k)): harmless_value(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list):
        return [harmless_value(item, depth - 1) for item in value]
    return value
