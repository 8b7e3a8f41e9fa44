"""Check a process's environment: variables, and limits of the kernel and the container."""

from __future__ import annotations

import os
import resource
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

import jobs
from jobs.doctor.checks.gpus import chosen
from jobs.doctor.examine import Finding, fail, ok, warn
from jobs.launch import ALLOCATOR_VARIABLES, HOST_ALLOCATOR
from jobs.machine.cgroups import memory_rooms
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from jobs.doctor.examine import Patient


# -- variables ------------------------------------------------------------------------------
# Environment variables that affect jobs and are easily forgotten.


_OURS: Final = ("jobs", "tui", "engine")
_THIRD_PARTY: Final = ("torch", "accelerate", "diffusers", "transformers", "peft", "numpy", "yaml")
_LIBRARIES: Final = ("libcuda.", "libcudart.", "libnccl.", "libcudnn", "libcublas", "libnvrtc.")
_OF_LAUNCHERS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OFF: Final = ("", "0", "false", "off", "no")


class _Rule(NamedTuple):
    """A variable that is harmful with certain values."""

    name: str
    is_harmful: Callable[[str], bool]
    what: str
    advice: str = "unset it unless you need it"


def _on(value: str) -> bool:
    return value.lower() not in _OFF


_RULES: Final = (
    _Rule("CUDA_LAUNCH_BLOCKING", _on, "makes the GPU wait for every single kernel"),
    _Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "makes every allocation go to the driver"),
    _Rule("NCCL_P2P_DISABLE", _on, "blocks direct GPU-to-GPU memory access, including NVLink"),
    _Rule("NCCL_SHM_DISABLE", _on, "sends data between GPUs over the network"),
    _Rule("NCCL_IB_DISABLE", _on, "disables InfiniBand"),
    _Rule(
        "NCCL_DEBUG",
        lambda v: v.upper() in ("INFO", "TRACE"),
        "fills the logs of ranks",
        "unset it when you are done debugging",
    ),
    _Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda v: v.upper() == "DETAIL",
        "checks every collective twice, which is slow",
    ),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", _on, "makes every collective wait for the GPU"),
    _Rule("NCCL_BLOCKING_WAIT", _on, "makes every collective wait for the GPU"),
    _Rule("TORCH_SHOW_DISPATCH_TRACE", _on, "prints every operation"),
    _Rule("TORCHDYNAMO_DISABLE", _on, "silently turns torch_compile off"),
    _Rule("TORCH_COMPILE_DISABLE", _on, "silently turns torch_compile off"),
    _Rule("PYTHONHOME", lambda v: bool(v), "makes Python look for its library elsewhere"),
    _Rule("PYTHONOPTIMIZE", _on, "disables the engine's checks"),
    *(
        _Rule(
            name,
            lambda v: "expandable_segments:false" in v.lower(),
            "turns off expandable segments, which save GPU memory",
        )
        for name in sorted(ALLOCATOR_VARIABLES)
    ),
)
# Shown whenever they are set, because readers of the report need them.
_SHOWN: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    *sorted(ALLOCATOR_VARIABLES),
    *sorted(HOST_ALLOCATOR),
    "TMPDIR",
)
_SHOWN_KINDS: Final = ("NCCL_", "TORCH_", "TORCHINDUCTOR_", "GLOO_", "UCX_", "FI_")
_NOT_PASSED_ON: Final = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "PET_")
_LONGEST: Final = 60


def check_variables(_: Patient) -> Iterator[Finding]:
    """Check the environment that jobs will inherit."""
    yield from judge_variables(dict(os.environ), network_interfaces())


def network_interfaces() -> list[str]:
    """Return the names of this machine's network interfaces."""
    return list(psutil.net_if_addrs())


