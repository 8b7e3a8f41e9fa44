"""Environment variables that change what jobs do, and are easily forgotten."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

import jobs
from jobs.doctor.finding import Finding, fail, ok, warn
from jobs.launch.local import ALLOCATOR_VARIABLES, HOST_ALLOCATOR

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from jobs.doctor.patient import Patient

_OURS: Final = ("jobs", "tui", "engine")
_OF_OTHERS: Final = ("torch", "accelerate", "diffusers", "transformers", "peft", "numpy", "yaml")
_LIBRARIES: Final = ("libcuda.", "libcudart.", "libnccl.", "libcudnn", "libcublas", "libnvrtc.")
_OF_A_LAUNCHER: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OFF: Final = ("", "0", "false", "off", "no")


class _Rule(NamedTuple):
    """A variable that bites when it has certain values."""

    name: str
    bites: Callable[[str], bool]
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
# Shown when they are set, whatever they say, because they matter to whoever reads the report.
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
    """Names of this machine's network interfaces."""
    return list(psutil.net_if_addrs())


def judge_variables(environ: Mapping[str, str], interfaces: Collection[str]) -> Iterator[Finding]:
    """Report harmful variables, then the others; reads the directories they name."""
    bad = [
        warn(rule.name, f"is {_short(environ[rule.name])}, which {rule.what}", rule.advice)
        for rule in _RULES
        if rule.name in environ and rule.bites(environ[rule.name])
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
        if (name.startswith(_NOT_PASSED_ON) and name != "FSDP_TUI_HOME") or name in _OF_A_LAUNCHER
    )
    dropped = [name for name in dropped if not name.startswith("FSDP_TUI_")]
    if dropped:
        yield ok("not passed on", f"{', '.join(dropped)}: the job decides", names=dropped)
    if not bad and not shown and not dropped:
        yield ok("variables", "none set that affects jobs")


def _judge_interfaces(environ: Mapping[str, str], there: Collection[str]) -> Iterator[Finding]:
    """`NCCL_SOCKET_IFNAME` names beginnings (`=` exact names, `^` what to avoid), gloo's names."""
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
    """Directories in PYTHONPATH come before everything that is installed."""
    home = Path(jobs.__file__).resolve().parent.parent
    for entry in value.split(os.pathsep) if value else ():
        if not os.path.isdir(entry) or Path(entry).resolve() == home:
            continue
        hidden = [name for name in (*_OURS, *_OF_OTHERS) if PathFinder.find_spec(name, [entry])]
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
    """Directories in LD_LIBRARY_PATH come before the libraries that torch brings along."""
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
