"""Build the stub library and write the file from which it plays.

GPUs are described as JSON would describe them: a list of objects with the keys of `gpu()`.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pynvml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GIB: Final = 2**30
LIBRARY: Final = "libnvidia-ml.so.1"
STATE_VARIABLE: Final = "NVML_STUB_STATE"
_SOURCES: Final = tuple(Path(__file__).with_name(name) for name in ("nvml_stub.c", "nvml_state.h"))
_UNKNOWN_MEMORY: Final = 2**64 - 1  # what the driver answers where it may not say
_CLOCKS: Final = {"clock": 1, "memory_clock": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_HOLDER: Final = """\
import mmap, os, signal
driver = mmap.mmap(os.open("libcuda.so.1", os.O_RDONLY), 0, prot=mmap.PROT_READ)
os.write(1, b"!")
signal.pause()
"""


class NoCompiler(RuntimeError):
    """There is no C compiler here, so there is no stub."""


def build(directory: Path) -> Path:
    """Compile the library into a folder of its own below `directory`, unless it is there already.

    Returns:
        The library; its folder holds nothing else, so it can stand in `LD_LIBRARY_PATH`.

    Raises:
        NoCompiler: No `cc` (or `$CC`) on this machine.
        subprocess.CalledProcessError: The compiler refused.
    """
    version = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:12]
    library = directory / f"nvml-stub-{version}" / LIBRARY
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoCompiler("no C compiler (cc) on this machine")
    library.parent.mkdir(parents=True, exist_ok=True)
    # No soname: once loaded by its path it must not answer to the name of the real library.
    unfinished = library.parent.parent / f"{library.parent.name}.{os.getpid()}"
    flags = ["-O1", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra"]
    subprocess.run(
        [compiler, *flags, str(_SOURCES[0]), "-o", str(unfinished)],
        check=True,
        capture_output=True,
        text=True,
    )
    os.replace(unfinished, library)
    return library


def gpu(index: int = 0, **values: Any) -> dict[str, Any]:
    """A GPU at rest, with some values replaced; None is what the driver does not say.

    Args:
        index: Its place in the driver's order.
        values: `uuid`, `name`, `pci` (`[domain, bus, device]`), `memory_total`, `memory_used`,
            `memory_reserved` (bytes), `utilisation` (percent), `temperature` (°C), `power`,
            `power_limit` (W), `clock`, `clock_limit`, `memory_clock` (MHz), `reasons` (bits of
            NVML's clock event reasons), `pcie` (`[generation, lanes, most lanes]`), `nvlinks`
            (`[links, links that are up]`), `processes` (`[{"pid", "memory", "kind"}]`), `mig_mode`,
            `mig` (`[{"uuid", "name", "gpu_instance", "compute_instance", "memory_total",
            "memory_used", "processes"}]`), `errors` (`{"nvmlDeviceGetName": "NOT_SUPPORTED"}`;
            `"*"` stands for every function).
    """
    facts: dict[str, Any] = {
        "uuid": uuid(index),
        "name": "NVIDIA H200",
        "pci": [0, 0x10 + 0x11 * index, 0],
        "memory_total": 143771 * 2**20,
        "memory_used": 0,
        "memory_reserved": 618 * 2**20,
        "utilisation": 0,
        "temperature": 31,
        "power": 76.5,
        "power_limit": 700,
        "clock": 345,
        "clock_limit": 1980,
        "memory_clock": 3201,
        "reasons": 1,
        "processes": [],
        "mig_mode": False,
        "mig": [],
        "pcie": None,
        "nvlinks": None,
        "errors": {},
    }
    unknown = set(values) - set(facts)
    if unknown:
        raise TypeError(f"the stub knows no {', '.join(sorted(unknown))}")
    return facts | values


def uuid(index: int, kind: str = "GPU") -> str:
    """A UUID that looks like a real one; the order of UUIDs says nothing about the index."""
    text = hashlib.md5(f"{kind}{index}".encode()).hexdigest()
    return f"{kind}-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class StubNvml:
    """GPUs that are played: `write` says which, `environment` shows them to a child process.

    The dynamic linker reads `LD_LIBRARY_PATH` when a process starts, so the environment works for
    new processes only. Inside the test's own process the `nvml` fixture points pynvml at the
    library instead.
    """

    def __init__(self, library: Path, state: Path) -> None:
        self.library = library
        self.state = state
        self.write()

    def write(
        self,
        gpus: int | Sequence[Mapping[str, Any]] = (),
        *,
        driver: str = "580.95.05",
        errors: Mapping[str, str] | None = None,
    ) -> None:
        """Play these GPUs from now on, also to processes that look already.

        Args:
            gpus: The GPUs in the driver's order, each with some keys of `gpu()`; or how many.
            driver: Its version.
            errors: Function → error for what concerns no single GPU,
                `{"nvmlInitWithFlags": "DRIVER_NOT_LOADED"}`.
        """
        played: Sequence[Mapping[str, Any]] = [{}] * gpus if isinstance(gpus, int) else gpus
        lines = [f"driver {driver}", *_errors(errors or {})]
        for index, values in enumerate(played):
            lines += _gpu_lines(gpu(index, **values))
        # Another file each time: the stub tells a new state from the old one by its inode.
        unfinished = self.state.with_name(f"{self.state.name}.{os.getpid()}")
        unfinished.write_text("\n".join(lines) + "\n")
        os.replace(unfinished, self.state)

    def write_shuffled(self, at: Mapping[int, Mapping[str, Any]] | None = None) -> list[str]:
        """Play eight GPUs that the driver lists in another order than they have on the bus.

        Args:
            at: Place on the bus → values that replace this GPU's own.

        Returns:
            Their UUIDs in bus order, which is not the order of the UUIDs either.
        """
        changes = at or {}
        self.write(
            [
                gpu(place, pci=[place // 4, 0x10 + place, 0], **changes.get(place, {}))
                for place in (5, 2, 7, 0, 3, 6, 1, 4)
            ]
        )
        return [uuid(place) for place in range(8)]

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with the stub in front of any real library."""
        inherited = os.environ.get("LD_LIBRARY_PATH")
        folders = [str(self.library.parent), *([inherited] if inherited else [])]
        return os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join(folders),
            STATE_VARIABLE: str(self.state),
        }


