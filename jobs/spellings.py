"""Forgiving spelling: how a person may write keys and values, and what they may have meant."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_TRUE = {"true", "1", "yes", "on", "y", "t"}
_FALSE = {"false", "0", "no", "off", "n", "f"}
_NONE = {"none", "null", "~", ""}
_ENOUGH = 3  # letters that tell a word by its beginning


def normal_key(key: str) -> str:
    """`--Train-Batch-Size`, `train.batch.size` and `train_batch_size` are one key."""
    return key.strip().lstrip("-").lower().replace("-", "_").replace(".", "_")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most resembles, or None when nothing is close."""
    word, known = word.lower(), list(known)
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not found and len(word) >= _ENOUGH:  # `qwen` for `qwen_image`
        found = [name for name in known if name.startswith(word)]
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)`, or an empty string when nothing is close."""
    best = nearest(word, known)
    return f' (did you mean "{best}"?)' if best else ""


def as_bool(value: Any) -> Any:
    """Read the words people use for yes and no; anything else is returned unchanged."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    return value


def as_none(value: Any) -> Any:
    """`None`, `null` and an empty text mean "not set"."""
    if isinstance(value, str) and value.strip().lower() in _NONE:
        return None
    return value


def as_choice(value: Any, choices: tuple[str, ...]) -> Any:
    """Match a word to a choice whatever its case and whether it has `-` or `_`."""
    if value is False and "no" in choices:  # YAML reads a bare `no` as false
        return "no"
    if isinstance(value, str):
        word = value.strip().lower().replace("-", "_")
        for choice in choices:
            if choice.lower() == word:
                return choice
    return value


def as_list(value: Any) -> Any:
    """A comma-separated text becomes a list of trimmed parts."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        return [part.strip().strip("'\"") for part in text.split(",") if part.strip()]
    return value
