"""Build ssh commands, and explain ssh's failures.

All commands for a machine share one connection (ssh's own multiplexing). Users, routes and keys are
up to the user's ssh configuration.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.fleet.config import Box

CONNECTS_WITHIN: Final = 10  # seconds
FAILED: Final = 255  # ssh's exit status for its own failures
_NOT_FOUND: Final = 127  # a shell's exit status for an unknown command
_STAYS: Final = 60  # seconds that an unused connection is kept open for the next command
# bytes; a socket path has at most 108, of which ssh and the name take 34
_LONGEST_FOLDER: Final = 70
# Seconds of silence after which ssh probes the machine, and number of probes before it gives up.
# Longer than the usual interval, so that a machine that reports is never probed.
_ALIVE: Final = (8, 2)
_ANSWERS_WITHIN: Final = 3.0  # seconds for a local process to answer
_OWN: Final = ["ControlMaster=no", "ControlPath=none"]


def ssh_command(
    box: Box,
    words: Sequence[str],
    *,
    terminal: bool = False,
    ask: bool = False,
    share: bool = True,
) -> list[str]:
    """Return the command that runs fsdp-tui on a machine.

    Args:
        box: The machine.
        words: Arguments of fsdp-tui, quoted for the machine's shell.
        terminal: Allocate a terminal.
        ask: Let ssh prompt for a password or about an unknown host; otherwise it fails instead.
        share: Use the shared connection to the machine; see `shared_answers`.
    """
    options = [f"ConnectTimeout={CONNECTS_WITHIN}"]
    options += [f"ServerAliveInterval={_ALIVE[0]}", f"ServerAliveCountMax={_ALIVE[1]}"]
    options += ["Compression=yes", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"]
    options += ["RemoteCommand=none"]  # the user's configuration may set one for logins
    if not ask:
        options += ["BatchMode=yes"]
    options += _shared(box) if share else _OWN
    remote = " ".join([box.command, *map(shlex.quote, words)])
    return [
        "ssh",
        "-t" if terminal else "-T",
        *(part for option in options for part in ("-o", option)),
        "--",
        box.ssh,
        remote,
    ]


def _shared(box: Box) -> list[str]:
    """Return ssh options for connection sharing; `_OWN` if there is no safe socket directory."""
    socket = _socket(box)
    if socket is None:
        return _OWN
    return ["ControlMaster=auto", f"ControlPath={socket}", f"ControlPersist={_STAYS}"]


def _socket(box: Box) -> Path | None:
    folder = runtime_folder()
    return folder and folder / hashlib.sha256(box.ssh.encode()).hexdigest()[:16]


def shared_answers(box: Box) -> bool:
    """Return whether the shared connection to a machine works or does not exist yet.

    If the process that holds it hangs, every command that uses it would wait forever.
    """
    socket = _socket(box)
    if socket is None or not socket.exists():
        return True
    check = ["ssh", "-O", "check", "-o", f"ControlPath={socket}", "--", box.ssh]
    try:
        subprocess.run(
            check,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWERS_WITHIN,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError:  # the ssh command itself will report this
        return True
    return True


def runtime_folder() -> Path | None:
    """Return a private folder for sockets, created if needed; None if there is no safe one.

    Anyone who can write to it could make ssh use a connection of theirs.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path(runtime) / "fsdp-tui"] if runtime else []
    places.append(Path(tempfile.gettempdir()) / f"fsdp-tui-{os.geteuid()}")
    for place in places:
        # ssh expands % and splits at spaces
        plain = not set(str(place)) & set("% \"'\\")
        if plain and len(os.fsencode(place)) <= _LONGEST_FOLDER and _is_ours(place):
            return place
    return None


def _is_ours(place: Path) -> bool:
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
    except OSError:
        return False
    mode = stat.S_IMODE(status.st_mode)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not mode & 0o077


def why_failed(box: Box, status: int, stderr: str) -> str:
    """Return why a command on a machine ended, as a sentence that continues "BOX is away: ".

    Args:
        box: The machine.
        status: ssh's exit status, which is that of the command if ssh itself did not fail.
        stderr: Its standard error.
    """
    lines = [line.strip() for line in stderr.splitlines() if "Permanently added" not in line]
    lines = [line for line in lines if line]
    last = lines[-1].removeprefix("fsdp-tui: ") if lines else ""
    if status == _NOT_FOUND:
        return (
            f"no {box.command} for commands over ssh there; set `command:` of {box.name} in "
            "machines.yaml"
        )
    if status == FAILED:
        if "Permission denied" in last:
            return f"{last}; log in once (enter), or use a key or an agent"
        if "IDENTIFICATION HAS CHANGED" in stderr:
            return (
                "its host key has changed: it was installed again, or another machine answers; "
                f"if you know that it is new, `ssh-keygen -R` its name and connect: ssh {box.ssh}"
            )
        if "Host key verification failed" in stderr:
            return f"its host key is not known; connect once: ssh {box.ssh}"
        return last or "the connection was lost"
    if status < 0:
        return f"ssh was ended by signal {-status}"
    return last or f"fsdp-tui there ended with status {status}"


def is_too_old(status: int, stderr: str) -> bool:
    """Return whether a machine's fsdp-tui failed because it does not know an option."""
    return status == 2 and "--machine" in stderr and "No such option" in stderr
