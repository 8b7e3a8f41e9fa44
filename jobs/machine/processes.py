"""Who is alive: processes identified by pid *and* start time, and found by their run id.

A pid alone proves nothing, since the kernel gives it to someone else later.
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
_START_TOLERANCE: Final = 0.005  # seconds; half a clock tick, lost in writing and reading it
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for another: pid, and start in seconds since the boot."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of a live process, or None when there is none with this pid.

        Raises:
            OSError: The kernel does not say.
        """
        started = started_at(pid)
        return None if started is None else cls(pid, started)

    def alive(self) -> bool:
        """Whether this very process still runs, or the kernel does not say; a zombie does not."""
        try:
            started = started_at(self.pid)
        except OSError:  # such as too many open files: not seen is not gone
            return True
        return started is not None and abs(started - self.started) < _START_TOLERANCE

    def suspended(self) -> bool:
        """Whether it is alive and stopped, until someone sends SIGCONT."""
        return is_suspended(self.pid) and self.alive()

    def is_dead(self) -> bool:
        """Whether it does nothing any more, though the kernel may still keep it."""
        return not self.alive() or is_being_killed(self.pid)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal if it still is the same process; whether it was sent."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def with_run_id(run_id: str) -> list[ProcessId]:
    """Every live process of ours whose environment carries this run id.

    Finds ranks that lost their launcher: torch elastic starts each rank in a session of its own,
    so no process group holds them together.

    Raises:
        OSError: The kernel does not say.
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
            if error.errno in (*GONE, errno.EACCES, errno.EPERM):  # gone, or not ours to read
                continue
            raise
        identity = ProcessId.of(int(name)) if ours else None
        if identity is not None and identity.alive():
            processes.append(identity)
    return processes


def end(processes: Iterable[ProcessId], *, grace: float, timeout: float = 10.0) -> list[ProcessId]:
    """SIGTERM, wait `grace` seconds, SIGKILL, wait; returns those that are still alive.

    With `grace=0` SIGKILL is sent at once.
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
    """Wait until none is alive or `timeout` seconds have passed; returns those still alive."""
    deadline = time.monotonic() + timeout
    remaining = list(processes)
    while True:
        reap()
        remaining = [process for process in remaining if process.alive()]
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.05)


def reap() -> None:
    """Collect ended children that nobody waits for, so that none stays a zombie.

    Only processes that are no direct `Popen` of ours are at stake: `Popen.poll` copes with a
    child that was collected elsewhere, but loses its exit status, so a caller that needs the
    status polls its `Popen` first.
    """
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # nobody has ended: spare the look at all processes of the machine
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
    """Leave this child to whoever holds its `Popen`; `reap` passes it over."""
    _WAITED_FOR.add(pid)


def become_subreaper() -> bool:
    """Let orphans of our children become our children (Linux); whether the kernel agreed."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def kernel_oom_kills() -> int:
    """Count processes of our control group that the kernel killed for memory; 0 if unknown."""
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