def start_holder(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """A process that looks as if it computed on a GPU: it maps a file called `libcuda.so.1`.

    Args:
        folder: Where it works, and finds that file and its script.
        words: Its command line after `python`: the name of the script, then anything.
    """
    script, *rest = words or ("train.py",)
    (folder / script).write_text(_HOLDER)
    (folder / "libcuda.so.1").write_bytes(b"\0" * 4096)
    process = subprocess.Popen(
        [sys.executable, script, *rest],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    return process


def busy(index: int, t: float) -> dict[str, Any]:
    """The values of a GPU that trains, at a time in seconds: plausible, and never quite still."""
    wave = math.sin(t / 3 + 1.7 * index)
    utilisation = min(100, round(96 + 4 * wave))
    power = 560 + 15 * index % 90 + 60 * wave
    return {
        "memory_used": round((96.4 + 2.3 * (index % 5)) * GIB),
        "utilisation": utilisation,
        "temperature": round(61 + 2 * (index % 4) + 2 * wave),
        "power": min(699.0, power),
        "clock": 1980 if power < 610 else 1860 + 15 * (index % 4),
        "reasons": 0 if power < 610 else 4,  # the power limit
    }


def _gpu_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield "gpu"
    yield from _part_lines(facts)
    if facts["pci"] is not None:
        yield "pci {:x} {:x} {:x}".format(*facts["pci"])
    if facts["utilisation"] is not None:
        yield f"utilisation {facts['utilisation']} {facts['utilisation'] // 2}"
    for key in ("temperature", "reasons"):
        if facts[key] is not None:
            yield f"{key} {facts[key]}"
    for key in ("power", "power_limit"):
        if facts[key] is not None:
            yield f"{key} {round(1000 * facts[key])}"
    for key in ("pcie", "nvlinks"):
        if facts[key] is not None:
            yield " ".join([key, *map(str, facts[key])])
    for key, number in _CLOCKS.items():
        if facts[key] is not None:
            yield f"clock {number} {facts[key]}"
    if facts["clock_limit"] is not None:
        yield f"top_clock {_CLOCKS['clock']} {facts['clock_limit']}"
    if facts["mig_mode"] is not None:
        yield f"mig_mode {int(facts['mig_mode'])}"
    yield from _errors(facts["errors"])
    for number, instance in enumerate(facts["mig"]):
        yield f"mig_instance {instance['gpu_instance']} {instance.get('compute_instance', 0)}"
        yield from _part_lines({"uuid": uuid(number, "MIG"), "processes": []} | instance)


def _part_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    for key in ("uuid", "name"):
        if facts.get(key) is not None:
            yield f"{key} {facts[key]}"
    if facts.get("memory_total") is not None and facts.get("memory_used") is not None:
        reserved = facts.get("memory_reserved", 0)
        yield f"memory {facts['memory_total']} {facts['memory_used']} {reserved}"
    for process in facts["processes"]:
        memory = process.get("memory")
        number = _UNKNOWN_MEMORY if memory is None else memory
        yield f"process {process.get('kind', 'compute')} {process['pid']} {number}"


def _errors(errors: Mapping[str, str]) -> Iterator[str]:
    for function, name in errors.items():
        yield f"error {function} {getattr(pynvml, f'NVML_ERROR_{name}')}"
