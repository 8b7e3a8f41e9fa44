"""Identify processes by pid *and* start time, and find them by their run id.

A pid alone proves nothing, since the kernel reuses it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from jobs.machine.procfs import GONE, is_being_killed, is_suspended, started_at

if TYPE_CHECKING:
    from collections.abc import Iterable

RUN_ID_VARIABLE: Final = "FSDP_TUI_RUN_ID"
# seconds; half a clock tick, the rounding error of writing and reading it
_START_TOLERANCE: Final = 0.005
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be confused with another: pid, and start in seconds since the boot."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of a live process; None if there is none with this pid.

        Raises:
            OSError: The kernel does not provide it.
        """
        started = started_at(pid)
        return None if started is None else cls(pid, started)

    def alive(self) -> bool:
        """Return whether this process is alive or unknown to the kernel; a zombie is not alive."""
        try:
            started = started_at(self.pid)
        except OSError:  # for example too many open files: unknown does not mean gone
            return True
        return started is not None and abs(started - self.started) < _START_TOLERANCE

    def suspended(self) -> bool:
        """Return whether it is alive but stopped until it gets SIGCONT."""
        return is_suspended(self.pid) and self.alive()

    def is_dead(self) -> bool:
        """Return whether it will not run again, even if the kernel still lists it."""
        return not self.alive() or is_being_killed(self.pid)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal if it still is the same process; return whether it was sent."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def with_run_id(run_id: str) -> list[ProcessId]:
    """Return every live process of ours that has this run id in its environment.

    This finds ranks that lost their launcher: torch elastic starts each rank in its own session, so
    they share no process group.

    Raises:
        OSError: The kernel does not list the processes.
    """
    needle = f"{RUN_ID_VARIABLE}={run_id}".encode()
    processes = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                ours = needle in file.read().split(b"\0")
        except OSError as error:
            if error.errno in (*GONE, errno.EACCES, errno.EPERM):  # gone, or owned by another user
                continue
            raise
        identity = ProcessId.of(int(name)) if ours else None
        if identity is not None and identity.alive():
            processes.append(identity)
    return processes


def run_id_of(pid: int) -> str:
    """Return the run id in a process's environment; "" if it has none or cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return ""
    needle = f"{RUN_ID_VARIABLE}=".encode()
    values = (entry[len(needle) :] for entry in entries if entry.startswith(needle))
    return next(values, b"").decode(errors="replace")


def end(processes: Iterable[ProcessId], *, grace: float, timeout: float = 10.0) -> list[ProcessId]:
    """Send SIGTERM, wait `grace` seconds, send SIGKILL, wait; return the processes still alive.

    With `grace=0`, send SIGKILL at once.
    """
    remaining = [process for process in processes if process.alive()]
    if grace > 0:
        for process in remaining:
            process.signal(signal.SIGTERM)
        remaining = wait_gone(remaining, grace)
    for process in remaining:
        process.signal(signal.SIGKILL)
    return wait_gone(remaining, timeout)


def wait_gone(processes: Iterable[ProcessId], timeout: float) -> list[ProcessId]:
    """Wait at most `timeout` seconds until all have ended; return the processes still alive."""
    deadline = time.monotonic() + timeout
    remaining = list(processes)
    while True:
        reap()
        remaining = [process for process in remaining if process.alive()]
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.05)


def reap() -> None:
    """Collect ended children that nothing waits for, so that no zombies remain.

    This matters only for processes that are not a direct `Popen` of ours. `Popen.poll` tolerates a
    child that was collected elsewhere but loses its exit status, so callers that need the status
    poll their `Popen` first.
    """
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # no child has ended: skip the scan of all processes
    except ChildProcessError:
        return
    for child in psutil.Process().children():
        try:
            if child.status() == psutil.STATUS_ZOMBIE and child.pid not in _WAITED_FOR:
                os.waitpid(child.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue


_WAITED_FOR: set[int] = set()


def wait_for_by_hand(pid: int) -> None:
    """Exclude a child from `reap`, because the owner of its `Popen` waits for it."""
    _WAITED_FOR.add(pid)


def become_subreaper() -> bool:
    """Make orphans of our children our children (Linux); return whether the kernel agreed."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def kernel_oom_kills() -> int:
    """Count the processes of our cgroup that the kernel's OOM killer ended; 0 if unknown."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, encoding="ascii") as file:
                for line in file:
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        except (OSError, ValueError):
            continue
    return 0
