"""What the kernel says of a process: whether it lives, and when it began."""

from __future__ import annotations

import os
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def is_suspended(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    fields = _fields(pid)
    return bool(fields) and fields[0] in (b"T", b"t")


def started_at(pid: int) -> float | None:
    """When a live process began, in seconds since the machine booted; None when it is gone.

    Counted from the boot, and not in Unix time, because the machine's clock may be set while
    processes run: a live process would then look like another one. A zombie is gone.
    """
    fields = _fields(pid)
    if len(fields) < 20 or fields[0] in (b"Z", b"X", b"x"):
        return None
    return int(fields[19]) / _TICKS_PER_SECOND


def _fields(pid: int) -> list[bytes]:
    """What follows the command's name, which is in brackets and may hold anything; state first."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return []
    return text[text.rfind(b")") + 2 :].split()
