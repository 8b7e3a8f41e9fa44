"""Processes and threads that tests have started, however they came to be."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.machine.processes import ProcessId, end
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection

_PACKAGES: Final = tuple(f"{ROOT / name}{os.sep}" for name in ("jobs", "tui", "engine"))


def processes_of(folder: Path) -> list[ProcessId]:
    """Every process, but this one, whose state or working directory is in `folder`.

    Dashboards and queue keepers have the one, ranks and launchers both; supervisors of tests the
    other (see `fakes.supervise`).
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        if path.name != str(os.getpid()) and _is_of(folder, path):
            found.append(ProcessId.of(int(path.name)))
    return [process for process in found if process is not None]


def runs_with(path: Path) -> bool:
    """Whether this path, or one below it, is on some process' command line."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if any(word.startswith(os.fsencode(path)) for word in words):
                return True
    return False


def _is_of(folder: Path, process: Path) -> bool:
    wanted = f"{folder}{os.sep}"
    with suppress(OSError):  # it has ended, or is someone else's
        if f"{os.readlink(process / 'cwd')}{os.sep}".startswith(wanted):
            return True
        for entry in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"FSDP_TUI_HOME":
                return f"{os.fsdecode(value)}{os.sep}".startswith(wanted)
    return False


def end_all_of(folder: Path) -> None:
    """Kill those processes, and what they start while they are killed, until there are none."""
    unseen = 0
    while unseen < 2:  # one that was forked during the first look is seen by the second
        left = processes_of(folder)
        unseen = 0 if left else unseen + 1
        assert not end(left, grace=0), f"they cannot be killed: {left}"


def name_of(process: ProcessId) -> str:
    """Pid and command line, for people."""
    with suppress(OSError):
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return f"{process.pid} {line.decode(errors='replace')}"
    return f"{process.pid} ?"


def threads_since(before: Collection[threading.Thread]) -> list[str]:
    """Name the threads that started since and are in our code, and where they are.

    Threads of libraries may stay: a server's connections, an event loop, idle workers of a pool.
    """
    since = [thread for thread in threading.enumerate() if thread not in before]
    if not since:
        return []
    frames, found = sys._current_frames(), []
    for thread in since:
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            if frame.f_code.co_filename.startswith(_PACKAGES):
                found.append(f"{thread.name}: {frame.f_code.co_filename}:{frame.f_lineno}")
                break
            frame = frame.f_back
    return found