def judge_variables(environ: Mapping[str, str], interfaces: Collection[str]) -> Iterator[Finding]:
    """Report harmful variables, then other relevant ones. Reads the directories they name."""
    bad = [
        warn(rule.name, f"is {_short(environ[rule.name])}, which {rule.what}", rule.advice)
        for rule in _RULES
        if rule.name in environ and rule.is_harmful(environ[rule.name])
    ]
    bad += _judge_interfaces(environ, interfaces)
    bad += _judge_python_path(environ.get("PYTHONPATH", ""))
    bad += _judge_library_path(environ.get("LD_LIBRARY_PATH", ""))
    if (folder := environ.get("TMPDIR")) and not os.access(folder, os.W_OK | os.X_OK):
        bad.append(fail("TMPDIR", f"{folder} is not a writable directory", "unset TMPDIR"))
    yield from bad
    reported = {finding.name for finding in bad}
    shown = {
        name: _short(value)
        for name, value in sorted(environ.items())
        if (name in _SHOWN or name.startswith(_SHOWN_KINDS)) and name not in reported
    }
    if shown:
        yield ok("set", ", ".join(f"{name}={value}" for name, value in shown.items()), set=shown)
    dropped = sorted(
        name
        for name in environ
        if (name.startswith(_NOT_PASSED_ON) and name != "FSDP_TUI_HOME") or name in _OF_LAUNCHERS
    )
    dropped = [name for name in dropped if not name.startswith("FSDP_TUI_")]
    if dropped:
        yield ok("not passed on", f"{', '.join(dropped)}: the job decides", names=dropped)
    if not bad and not shown and not dropped:
        yield ok("variables", "none set that affects jobs")


def _judge_interfaces(environ: Mapping[str, str], there: Collection[str]) -> Iterator[Finding]:
    """Check that named interfaces exist.

    `NCCL_SOCKET_IFNAME` lists prefixes (`=` exact names, `^` exclusions); gloo's lists names.
    """
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or name.startswith("GLOO")
        prefixes = [word.strip() for word in value.lstrip("=").split(",") if word.strip()]
        fits = [
            interface
            for interface in there
            if any(interface == word if exact else interface.startswith(word) for word in prefixes)
        ]
        if prefixes and not fits:
            yield fail(
                name,
                f"is {_short(value)}, but there is no such network interface",
                f"unset it, or choose from {', '.join(sorted(there))}",
            )


def _judge_python_path(value: str) -> Iterator[Finding]:
    """Report directories in PYTHONPATH that shadow installed packages."""
    home = Path(jobs.__file__).resolve().parent.parent
    for entry in value.split(os.pathsep) if value else ():
        if not os.path.isdir(entry) or Path(entry).resolve() == home:
            continue
        hidden = [name for name in (*_OURS, *_THIRD_PARTY) if PathFinder.find_spec(name, [entry])]
        ours = [name for name in hidden if name in _OURS]
        if ours:
            yield fail(
                "PYTHONPATH",
                f"{entry} has {', '.join(ours)}, which hides fsdp-tui's own",
                "remove it from PYTHONPATH",
            )
        elif hidden:
            yield warn(
                "PYTHONPATH",
                f"{entry} has {', '.join(hidden)}, which shadow the installed ones",
                "remove it from PYTHONPATH",
            )


def _judge_library_path(value: str) -> Iterator[Finding]:
    """Report directories in LD_LIBRARY_PATH that shadow the libraries bundled with torch."""
    for entry in value.split(os.pathsep) if value else ():
        try:
            names = sorted(name for name in os.listdir(entry) if name.startswith(_LIBRARIES))
        except OSError:
            continue
        if any(name.startswith("libcuda.") for name in names) and Path(entry).name == "stubs":
            yield fail(
                "LD_LIBRARY_PATH",
                f"{entry} has a stub libcuda.so, for linking only",
                "remove the stubs directory from LD_LIBRARY_PATH",
            )
        elif kinds := sorted({name.split(".")[0] for name in names} - {"libcuda"}):
            yield warn(
                "LD_LIBRARY_PATH",
                f"{entry} has {', '.join(kinds)}, which shadow torch's",
                "remove it, unless torch was built with them",
            )


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else value[: _LONGEST - 1] + "…"


# -- limits ---------------------------------------------------------------------------------
# Limits of the kernel and the container: memory, shared memory, open files.


