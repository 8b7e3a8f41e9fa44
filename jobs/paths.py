"""Define all directories outside of run directories."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from jobs.errors import SpecError, UserError

_OTHERS: Final = 0o077  # permission bits of group and others
_OTHERS_WRITE: Final = 0o022
_OURS: Final = (
    *(
        "calibration",
        "clipboard",
        "demo",
        "dispatch",
        "drafts",
        "fetches",
        "jobs",
        "runner",
        "runs",
    ),
    *("selftest", "slurm"),
)
"""Prefixes of the names in a state directory."""


def state_home() -> Path:
    """Return the state directory: `$FSDP_TUI_HOME`, or else the XDG one; not created here."""
    if home := os.environ.get("FSDP_TUI_HOME"):
        return Path(home).expanduser().absolute()
    xdg = os.environ.get("XDG_STATE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".local" / "state"
    return base.absolute() / "fsdp-tui"


def cache_home() -> Path:
    """Return the cache directory, `$XDG_CACHE_HOME/fsdp-tui`; deletable while no job runs."""
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".cache"
    return base.absolute() / "fsdp-tui"


def config_home() -> Path:
    """Return the directory of the user's settings.

    It is `$XDG_CONFIG_HOME/fsdp-tui`, not created here.
    """
    xdg = os.environ.get("XDG_CONFIG_HOME")
    base = Path(xdg) if xdg else Path.home() / ".config"
    return base.absolute() / "fsdp-tui"


def expand(text: str) -> Path:
    """Expand `~` and `~user` in a path.

    Raises:
        SpecError: There is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SpecError(f"{text}: no such home directory") from None


def exists(path: Path) -> bool:
    """Return whether a path exists; False for invalid names."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def nearest(place: Path) -> Path:
    """Return the path, or its nearest existing parent directory."""
    return next((path for path in (place, *place.parents) if path.is_dir()), Path("/"))


def ensure_private_dir(path: Path) -> Path:
    """Create a directory (mode 0700) if it is missing, and check that it is writable.

    Raises:
        UserError: It cannot be created or written; the message names the part of the path at fault.
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
    """Create the state directory (0700) if needed; check its owner and that it is writable.

    The mode of an existing directory is not changed.

    Raises:
        UserError: It cannot be created or written, belongs to another user, or is writable by
            others, like /tmp.
    """
    path = ensure_private_dir(state_home())
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(
            f"the state directory {path} belongs to another user",
            "point FSDP_TUI_HOME at a directory of your own",
        )
    if status.st_mode & _OTHERS_WRITE and not _is_ours(path):
        raise UserError(
            f"other users may write to {path}, which is to be the state directory",
            f"set FSDP_TUI_HOME={path / 'fsdp-tui'}, which is then created for you alone",
        )
    return path


@cache
def close_to_others(home: Path) -> None:
    """Restrict access to job files, which contain paths and prompts, before one is written.

    If others may write to a directory that is only ours, its own mode is restricted. If they may
    only read, it may be a shared one such as /workspace, so our files in it are restricted instead.
    """
    try:
        status = home.stat()
    except OSError:  # the write reports the problem
        return
    if status.st_uid != os.geteuid() or not status.st_mode & _OTHERS:
        return
    places = [home] if status.st_mode & _OTHERS_WRITE else [home / "jobs.db", home / "runs"]
    for place in places:
        with suppress(FileNotFoundError):
            mode = place.stat().st_mode & 0o777
            if mode & _OTHERS:
                place.chmod(mode & ~_OTHERS)
    if places == [home]:
        print(
            f"fsdp-tui: other users could write to {home}; its mode was "
            f"{status.st_mode & 0o777:o} and is now {status.st_mode & 0o700:o}",
            file=sys.stderr,
        )


def _is_ours(home: Path) -> bool:
    """Return whether a directory contains only our files, with our database, and is not shared."""
    if home.stat().st_mode & stat.S_ISVTX or not (home / "jobs.db").is_file():
        return False
    with os.scandir(home) as entries:
        return all(
            entry.name.startswith(_OURS)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            for entry in entries
        )


def refuse_unwritable(path: Path) -> None:
    """Check that a directory can be written or created, without doing so.

    Raises:
        UserError: It cannot; the message names the part of the path at fault.
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
