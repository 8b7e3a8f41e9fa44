"""What a person has set for good: one typed model, whose texts are its help and its errors.

A mistake in the file never keeps the dashboard from opening: what is wrong is told, the rest
counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jobs.errors import SpecError
from jobs.fields import SAID, choice, read_bool, refuse
from jobs.paths import config_home
from jobs.spellings import as_choice, did_you_mean, unquoted
from jobs.yamlfile import read_mapping

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic_core import ErrorDetails

Notifications = Literal["bell", "osc9", "off"]
Colours = Literal["auto", "16", "256", "truecolor"]

_FILE: Final = "settings.yaml"
_AUTO: Final = "auto"


def _read_notifications(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
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

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False,
                              coerce_numbers_to_str=True)  # fmt: skip

    theme: str | None = Field(
        None,
        description="Theme to begin with; the one that was chosen last when left out. "
        "`fsdp-tui settings` lists them.",
    )
    keymap: dict[str, str] = Field(
        default_factory=dict,
        description="Other keys for actions, by the action's name: {jobs.stop_job: ctrl+x}. "
        "Several with commas. `fsdp-tui settings --keys` lists the names.",
    )
    vim_keys: Switch = Field(
        True, description="Whether j, k, g, G and the like move beside the arrow keys."
    )
    notifications: Annotated[Notifications, BeforeValidator(_read_notifications)] = Field(
        "bell",
        description="When a job ends or stands still: ring the terminal's bell; osc9: a message "
        "of the desktop where the terminal can (also through tmux with allow-passthrough); off: "
        "only in the dashboard.",
    )
    ascii: Annotated[bool | None, BeforeValidator(_read_ascii)] = Field(
        None,
        description="Draw with ASCII characters alone; auto: where the locale takes no others.",
    )
    colours: Annotated[Colours, choice(Colours), BeforeValidator(_read_colours)] = Field(
        "auto",
        description="How many colours the terminal has, where it does not say (sshd does not "
        "pass COLORTERM on): auto, 16, 256 or truecolor.",
    )
    mouse: Switch = Field(
        True, description="Whether the mouse works; without it the terminal selects text itself."
    )
    refresh_seconds: float = Field(
        1.0, ge=0.2, le=60.0, description="Seconds between two looks at jobs and GPUs."
    )
    read_only: Switch = Field(
        False, description="Look, but start, stop, change and delete nothing."
    )

    @property
    def refresh_is_set(self) -> bool:
        """Whether a person chose how often to look."""
        return "refresh_seconds" in self.model_fields_set


@dataclass(frozen=True)
class Read:
    """What a settings file says, and what is wrong with it, a sentence each."""

    settings: Settings
    problems: tuple[str, ...] = ()


def settings_file() -> Path:
    """Where the settings are, whether there are any or not."""
    return config_home() / _FILE


def read_settings(path: Path | None = None) -> Read:
    """The settings of a file; what cannot be understood has its default, and is told."""
    path = path or settings_file()
    try:
        if not path.exists() or not _says_something(path):
            return Read(Settings())
        values, lines = read_mapping(path, "settings file")
    except (SpecError, OSError, ValueError) as error:
        return Read(Settings(), (f"{error}; the defaults count",))
    # A key without a value means its default.
    values = {key: value for key, value in values.items() if value is not None}
    problems: list[str] = []
    while True:
        try:
            return Read(Settings(**values), tuple(problems))
        except ValidationError as error:
            for one in error.errors():
                key = str(one["loc"][0])
                if values.pop(key, None) is None:
                    continue  # two things are wrong with it
                problems.append(f"{path}: line {lines[key]}: {_in_words(key, one)}")
                if key == "read_only":  # someone wanted to be careful
                    values[key] = True


def _says_something(path: Path) -> bool:
    """Whether there is more than comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(line.strip() and not line.lstrip().startswith("#") for line in lines)


def _in_words(key: str, error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f'unknown key "{key}"{did_you_mean(key, Settings.model_fields)}'
    if error["type"] == SAID:
        return f"{key}: {error['msg']}"
    if error["type"] == "literal_error":
        return f'{key}: "{error["input"]}" is not {error["ctx"]["expected"]}'
    inner = "".join(f"{part}: " for part in error["loc"][1:] if part != "[key]")
    return f"{key}: {inner}{error['msg'][0].lower()}{error['msg'][1:]} (got {error['input']!r})"


def text_of(value: Any) -> str:
    """A value as it is written in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {one}" for key, one in value.items()) + "}"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def as_file() -> str:
    """A settings file with every key, its help and its default, all of them comments."""
    parts = ["# Settings of fsdp-tui. Take the # away before what you change."]
    for name, field in Settings.model_fields.items():
        value = text_of(field.get_default(call_default_factory=True))
        default = _AUTO if name == "ascii" else value
        parts += ["", f"# {field.description}", f"# {name}: {default}".rstrip()]
    return "\n".join(parts) + "\n"
