"""Which file system a path is on, and whether other machines may share it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# File systems that several machines may share, or that only look like one.
NETWORK: Final = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.goofys",
        "fuse.juicefs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "panfs",
        "smb3",
        "smbfs",
        "wekafs",
    }
)


@cache
def is_shared(path: Path) -> bool:
    """Whether a path is on a network file system; looked up once."""
    return kind_of(path) in NETWORK


def kind_of(path: Path) -> str:
    """The type of the file system at a path."""
    mounted = [
        (partition.mountpoint, partition.fstype) for partition in psutil.disk_partitions(all=True)
    ]
    return kind_among(path.resolve(), mounted)


def kind_among(real: Path, mounted: Sequence[tuple[str, str]]) -> str:
    """The type of the innermost file system above a path. Pure; `mounted` is in mounting order."""
    best, kind = -1, "?"
    for point, fstype in mounted:
        if real.is_relative_to(point) and len(point) >= best:  # the later one lies over the other
            best, kind = len(point), fstype
    return kind
