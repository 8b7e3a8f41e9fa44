"""Parse keys and values leniently, and suggest corrections of typos."""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Any, Final

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TRUE = {"true", "1", "yes", "on", "y", "t"}
_FALSE = {"false", "0", "no", "off", "n", "f"}
_NONE = {"none", "null", "~", ""}
_OFF: Final = ("none", "no")
_MIN_PREFIX = 3  # letters after which a prefix identifies a word
_QUOTES: Final = {'"': '"', "'": "'", "“": "”", "‘": "’"}
# An item of a list: in double quotes with JSON's escapes, in single quotes, or bare.
_PART: Final = re.compile(r"""\s*(?:("(?:[^"\\]|\\.)*")|'([^']*)'|([^,]*))\s*(?:,|$)""", re.DOTALL)


def normal_key(key: str) -> str:
    """Normalize a key: `--Train-Batch-Size`, `train.batch.size` → `train_batch_size`."""
    return key.strip().lstrip("-").lower().replace("-", "_").replace(".", "_")


def nearest(word: str, words: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the one of `words` most similar to `word`, or None if none is close.

    Args:
        word: As written.
        words: The valid words.
        least: Minimum similarity, from 0 to 1.
    """
    by_lower = {name.lower(): name for name in words}
    word = word.lower()
    matches = difflib.get_close_matches(word, by_lower, n=1, cutoff=least)
    if not matches and len(word) >= _MIN_PREFIX:  # for example `qwen` for `qwen_image`
        matches = [name for name in by_lower if name.startswith(word)]
    return by_lower[matches[0]] if matches else None


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ` (did you mean "x"?)`, or "" if no word is close."""
    best = nearest(word, words)
    return f' (did you mean "{best}"?)' if best else ""


def unquoted(text: str) -> str:
    """Strip surrounding spaces, and one pair of leftover quotes.

    Text in double quotes may be JSON, so that any string can be written: `"\\"sks\\" cat "`.
    """
    text = text.strip()
    if len(text) < 2 or _QUOTES.get(text[0]) != text[-1]:
        return text
    if text[0] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            pass
    inner = text[1:-1]
    return text if text[0] in inner or text[-1] in inner else inner


def as_bool(value: Any) -> Any:
    """Convert the words for yes and no; return anything else unchanged."""
    if isinstance(value, str):
        word = unquoted(value).strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    return value


def as_none(value: Any) -> Any:
    """Convert `None`, `null` and an empty string to None."""
    if isinstance(value, str) and value.strip().lower() in _NONE:
        return None
    return value


def as_off(value: Any) -> Any:
    """Convert the words for no and for no value to None; also YAML's false, but no number."""
    word = isinstance(value, (str, bool)) and as_bool(value) is False
    return None if word else as_none(value)


def as_choice(value: Any, choices: tuple[str, ...]) -> Any:
    """Match a choice, ignoring case, `-`, `_` and spaces.

    For an enum member such as `StateDictType.FULL_STATE_DICT`, the last part counts. If a choice
    is `none` or `no`, all words for no mean it; YAML parses a bare `no` or `off` as false.
    """
    off = next((choice for choice in choices if choice in _OFF), None)
    if off and (as_bool(value) is False or (isinstance(value, str) and unquoted(value) in _OFF)):
        return off
    if isinstance(value, str):
        word = _letters(unquoted(value))
        for choice in choices:
            if _letters(choice) in (word, word.rpartition(".")[2]):
                return choice
    return value


def _letters(word: str) -> str:
    return re.sub(r"[\s_-]+", "", word).lower()


def as_list(value: Any) -> Any:
    """Split a list given as one string: JSON, `[a, b]`, or comma-separated; unquote each item.

    A mapping, `{path: a}`, is a list of one.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("{") and text.endswith("}"):
        return [text]
    if text.startswith("[") and text.endswith("]"):
        loaded = _loaded(text, list, (json.loads, yaml.safe_load) if "{" in text else (json.loads,))
        if loaded is not None:
            return loaded
        text = text if "[" in text[1:] else text[1:-1]
    return [part for part in _parts(text) if part]


def as_mapping(text: str) -> dict[Any, Any] | None:
    """Parse `{"seed": 3}` or `{seed: 3}`, so that one string can hold several settings.

    None if the string is not a mapping.
    """
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    loaded: dict[Any, Any] | None = _loaded(text, dict, (json.loads, yaml.safe_load))
    return loaded


def _loaded(text: str, kind: type, readers: Iterable[Callable[[str], Any]]) -> Any:
    """Return the first reader's result of this type; None if there is none."""
    for read in readers:
        try:
            value = read(text)
        except (ValueError, RecursionError, yaml.YAMLError):
            continue
        if isinstance(value, kind):
            return value
    return None


def _parts(text: str) -> list[str]:
    parts, place = [], 0
    while place < len(text):
        match = _PART.match(text, place)
        assert match is not None, "an unquoted part may be empty"
        double, single, bare = match.groups()
        parts.append(unquoted(double or bare or "") if single is None else single)
        place = match.end()
    return parts
