"""Where a job lives: only who shares its kernel and its pid namespace can judge its processes.

From another container of the machine, or from another machine that shares the state directory,
their ids mean something else, or nothing. Not seen is not gone.
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
# Which file system a path is on, and whether other machines may share it.


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


# -- residence ------------------------------------------------------------------------------


# Boot, inode of the pid namespace, host name and machine id. Earlier versions recorded the boot
# alone, or the boot and the host name.
_RECORDED: Final = re.compile(r"([^/@#]*)(?:/([^@#]*))?(?:@([^#]*))?(?:#(.*))?", re.DOTALL)


class Standing(Enum):
    """What processes of a recorded residence are to this one."""

    HERE = "here"
    REBOOTED = "rebooted"  # they were here, and the machine has rebooted since
    ELSEWHERE = "elsewhere"  # in another container, or on another machine


class Residence(NamedTuple):
    """What identifies the place where processes live; "" is unknown."""

    boot: str = ""
    namespace: str = ""
    host: str = ""
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}@{self.host}#{self.machine}"


def residence() -> Residence:
    """Where this process lives."""
    return Residence(boot_id() or "", _namespace(), socket.gethostname(), _machine_id())


def read_residence(recorded: str | None) -> Residence:
    """Read a recorded residence."""
    match = _RECORDED.fullmatch(recorded or "")
    return Residence(*(part or "" for part in match.groups())) if match else Residence()


def stand(recorded: str | None, folder: Path) -> Standing:
    """Say what processes of a recorded residence are to this one.

    Args:
        recorded: `str(residence())` where they were started.
        folder: The state directory. No other machine has one that is on a local disk, so another
            boot is an earlier one.
    """
    there, here = read_residence(recorded), residence()
    if there.boot and there.boot == here.boot:
        other = there.namespace and here.namespace and there.namespace != here.namespace
        return Standing.ELSEWHERE if other else Standing.HERE
    if not (there.boot and here.boot):  # a kernel that does not tell
        return Standing.ELSEWHERE if there.host not in ("", here.host) else Standing.HERE
    same = there.machine and (there.machine, there.host) == (here.machine, here.host)
    return Standing.REBOOTED if same or not is_shared(folder) else Standing.ELSEWHERE


def elsewhere(recorded: str | None, folder: Path) -> str:
    """Name the container or machine where a job lives; "" if it is this one."""
    if stand(recorded, folder) is not Standing.ELSEWHERE:
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
