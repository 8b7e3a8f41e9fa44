"""What the kernel and the container let processes have: memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from jobs.doctor.checks.gpus import chosen
from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.machine.cgroups import memory_rooms
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.doctor.patient import Patient

SHM: Final = Path("/dev/shm")
INFINIBAND: Final = Path("/sys/class/infiniband")
_MIB: Final = 2**20
_GIB: Final = 2**30
_SHM_OF_A_RANK: Final = 64 * _MIB  # NCCL's buffers where GPUs cannot reach each other directly
_ROOMY_SHM: Final = 1 * _GIB
_FEW_FILES: Final = 1024
_ENOUGH_FILES: Final = 4096
_LITTLE_MEMORY: Final = 2 * _GIB
_MODEST_MEMORY: Final = 16 * _GIB


def check_shared_memory(patient: Patient) -> Iterator[Finding]:
    """/dev/shm, through which NCCL and gloo pass data between ranks of a machine."""
    try:
        facts = os.statvfs(SHM)
    except OSError as error:
        yield fail(
            "/dev/shm",
            f"cannot be used: {error.strerror}",
            "mount it: sudo mount -t tmpfs tmpfs /dev/shm",
        )
        return
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    writable = os.access(SHM, os.W_OK | os.X_OK)
    yield judge_shared_memory(total, free, writable=writable, ranks=max(2, len(chosen(patient))))


def judge_shared_memory(total: int, free: int, *, writable: bool, ranks: int) -> Finding:
    """Pure."""
    needed = ranks * _SHM_OF_A_RANK
    words = f"{size(free)} free of {size(total)}"
    larger = "docker run --shm-size=16g (or --ipc=host); else remount it larger"
    facts = {"total": total, "free": free}
    if not writable:
        return fail("/dev/shm", "may not be written by you", "sudo chmod 1777 /dev/shm", **facts)
    if free < needed:
        return fail(
            "/dev/shm", f"{words}, and {ranks} ranks may need {size(needed)}", larger, **facts
        )
    if total < _ROOMY_SHM:
        return warn("/dev/shm", f"{words}, which is little", larger, **facts)
    return ok("/dev/shm", words, **facts)


def check_open_files(_: Patient) -> Iterator[Finding]:
    """RLIMIT_NOFILE."""
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    """Pure; -1 is unlimited."""
    facts = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return ok("open files", f"at most {_count(soft)}", **facts)
    enough = hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES
    advice = (
        f"ulimit -n {_count(hard) if hard > 0 else 65536} before fsdp-tui starts"
        if enough
        else "raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)"
    )
    verdict = fail if soft < _FEW_FILES else warn
    return verdict("open files", f"at most {soft} for each process", advice, **facts)


def check_locked_memory(_: Patient) -> Iterator[Finding]:
    """RLIMIT_MEMLOCK, which InfiniBand needs."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judge_locked_memory(soft, infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))


def judge_locked_memory(soft: int, *, infiniband: bool) -> Finding:
    """Pure; -1 is unlimited."""
    words = "no limit" if soft == resource.RLIM_INFINITY else f"at most {size(soft)}"
    if infiniband and soft != resource.RLIM_INFINITY:
        return warn(
            "locked memory",
            f"{words}, and InfiniBand locks all that it sends",
            "raise memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1)",
            limit=soft,
        )
    note = "" if infiniband else "; only InfiniBand needs more, and there is none"
    return ok("locked memory", words + (note if soft >= 0 else ""), limit=soft)


def check_memory(_: Patient) -> Iterator[Finding]:
    """Free memory of the machine, and what the container leaves of it."""
    memory = psutil.virtual_memory()
    yield judge_memory(memory.available, memory.total, container_room())


def judge_memory(available: int, total: int, container: tuple[int, int] | None) -> Finding:
    """Pure; `container` is what its control group still allows, and its limit."""
    facts = {"available": available, "total": total, "container": container}
    words = f"{size(available)} free of {size(total)}"
    left = available
    if container is not None:
        left = min(left, container[0])
        words += f"; the container may take {size(container[0])} more of {size(container[1])}"
    if left < _LITTLE_MEMORY:
        return fail("memory", words, "end other processes, or give the container more", **facts)
    if left < _MODEST_MEMORY:
        return warn(
            "memory", words, "large text encoders may not fit while captions are encoded", **facts
        )
    return ok("memory", words, **facts)


def container_room() -> tuple[int, int] | None:
    """`(bytes left, limit)` of the tightest control group; None where none is below the machine."""
    total = psutil.virtual_memory().total
    # Where there is no limit, version 1 says a number that no machine has.
    return min((room for room in memory_rooms() if room[1] < total), default=None)


def _count(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else str(number)
