"""Read the fleet's machines from `machines.yaml`, in the user's configuration directory."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Annotated, Any, Final

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from jobs.errors import NotFoundError, UserError
from jobs.paths import config_home
from jobs.spec.values.spellings import did_you_mean
from jobs.spec.values.yaml_lines import parse_yaml
from jobs.untrusted.files import read_regular
from jobs.untrusted.text import harmless

if TYPE_CHECKING:
    from pathlib import Path

COMMAND: Final = "fsdp-tui"
EXAMPLE: Final = """\
machines:
  - trainer1                    # as ~/.ssh/config or DNS knows it
  - name: trainer2
    ssh: me@10.0.0.7            # where its name is no ssh alias
    command: ~/venv/bin/fsdp-tui
"""
_MOST: Final = 64
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def _no_option(text: str) -> str:
    """Reject text that ssh would parse as an option, since some of its options run commands."""
    if text.startswith("-") or not text.isprintable() or " " in text or not text:
        raise ValueError("is no machine that ssh could connect to")
    return text


def _printable(text: str) -> str:
    if harmless(text) != text or "\n" in text or not text.strip():
        raise ValueError("is no command")
    return text


class Box(BaseModel):
    """A machine of the fleet.

    Attributes:
        name: Its name in the fleet.
        ssh: Its name for ssh: an alias of the ssh configuration, or `user@host`.
        command: How its login shell finds fsdp-tui.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str = Field(pattern=r"^[\w][\w.@-]{0,62}$")
    ssh: Annotated[str, AfterValidator(_no_option)] = ""
    command: Annotated[str, AfterValidator(_printable)] = COMMAND

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        return {"ssh": value.get("name"), **value} if isinstance(value, dict) else value


class Fleet(BaseModel):
    """The keys of `machines.yaml`.

    Attributes:
        machines: The machines, in display order.
        interval: Seconds between two reports of a machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    machines: tuple[Box, ...] = Field((), max_length=_MOST)
    interval: float = Field(5.0, ge=1, le=3600)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Fleet:
        names = [box.name for box in self.machines]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f'"{twice}" is listed twice')
        return self

    def find(self, name: str) -> Box:
        """Return the machine with a name.

        Raises:
            NotFoundError: There is none.
        """
        boxes = {box.name: box for box in self.machines}
        if name not in boxes:
            meant = did_you_mean(name, boxes)
            there = f"; it has {', '.join(boxes) or 'none'}" if not meant else ""
            raise NotFoundError(f'no machine "{name}" in {config_file()}{meant}{there}')
        return boxes[name]


def config_file() -> Path:
    """Return the path of the file, which need not exist."""
    return config_home() / "machines.yaml"


def read_fleet() -> Fleet:
    """Return the machines; none if there is no file.

    Raises:
        UserError: The file is invalid, or others could change which commands it runs.
    """
    path = config_file()
    try:
        text = read_regular(path, judge=_check_ours).decode()
    except FileNotFoundError:
        return Fleet()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}") from error
    try:
        return Fleet.model_validate(parse_yaml(text)[1] or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise UserError(f"{path}: {where}{first['msg'].removeprefix('Value error, ')}") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"{path} is not valid YAML") from error


def _check_ours(status: os.stat_result) -> None:
    """Check the owner and mode of the opened file, which cannot be swapped in between."""
    path = config_file()
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(f"{path} belongs to someone else", "it says which commands run")
    if status.st_mode & _OTHERS:
        raise UserError(f"{path} may be changed by others", f"chmod go-w {path}")
