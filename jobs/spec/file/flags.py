"""Convert a job to flags and back: `--key=value`, `--key value`, bare switches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.paths import exists
from jobs.spec.job_spec import JobSpec, is_switch, takes_many, takes_none, takes_number
from jobs.spec.values.spellings import as_bool, as_list, as_none, normal_key, unquoted
from jobs.spec.values.value_types import read_words
from jobs.spec.values.yaml_lines import STDIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BARE: Final = re.compile(r"[\w./@:+-]+")  # list items that need no quotes
_WORDS: Final = "accelerate_extra_args"
_PROMPTS: Final = "validation_prompts"
_MAPPINGS: Final = (
    "accelerate_config",
    "deepspeed_config",
    "lora_rank_pattern",
    "lora_alpha_pattern",
    "swap_blocks",
    "batch_shares",
    "tread",
)


def parse_flags(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse flags.

    Returns:
        Values by normalized key, and the words that are not flags. Keys with several values may be
            repeated; of others the last one counts.

    Raises:
        SpecError: A word is an incomplete flag.
    """
    values: dict[str, Any] = {}
    others: list[str] = []
    rest, listed = list(args), ""
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            _check_stray(word, listed)
            others.append(word)
            continue
        key, equals, value = word.partition("=")
        name = normal_key(key)
        if not equals:
            name, value = _value_of(name, rest)
        if name in values and takes_many(name):
            values[name] = [*_entries(name, values[name]), *_entries(name, value)]
        else:
            values[name] = read_flag(name, value)
        listed = name if takes_many(name) and not equals else ""
    return values, others


def read_flag(name: str, text: str) -> Any:
    """Return a flag's value as a job file would have it, without leftover quotes."""
    if takes_many(name):
        return None if as_none(text) is None and text.strip() else text.strip()
    if name in _MAPPINGS and text.strip().startswith("{"):
        return text.strip()
    if takes_none(name) and text.strip() and as_none(text) is None:
        return None
    return unquoted(text)


def to_flags(spec: JobSpec) -> list[str]:
    """Return the flags that `parse_flags` reads back to the same job.

    `shlex.join` joins them to one line. Defaults of the job's family are skipped.
    """
    return flags_of(spec.to_dict(only_set=True))


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return values of a job as flags, which `shlex.join` joins to one line."""
    return [f"--{name}={_text(name, value)}" for name, value in values.items()]


def _value_of(name: str, rest: list[str]) -> tuple[str, str]:
    """Return the name and value of a flag without an equals sign; removes the value from `rest`."""
    if name not in JobSpec.model_fields and name.startswith("no_") and is_switch(name[3:]):
        return name[3:], "false"
    follows = bool(rest) and not rest[0].startswith("--")
    if follows and (not is_switch(name) or _is_setting(name, rest[0])):
        return name, rest.pop(0)
    if name in JobSpec.model_fields and not is_switch(name):
        raise SpecError(f"flags: {name}: no value; use --{name}={_example(name)}")
    return name, "true"


def _is_setting(switch: str, word: str) -> bool:
    """Return whether the word after a switch is its value."""
    if isinstance(as_bool(word), bool) or (takes_number(switch) and word.isdecimal()):
        return True
    return takes_none(switch) and as_none(word) is None and bool(word)


def _check_stray(word: str, listed: str) -> None:
    """Reject a word that is neither a flag nor the name of a job file.

    Raises:
        SpecError: The word is neither.
    """
    if word == STDIN or exists(Path(word)):
        return
    key, equals, value = word.partition("=")
    name = normal_key(key)
    if equals and name in JobSpec.model_fields:
        raise SpecError(f'flags: "{word}" is not a flag; use --{name}={value}')
    if word.startswith("-"):
        raise SpecError(f'flags: "{word}" is not a flag; flags start with two dashes')
    if listed and not Path(word).suffix and "/" not in word:
        raise SpecError(
            f'flags: {listed}: "{word}" is an extra value; separate several with commas: '
            f"--{listed}={_example(listed)}"
        )


def _entries(name: str, value: Any) -> list[Any]:
    """Return the items in one flag of a list that may be spread over several flags."""
    if not isinstance(value, str):
        return list(value or [])
    if name == _PROMPTS:  # prompts contain commas
        entries = as_list(value) if value.strip().startswith('["') else [value.strip()]
    elif name == _WORDS:
        try:
            entries = read_words(value)
        except ValueError as error:
            raise SpecError(f"flags: {name}: {error}") from None
    else:
        entries = as_list(value)
    return list(entries)


def _example(name: str) -> str:
    """Return an example value for a field."""
    field = JobSpec.model_fields[name]
    default = field.default
    if takes_many(name):
        return {"gpus": "0,1", "resolution": "512,768"}.get(name, "A,B")
    if default in (None, ""):
        return "1" if "int" in str(field.annotation) or "float" in str(field.annotation) else "TEXT"
    return str(default)


def _text(name: str, value: Any) -> str:
    """Format a value as in a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value.isprintable() and read_flag(name, value) == value else _json(value)
    if isinstance(value, list) and value and _is_plain(name, value):
        return ",".join(value)
    return _json(value) if isinstance(value, (list, dict)) else repr(value)


def _is_plain(name: str, value: list[Any]) -> bool:
    """Return whether a list can be joined by commas without quotes."""
    if name in (_PROMPTS, _WORDS):
        return False
    bare = all(isinstance(entry, str) and _BARE.fullmatch(entry) for entry in value)
    return bare and as_none(",".join(value)) is not None


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)
