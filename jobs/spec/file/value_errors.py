"""Describe invalid values of a job in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobs.spec.job_spec import JobSpec, field_choices
from jobs.spec.keys.prompts import ValidationPrompt
from jobs.spec.values.datasets import Dataset
from jobs.spec.values.spellings import did_you_mean, unquoted
from jobs.spec.values.value_types import FULL_SENTENCE

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

# Models of the mappings inside of lists.
_ENTRIES: Final[dict[str, type[BaseModel]]] = {
    "datasets": Dataset,
    "validation_prompts": ValidationPrompt,
}
# Our texts for pydantic's error types.
_PLAIN: Final = {
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "string_type": "expected text",
    "list_type": "expected a list",
    "dict_type": "expected a mapping",
}


_LONGEST: Final = 200  # characters of a value


def key_of(error: ErrorDetails) -> str:
    """Return the key that an error is about."""
    return str(error["loc"][0]) if error["loc"] else ""


def in_words(error: ErrorDetails) -> str:
    """Describe one pydantic error in words that can follow the key's name."""
    key = key_of(error)
    value = error["input"]
    inner = [str(part + 1) if isinstance(part, int) else str(part) for part in error["loc"][1:]]
    if error["type"] == FULL_SENTENCE:
        return error["msg"]
    if error["type"] == "extra_forbidden" and inner:
        *where, word = inner
        hint = did_you_mean(word, _ENTRIES[key].model_fields)
        return f'entry {" ".join(where)} has an unknown key "{word}"{hint}'
    choices = field_choices(key) if key in JobSpec.model_fields else ()
    if choices:
        given = _truncated(str(value).lower() if isinstance(value, bool) else str(value))
        allowed = ", ".join(choices)
        meant = "" if isinstance(value, bool) else did_you_mean(unquoted(given), choices)
        return f'"{given}" is not one of {allowed}{meant}'
    message = error["msg"][0].lower() + error["msg"][1:]
    message = _PLAIN.get(error["type"], message)
    if error["type"] == "string_pattern_mismatch":
        message = "use letters, digits, dot, dash and underscore, starting with a letter or digit"
    place = f"entry {' '.join(inner)}: " if inner else ""
    if isinstance(value, bool):
        word = str(value).lower()
        quote = "; in YAML, put words such as yes, no, on and off in quotes"
        return f"{place}{message} (got {word}{quote if error['type'] == 'string_type' else ''})"
    return f"{place}{message} (got {_truncated(repr(value))})"


def _truncated(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