SHM: Final = Path("/dev/shm")
INFINIBAND: Final = Path("/sys/class/infiniband")
_MIB: Final = 2**20
_GIB: Final = 2**30
_SHM_PER_RANK: Final = 64 * _MIB  # NCCL's buffers when GPUs cannot access each other directly
_ROOMY_SHM: Final = 1 * _GIB
_FEW_FILES: Final = 1024
_ENOUGH_FILES: Final = 4096
_LITTLE_MEMORY: Final = 2 * _GIB
_MODEST_MEMORY: Final = 16 * _GIB


def check_shared_memory(patient: Patient) -> Iterator[Finding]:
    """Check /dev/shm, through which NCCL and gloo pass data between ranks on a machine."""
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
    """Judge the size of /dev/shm. Pure."""
    needed = ranks * _SHM_PER_RANK
    words = f"{size(free)} free of {size(total)}"
    larger = "docker run --shm-size=16g (or --ipc=host); else remount it larger"
    facts = {"total": total, "free": free}
    if not writable:
        return fail("/dev/shm", "is not writable", "sudo chmod 1777 /dev/shm", **facts)
    if free < needed:
        return fail(
            "/dev/shm", f"{words}, and {ranks} ranks may need {size(needed)}", larger, **facts
        )
    if total < _ROOMY_SHM:
        return warn("/dev/shm", f"{words}, which is low", larger, **facts)
    return ok("/dev/shm", words, **facts)


def check_open_files(_: Patient) -> Iterator[Finding]:
    """Check RLIMIT_NOFILE."""
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    """Judge the limit of open files. Pure; -1 is unlimited."""
    facts = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES:
        return ok("open files", f"limit {_count(soft)}", **facts)
    enough = hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES
    advice = (
        f"ulimit -n {_count(hard) if hard > 0 else 65536} before fsdp-tui starts"
        if enough
        else "raise nofile in /etc/security/limits.conf (docker run --ulimit nofile=65536)"
    )
    verdict = fail if soft < _FEW_FILES else warn
    return verdict("open files", f"limit {soft} per process", advice, **facts)


def check_locked_memory(_: Patient) -> Iterator[Finding]:
    """Check RLIMIT_MEMLOCK, which matters for InfiniBand."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judge_locked_memory(soft, infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))


def judge_locked_memory(soft: int, *, infiniband: bool) -> Finding:
    """Judge the limit of locked memory. Pure; -1 is unlimited."""
    words = "no limit" if soft == resource.RLIM_INFINITY else f"limit {size(soft)}"
    if infiniband and soft != resource.RLIM_INFINITY:
        return warn(
            "locked memory",
            f"{words}, and InfiniBand locks all buffers it sends",
            "raise memlock in /etc/security/limits.conf (docker run --ulimit memlock=-1)",
            limit=soft,
        )
    note = "" if infiniband else "; only InfiniBand needs more, and there is none"
    return ok("locked memory", words + (note if soft >= 0 else ""), limit=soft)


def check_memory(_: Patient) -> Iterator[Finding]:
    """Check the free memory of the machine and of the container."""
    memory = psutil.virtual_memory()
    yield judge_memory(memory.available, memory.total, container_room())


def judge_memory(available: int, total: int, container: tuple[int, int] | None) -> Finding:
    """Judge free memory. Pure; `container` is the cgroup's remaining bytes and its limit."""
    facts = {"available": available, "total": total, "container": container}
    words = f"{size(available)} free of {size(total)}"
    left = available
    if container is not None:
        left = min(left, container[0])
        words += f"; the container may use {size(container[0])} more of {size(container[1])}"
    if left < _LITTLE_MEMORY:
        return fail(
            "memory", words, "stop other processes, or raise the container's limit", **facts
        )
    if left < _MODEST_MEMORY:
        return warn(
            "memory", words, "large text encoders may not fit while captions are encoded", **facts
        )
    return ok("memory", words, **facts)


def container_room() -> tuple[int, int] | None:
    """Return `(bytes left, limit)` of the tightest cgroup; None if none is below the machine's."""
    total = psutil.virtual_memory().total
    # Without a limit, cgroup v1 reports a number larger than any machine's memory.
    return min((room for room in memory_rooms() if room[1] < total), default=None)


def _count(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else str(number)
