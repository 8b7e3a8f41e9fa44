"""Keep logs from filling the disk, and warn before a save fails."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.run.rundir import RunDir

LOG_LIMIT: Final = 256 << 20
_LOG_KEPT: Final = 16 << 20  # bytes kept at each end
_COPIED: Final = 1 << 20  # bytes per read
_CUT: Final = b"[... fsdp-tui cut %d bytes here: the log grew too large ...]\n"
_CUT_LINE: Final = re.compile(
    rb"\[\.\.\. fsdp-tui cut (\d{1,18}) bytes here: the log grew too large \.\.\.\]\n"
)
_HEAD_ROOM: Final = 1.2
_ALWAYS_FREE: Final = 256 << 20


def cap_logs(run_dir: RunDir, limit: int = LOG_LIMIT, kept: int = _LOG_KEPT) -> list[Path]:
    """Cut the middle out of logs that exceed `limit` bytes, keeping `kept` bytes at each end.

    A line between them says how much is missing. Ranks hold their logs open in append mode, so the
    end is moved forward within the file, and their next writes land behind it.

    Returns:
        The logs that were cut.
    """
    cut = []
    for path in run_dir.logs.glob("*.log"):
        size = path.stat().st_size
        if size <= limit:
            continue
        with open(path, "r+b") as file:
            _cut_middle(file.fileno(), size, kept)
        cut.append(path)
    return cut


class Cut(NamedTuple):
    """The line in a log that replaces cut-out bytes: its position, and how many are missing."""

    start: int
    stop: int
    missing: int

    def now_at(self, offset: int, before: Cut | None) -> int:
        """Translate an offset into the log after the cut; the line itself if its text was cut out.

        Args:
            offset: Read position behind the line of the earlier cut.
            before: The cut that the log contained then.
        """
        if before is not None:
            offset += before.missing - (before.stop - before.start)
        moved = offset - self.missing + (self.stop - self.start)
        return moved if moved >= self.stop else self.start


def find_cut(log: int, kept: int = _LOG_KEPT) -> Cut | None:
    """Return the cut in an open log; None if it was not cut."""
    match = _CUT_LINE.search(os.pread(log, kept + 2 * len(_CUT), 0))
    return Cut(match.start(), match.end(), int(match[1])) if match else None


def _cut_middle(log: int, size: int, kept: int) -> None:
    """Cut an open file of `size` bytes, at nearby line ends if there are any.

    If this is interrupted, the end is still in its old place.
    """
    before = find_cut(log, kept)
    if before is None:  # treat it as a cut of zero bytes
        head = os.pread(log, kept, 0).rfind(b"\n") + 1 or kept
        before = Cut(head, head, 0)
    tail = size - kept
    tail += max(0, os.pread(log, min(kept, _COPIED), tail - 1).find(b"\n"))
    missing = before.missing + tail - before.stop
    at = before.start + os.pwrite(log, _CUT % missing, before.start)
    while data := os.pread(log, _COPIED, tail):  # includes data written in the meantime
        at += os.pwrite(log, data, at)
        tail += len(data)
    os.ftruncate(log, at)


def space_warning(run_dir: RunDir) -> str | None:
    """Return why the next checkpoint may not fit on its disk; None if it should."""
    newest = run_dir.latest_checkpoint()
    needed = int(directory_size(newest[1]) * _HEAD_ROOM) if newest else 0
    free = shutil.disk_usage(run_dir.root).free
    if free > needed + _ALWAYS_FREE:
        return None
    return f"only {free >> 20} MiB free for checkpoints; the next one needs {needed >> 20} MiB"


def directory_size(root: Path) -> int:
    """Return the bytes of all files below a directory, ignoring files that vanish meanwhile."""
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
