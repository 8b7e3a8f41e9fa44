"""What a supervisor does for the disk: logs that cannot fill it, a warning before a save fails."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.run.rundir import RunDir

LOG_LIMIT: Final = 256 << 20
_LOG_KEPT: Final = 16 << 20
_HEAD_ROOM: Final = 1.2
_ALWAYS_FREE: Final = 256 << 20


def cap_logs(run_dir: RunDir, limit: int = LOG_LIMIT, kept: int = _LOG_KEPT) -> list[Path]:
    """Cut logs that grew beyond `limit` bytes; their last `kept` bytes move to `<name>.1`.

    Ranks hold their logs open in append mode, so the file is emptied in place: what they write
    next lands at its beginning.

    Returns:
        The logs that were cut.
    """
    cut = []
    for path in run_dir.logs.glob("*.log"):
        size = path.stat().st_size
        if size <= limit:
            continue
        with open(path, "rb") as source, open(path.with_name(path.name + ".1"), "wb") as target:
            source.seek(size - kept)
            shutil.copyfileobj(source, target)
        os.truncate(path, 0)
        cut.append(path)
    return cut


def space_warning(run_dir: RunDir) -> str | None:
    """Why the next checkpoint may not fit on its disk, or None when it should."""
    newest = run_dir.latest_checkpoint()
    needed = int(directory_size(newest[1]) * _HEAD_ROOM) if newest else 0
    free = shutil.disk_usage(run_dir.root).free
    if free > needed + _ALWAYS_FREE:
        return None
    return f"only {free >> 20} MiB free for checkpoints; the next one needs {needed >> 20} MiB"


def directory_size(root: Path) -> int:
    """Bytes of all files below a directory; files that vanish meanwhile count nothing."""
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
