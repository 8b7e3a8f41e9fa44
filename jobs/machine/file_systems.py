"""Which file system a path is on, and whether other machines may share it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# File systems that one machine alone can use. Any other may be shared: there are more network file
# systems, and names for them, than a list can know.
LOCAL: Final = frozenset(
    {
        "apfs",
        "bcachefs",
        "btrfs",
        "exfat",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "fuse.fuse-overlayfs",
        "jfs",
        "ntfs3",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "vfat",
        "xfs",
        "zfs",
    }
)


@cache
def is_shared(path: Path) -> bool:
    """Whether other machines may share a path; looked up once."""
    return kind_of(path) not in LOCAL


def kind_of(path: Path) -> str:
    """Return the type of the file system at a path."""
    mounted = [
        (partition.mountpoint, partition.fstype) for partition in psutil.disk_partitions(all=True)
    ]
    return kind_among(path.resolve(), mounted)


def kind_among(real: Path, mounted: Sequence[tuple[str, str]]) -> str:
    """Return the type of the innermost file system above a path. Pure.

    `mounted` is in mounting order.
    """
    best, kind = -1, "?"
    for point, fstype in mounted:
        if real.is_relative_to(point) and len(point) >= best:  # the later one lies over the other
            best, kind = len(point), fstype
    return kind
