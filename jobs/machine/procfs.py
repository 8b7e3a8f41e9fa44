"""Read the state and start time of a process from /proc."""

from __future__ import annotations

import errno
import os
import signal
from typing import Final

GONE: Final = (errno.ENOENT, errno.ESRCH)
"""Errors that mean that a process has ended; any other means that the kernel does not say."""

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def is_suspended(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    return _state(pid) in (b"T", b"t")


def is_waiting_for_kernel(pid: int) -> bool:
    """Return whether a process is in an uninterruptible system call, for example on a dead disk."""
    return _state(pid) == b"D"


def switches(pid: int) -> int | None:
    """Count how often a process left a CPU; an unchanged count means it did not run."""
    counts = _status(pid, b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")
    return sum(map(int, counts)) if counts else None


def is_being_killed(pid: int) -> bool:
    """Return whether SIGKILL is pending, so that the process ends once the kernel releases it."""
    pending = _status(pid, b"SigPnd", b"ShdPnd")
    return any(int(mask, 16) & 1 << signal.SIGKILL - 1 for mask in pending)


def started_at(pid: int) -> float | None:
    """Return when a live process started, in seconds since the machine booted; None if it is gone.

    Counted from the boot instead of in Unix time, because the clock may be set while processes run;
    a live process would then look like another one. A zombie counts as gone.

    Raises:
        OSError: The kernel does not provide it.
    """
    fields = _fields(pid)
    if len(fields) < 20 or fields[0] in (b"Z", b"X", b"x"):
        return None
    return int(fields[19]) / _TICKS_PER_SECOND


def _status(pid: int, *names: bytes) -> list[bytes]:
    """Return the values of the named lines of a process's status.

    Empty if the process is gone or a line is missing.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return []
    values = [text.partition(b"\n" + name + b":")[2].partition(b"\n")[0].strip() for name in names]
    return values if all(values) else []


def _state(pid: int) -> bytes:
    try:
        return next(iter(_fields(pid)), b"")
    except OSError:
        return b""


def _fields(pid: int) -> list[bytes]:
    """Return the fields after the command name, starting with the state.

    The name is in parentheses and may contain any characters.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError as error:
        if error.errno in GONE:
            return []
        raise
    return text[text.rfind(b")") + 2 :].split()
