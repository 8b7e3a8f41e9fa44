"""Processes, files and disk space as the supervisor's thread sees them."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import signal
import sqlite3
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from jobs.machine import processes
from jobs.machine.processes import ProcessId
from jobs.machine.procfs import started_at
from jobs.queue.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.jobs.situations.clock import PlayedClock

FIRST_PID: Final = 1 << 23  # beyond what Linux gives to a process
STARTED: Final = 7.0  # seconds after the boot, of every process here
_PLENTY: Final = 1 << 40  # bytes


@dataclass
class Process:
    """A process that is made up.

    Attributes:
        pid: Its number.
        alive: Asked whether it still runs.
        takes: Called with each signal that it is sent.
        run_id: What its environment says; "" for one that is on another machine.
    """

    pid: int
    alive: Callable[[], bool]
    takes: Callable[[signal.Signals], None]
    run_id: str = ""


@dataclass
class Kernel:
    """The processes of this machine; others are passed on to the real one."""

    processes: dict[int, Process] = field(default_factory=dict)
    lists_none: bool = False  # as with too many open files

    def add(self, **facts: Any) -> Process:
        process = Process(FIRST_PID + len(self.processes), **facts)
        self.processes[process.pid] = process
        return process

    def take_over(self, patch: pytest.MonkeyPatch) -> None:
        """Answer for the real kernel wherever the product asks about processes."""
        real_kill = os.kill

        def start_of(pid: int) -> float | None:
            if pid < FIRST_PID:
                return started_at(pid)
            return STARTED if pid in self.processes and self.processes[pid].alive() else None

        def kill(pid: int, number: int) -> None:
            if pid < FIRST_PID:
                real_kill(pid, number)
            else:
                self.processes[pid].takes(signal.Signals(number))

        patch.setattr(processes, "started_at", start_of)
        patch.setattr(processes, "with_run_id", self._with_run_id)
        patch.setattr(processes, "become_subreaper", lambda: True)
        patch.setattr(processes, "reap", lambda: None)
        patch.setattr(os, "kill", kill)

    def _with_run_id(self, run_id: str) -> list[ProcessId]:
        if self.lists_none:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        ours = [p for p in self.processes.values() if p.run_id == run_id and p.alive()]
        return [ProcessId(process.pid, STARTED) for process in ours]


@dataclass
class Disk:
    """The disk of the run directory and of the database, for the supervisor alone.

    Attributes:
        full: Whether it takes nothing more.
        free: What is left, in bytes.
    """

    clock: PlayedClock
    full: bool = False
    free: int = _PLENTY

    def take_over(self, patch: pytest.MonkeyPatch) -> None:
        """Refuse what the supervisor writes while the disk is full."""
        real = SimpleNamespace(open=builtins.open, low=os.open, write=Store.write)

        def opened(file: Any, mode: str = "r", *words: Any, **more: Any) -> Any:
            if set(mode) & set("wax+"):
                self._refuse()
            return real.open(file, mode, *words, **more)

        def opened_low(path: Any, flags: int, *words: Any, **more: Any) -> int:
            if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                self._refuse()
            number: int = real.low(path, flags, *words, **more)
            return number

        def write(store: Store, patience: float | None = None) -> Any:
            if self._refuses():
                raise sqlite3.OperationalError("database or disk is full")
            return real.write(store, patience)

        patch.setattr(builtins, "open", opened)
        patch.setattr(os, "open", opened_low)
        patch.setattr(Store, "write", write)
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.free))

    def _refuses(self) -> bool:
        return self.full and self.clock.in_supervisor()

    def _refuse(self) -> None:
        if self._refuses():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
