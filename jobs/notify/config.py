"""Whom to notify, and of what: one file for all jobs, since it may hold secrets.

No job file, log, event or screen ever shows what stands in it, not even in an error.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.errors import UserError
from jobs.paths import config_home
from jobs.untrusted.files import read_regular

if TYPE_CHECKING:
    from pathlib import Path

Event = Literal["completed", "stopped", "failed", "stalled", "test"]
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class NotifyConfig(BaseModel):
    """The keys of `notify.yaml`.

    Attributes:
        command: A shell command; the facts are in its environment (`FSDP_TUI_…`).
        urls: Services, as the library apprise writes them.
        on: What to notify of.
        stalled_after: Seconds without progress on any rank; a hang ends the job only after its
            `hang_timeout`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    command: str | None = None
    urls: list[str] = Field(default_factory=list)
    on: tuple[Event, ...] = ("completed", "stopped", "failed", "stalled")
    stalled_after: float = Field(600.0, ge=30)


def config_file() -> Path:
    """Return the path of the file, which may not exist."""
    return config_home() / "notify.yaml"


def read_config() -> NotifyConfig | None:
    """Read the file; None where there is none.

    Raises:
        UserError: It cannot be used; the message has no value of it.
    """
    path = config_file()
    try:
        text = read_regular(path).decode()
        others = path.stat().st_mode & _OTHERS
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        raise UserError(f"cannot read {path}") from None
    if others:
        raise UserError(f"{path} may be read by others", f"chmod 600 {path}")
    try:
        # YAML 1.1 reads the key `on` as true.
        values = {"on" if k is True else k: v for k, v in (yaml.safe_load(text) or {}).items()}
        return NotifyConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {first['msg']}") from None
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError):
        raise UserError(f"{path} is not a YAML mapping") from None
