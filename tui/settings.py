"""The user's settings: one typed model, whose field texts are help and error messages.

Errors in the file never keep the dashboard from opening: they are reported, and the rest
applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jobs.errors import SpecError
from jobs.paths import config_home
from jobs.spec.values.spellings import as_choice, did_you_mean, normal_key, unquoted
from jobs.spec.values.value_types import FULL_SENTENCE, choice, read_bool, refuse
from jobs.spec.values.yaml_lines import parse_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pydantic_core import ErrorDetails


Notifications = Literal["bell", "osc9", "off"]
Colours = Literal["auto", "16", "256", "truecolor"]
Pictures = Literal["auto", "kitty", "sixel", "blocks"]

_FILE: Final = "settings.yaml"
_AUTO: Final = "auto"
_CAREFUL: Final = "read_only"
_GOES_ON: Final = "-}]"  # starts a line that continues the previous key
_MARKS: Final = ("---", "...")  # YAML document markers


def _read_notifications(value: Any) -> Any:
    """YAML reads an unquoted `off` as false."""
    return "off" if value is False else as_choice(value, ("bell", "osc9", "off"))


def _read_ascii(value: Any) -> Any:
    if isinstance(value, str) and unquoted(value).lower() == _AUTO:
        return None
    try:
        return read_bool(value)
    except ValueError:
        raise refuse(value, ("auto", "true", "false"), "auto, true or false") from None


def _read_colours(value: Any) -> Any:
    return as_choice(str(value) if isinstance(value, int) else value, ("16", "256", "truecolor"))


Switch = Annotated[bool, BeforeValidator(read_bool)]


class Settings(BaseModel):
    """The keys of `settings.yaml`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    theme: str | None = Field(
        None,
        description="Initial theme (default: the last one used). `fsdp-tui settings` lists them.",
    )
    keymap: dict[str, str] = Field(
        default_factory=dict,
        description="Keys for actions, by action name: {jobs.stop_job: ctrl+x}. "
        "Separate several with commas. `fsdp-tui settings --keys` lists the names.",
    )
    vim_keys: Switch = Field(True, description="Also move with j, k, g, G and other vim keys.")
    notifications: Annotated[Notifications, BeforeValidator(_read_notifications)] = Field(
        "bell",
        description="When a job ends or hangs. bell: ring the terminal's bell; osc9: show a "
        "desktop notification if the terminal can (through tmux with allow-passthrough); off: "
        "only in the dashboard.",
    )
    ascii: Annotated[bool | None, BeforeValidator(_read_ascii)] = Field(
        None,
        description="Draw with ASCII characters only; auto: if the locale requires it.",
    )
    colours: Annotated[Colours, choice(Colours), BeforeValidator(_read_colours)] = Field(
        "auto",
        description="Number of colors if the terminal does not report it (sshd does not forward "
        "COLORTERM): auto, 16, 256 or truecolor.",
    )
    pictures: Annotated[Pictures, choice(Pictures)] = Field(
        "auto",
        description="How to draw images: auto asks the terminal; kitty, sixel or blocks override "
        "a wrong answer.",
    )
    mouse: Switch = Field(
        True, description="Use the mouse; off leaves text selection to the terminal."
    )
    refresh_seconds: float = Field(
        1.0, ge=0.2, le=60.0, description="Seconds between updates of jobs and GPUs."
    )
    read_only: Switch = Field(
        False, description="Read-only: start, stop, change and delete nothing."
    )

    @property
    def refresh_is_set(self) -> bool:
        """Return whether the user set the refresh rate."""
        return "refresh_seconds" in self.model_fields_set


@dataclass(frozen=True)
class Read:
    """The contents of a settings file, and a sentence for each error."""

    settings: Settings
    problems: tuple[str, ...] = ()


def settings_file() -> Path:
    """Return the path of the settings file, which may not exist."""
    return config_home() / _FILE


def read_settings(path: Path | None = None) -> Read:
    """Read a settings file; errors are reported, and their keys keep the default."""
    path = path or settings_file()
    try:
        text = path.read_bytes().decode("utf-8-sig", "replace") if path.exists() else ""
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror}); all settings are ignored, including"
        return Read(Settings(), (f"{problem} read_only",))
    problems: list[str] = []
    try:
        values, lines = parse_mapping(text, path) if any(_blocks(text)) else ({}, {})
    except SpecError:
        values, lines, problems = _read_blocks(text, path)
    # A key without a value keeps its default.
    values = {key: value for key, value in values.items() if value is not None}
    while True:
        try:
            return Read(Settings(**values), tuple(problems))
        except ValidationError as error:
            for mistake in error.errors():
                key = str(mistake["loc"][0])
                if _without(values, mistake["loc"]) is None:
                    continue  # it has two errors
                problems.append(f"{path}: line {lines[key]}: {_in_words(key, mistake)}")
                if key == _CAREFUL:  # the user wanted to be careful
                    values[key] = True


def _read_blocks(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """Read a file that is not valid YAML: return values and lines by key, and the errors."""
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    problems: list[str] = []
    for number, block in _blocks(text):
        try:
            values_read, _ = parse_mapping(block, path)
        except SpecError:
            first = "".join(
                letter if letter.isprintable() else "?" for letter in block.splitlines()[0]
            )
            problems.append(f"{path}: line {number} is not `key: value` in YAML: {first[:60]}")
            named = normal_key(first.partition(":")[0]) == _CAREFUL
            values_read = {_CAREFUL: True} if named else {}  # the user wanted to be careful
        for key, value in values_read.items():
            if key in values:
                problems.append(
                    f'{path}: line {number}: "{key}" is set twice (first on line {lines[key]}); '
                    "the first is used"
                )
            if key not in values or (key == _CAREFUL and value):
                values[key], lines[key] = value, number
    return values, lines, problems


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Return each key with its block and its line; comments before the first key are dropped."""
    block: list[str] = []
    begin = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.rstrip() in _MARKS:
            continue
        if not line[0].isspace() and line[0] not in _GOES_ON:
            if block:
                yield begin, "\n".join(block)
            block, begin = [], number
        block.append(line)
    if block:
        yield begin or 1, "\n".join(block)


def _without(values: dict[str, Any], place: tuple[int | str, ...]) -> Any:
    """Remove the invalid part: an entry of a mapping, or the whole value; None if it is gone."""
    inside = values.get(str(place[0]))
    if isinstance(inside, dict) and len(place) > 1 and place[1] in inside:
        return inside.pop(place[1]) or ""
    return values.pop(str(place[0]), None)


def _in_words(key: str, error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f'unknown key "{key}"{did_you_mean(key, Settings.model_fields)}'
    if error["type"] == FULL_SENTENCE:
        return f"{key}: {error['msg']}"
    if error["type"] == "literal_error":
        return f'{key}: "{error["input"]}" is not {error["ctx"]["expected"]}'
    inner = "".join(f"{part}: " for part in error["loc"][1:] if part != "[key]")
    return f"{key}: {inner}{error['msg'][0].lower()}{error['msg'][1:]} (got {error['input']!r})"


def text_of(value: Any) -> str:
    """Format a value as in the settings file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def as_file() -> str:
    """Return a settings file with every key, its help and its default, commented out."""
    parts = ["# Settings of fsdp-tui. Uncomment a line to change it."]
    for name, field in Settings.model_fields.items():
        value = text_of(field.get_default(call_default_factory=True))
        default = _AUTO if name == "ascii" else value
        parts += ["", f"# {field.description}", f"# {name}: {default}".rstrip()]
    return "\n".join(parts) + "\n"
