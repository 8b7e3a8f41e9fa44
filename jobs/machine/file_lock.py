"""Take a file for one process at a time."""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any, Final

_AGAIN: Final = 0.02  # seconds between two tries


def take(file: IO[Any], patience: float = 0.0) -> bool:
    """Lock an open file until it is closed; False if another holds it for `patience` seconds.

    Raises:
        OSError: Its file system has no locks.
    """
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_AGAIN)
        else:
            return True


def share(file: IO[Any]) -> None:
    """Lock an open file until it is closed, together with others that share it.

    Raises:
        OSError: Its file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_SH)
