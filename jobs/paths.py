"""Where things live on disk. Every directory outside a run directory is named here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from jobs.errors import SpecError, UserError

_OTHERS: Final = 0o077  # what a directory lets group and others do


def state_home() -> Path:
    """The state directory: `$FSDP_TUI_HOME`, else the XDG one. Not created here."""
    if home := os.environ.get("FSDP_TUI_HOME"):
        return Path(home).expanduser().absolute()
    xdg = os.environ.get("XDG_STATE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".local" / "state"
    return base.absolute() / "fsdp-tui"


def cache_home() -> Path:
    """The cache directory: `$XDG_CACHE_HOME/fsdp-tui`. Safe to delete when no job runs."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".cache"
    return base.absolute() / "fsdp-tui"


def config_home() -> Path:
    """The directory of a person's settings: `$XDG_CONFIG_HOME/fsdp-tui`. Not created here."""
    xdg = os.environ.get("XDG_CONFIG_HOME")
    base = Path(xdg) if xdg else Path.home() / ".config"
    return base.absolute() / "fsdp-tui"


def expand(text: str) -> Path:
    """A path as a person writes it, with `~` and `~user`.

    Raises:
        SpecError: There is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SpecError(f"{text}: no such home directory") from None


def exists(path: Path) -> bool:
    """Whether there is anything at a path; a name that no system takes is not there."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def nearest(place: Path) -> Path:
    """The place, or what exists above it."""
    return next((path for path in (place, *place.parents) if path.is_dir()), Path("/"))


def ensure_private_dir(path: Path) -> Path:
    """Create `path` (mode 0700) if it is missing and check that it can be written.

    Raises:
        UserError: It cannot be created or written; says which part of the path is the obstacle.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"cannot create the directory {path} ({reason})",
            "point FSDP_TUI_HOME (or cache_dir) at a writable directory",
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to the directory {path} (permission denied)",
            "point FSDP_TUI_HOME (or cache_dir) at a writable directory",
        )
    return path


def ensure_state_home() -> Path:
    """The state directory, created (0700) and writable, and nobody else's.

    One that others may read or write is narrowed: job files name tokens' places and prompts, and
    whoever writes there decides what runs.

    Raises:
        UserError: It cannot be created or written, or is another user's.
    """
    path = ensure_private_dir(state_home())
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(
            f"the state directory {path} belongs to another user",
            "point FSDP_TUI_HOME at a directory of your own",
        )
    if status.st_mode & _OTHERS and status.st_uid == os.geteuid():
        path.chmod(0o700)
        print(
            f"fsdp-tui: other users could read or write {path}; its mode was "
            f"{status.st_mode & 0o777:o} and is now 700",
            file=sys.stderr,
        )
    return path


def refuse_unwritable(path: Path) -> None:
    """Whether a directory can be written, or made. Nothing is.

    Raises:
        UserError: It cannot; says which part of the path is the obstacle.
    """
    there = path
    while not exists(there) and there != there.parent:
        there = there.parent
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        why = "permission denied" if there.is_dir() else f"{there} is a file"
        what = "write to" if there == path and there.is_dir() else "create"
        raise UserError(
            f"cannot {what} the directory {path} ({why})",
            "point FSDP_TUI_HOME (or cache_dir) at a writable directory",
        )
