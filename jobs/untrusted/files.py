"""Read files that others may have put there: no pipe is waited for, no endless file is read."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LARGEST_TEXT: Final = 1 << 20  # bytes of a job file, a caption, a configuration
LARGEST_PICTURE: Final = 1 << 30  # bytes of the file
LARGEST_JSON: Final = 64 << 20  # bytes of what tools and ranks write


def read_regular(
    path: Path,
    most: int = LARGEST_TEXT,
    *,
    judge: Callable[[os.stat_result], None] | None = None,
) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: The file.
        most: Bytes that it may have.
        judge: Called with the status of the file that is read; may raise.

    Raises:
        OSError: It cannot be read, is a pipe or a device, or is larger.
        ValueError: No file can have this name.
    """
    # A pipe that nobody writes to would be waited for without end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if judge is not None:
            judge(status)
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
        pieces, left = [], most + 1
        while left and (data := os.read(descriptor, min(left, 1 << 20))):
            pieces.append(data)
            left -= len(data)
        if not left:  # it grew, or does not tell its size
            raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
        return b"".join(pieces)
    finally:
        os.close(descriptor)
