"""Lock files, and find the processes that hold locks."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any, Final

LOCKS: Final = Path("/proc/locks")
_RETRY_INTERVAL: Final = 0.02  # seconds between two attempts


def acquire(file: IO[Any], patience: float = 0.0) -> bool:
    """Lock an open file until it is closed; return False on timeout.

    Args:
        file: The file.
        patience: Seconds to wait while another process holds the lock.

    Raises:
        OSError: The file system does not support locks.
    """
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_RETRY_INTERVAL)
        else:
            return True


def acquire_shared(file: IO[Any]) -> None:
    """Take a shared lock on an open file until it is closed.

    Raises:
        OSError: The file system does not support locks.
    """
    fcntl.flock(file, fcntl.LOCK_SH)


def holders(path: Path, *, shared: bool = False, locks: Path = LOCKS) -> list[int]:
    """List other processes of this machine that hold a lock on a file.

    Reads the kernel's list, because trying to lock the file would turn away a process that locks it
    just then. A file on another file system may have the same inode number, so check what the
    process is.

    Args:
        path: The file; a missing one has no locks.
        shared: Also count shared locks.
        locks: The kernel's list.

    Returns:
        Their process IDs, except our own.
    """
    try:
        inode = str(os.stat(path).st_ino)
        lines = locks.read_text().splitlines()
    except OSError:
        return []
    kinds = ("WRITE", "READ") if shared else ("WRITE",)
    pids = []
    for line in lines:
        words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF
        # A process that waits for a lock has "->" as its second word. Pids 0 and -1 are processes
        # of other containers, and locks without a process.
        if len(words) < 6 or words[1] not in ("FLOCK", "POSIX") or words[3] not in kinds:
            continue
        pid = int(words[4]) if words[4].isdigit() else 0
        if words[5].rpartition(":")[2] == inode and pid not in (0, os.getpid()):
            pids.append(pid)
    return pids
