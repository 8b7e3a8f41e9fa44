"""Identify the kernel and pid namespace of a job's processes.

Only a process that shares both can judge them. In another container of the machine, or on another
machine that shares the state directory, their pids mean something else or nothing. Not visible does
not mean gone.
"""

from __future__ import annotations

import os
import re
import socket
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence


# -- file systems ---------------------------------------------------------------------------
# The type of a path's file system, and whether other machines may share it.


# File systems that only one machine can use. Any other may be shared, because there are more
# network file systems, and names for them, than a list can contain.
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
    """Return whether other machines may share a path. Cached."""
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
        # the later mount hides the earlier one
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), fstype
    return kind


# -- residence ------------------------------------------------------------------------------


# Boot, inode of the pid namespace, host name and machine id. Earlier versions recorded only the
# boot, or the boot and the host name.
_RECORDED: Final = re.compile(r"([^/@#]*)(?:/([^@#]*))?(?:@([^#]*))?(?:#(.*))?", re.DOTALL)


class Standing(Enum):
    """How processes of a recorded residence relate to this one."""

    HERE = "here"
    REBOOTED = "rebooted"  # they ran here, before the machine rebooted
    ELSEWHERE = "elsewhere"  # in another container or on another machine


class Residence(NamedTuple):
    """Identity of the place where processes live; "" is unknown."""

    boot: str = ""
    namespace: str = ""
    host: str = ""
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}@{self.host}#{self.machine}"


def residence() -> Residence:
    """Return this process's residence."""
    return Residence(boot_id() or "", _namespace(), socket.gethostname(), _machine_id())


def read_residence(recorded: str | None) -> Residence:
    """Parse a recorded residence."""
    match = _RECORDED.fullmatch(recorded or "")
    return Residence(*(part or "" for part in match.groups())) if match else Residence()


def standing_of(recorded: str | None, folder: Path) -> Standing:
    """Compare a recorded residence with that of this process.

    Args:
        recorded: `str(residence())` of the process that recorded it.
        folder: The state directory. If it is on a local disk, no other machine has it, so a
            different boot is an earlier one.
    """
    there, here = read_residence(recorded), residence()
    if there.boot and there.boot == here.boot:
        other = there.namespace and here.namespace and there.namespace != here.namespace
        return Standing.ELSEWHERE if other else Standing.HERE
    if not (there.boot and here.boot):  # the kernel does not provide a boot id
        return Standing.ELSEWHERE if there.host not in ("", here.host) else Standing.HERE
    same = there.machine and (there.machine, there.host) == (here.machine, here.host)
    return Standing.REBOOTED if same or not is_shared(folder) else Standing.ELSEWHERE


def elsewhere(recorded: str | None, folder: Path) -> str:
    """Return the name of the container or machine of a job; "" if it is this one."""
    if standing_of(recorded, folder) is not Standing.ELSEWHERE:
        return ""
    return read_residence(recorded).host or "its name is not known"


def boot_id() -> str | None:
    """Return the kernel's id of this boot; processes recorded under another id are gone."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@cache
def _namespace() -> str:
    try:
        return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return ""


@cache
def _machine_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            if text := Path(path).read_text().strip():
                return text
        except (OSError, ValueError):
            continue
    return ""
