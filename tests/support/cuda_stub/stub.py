"""Find a torch that was built for CUDA, and compile the stub for it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).resolve().parents[3]
LIBRARY: Final = "libcuda.so.1"
PYTHON_VARIABLE: Final = "FSDP_TUI_CUDA_PYTHON"  # an interpreter whose torch was built for CUDA
REQUIRED_VARIABLE: Final = "FSDP_TUI_CUDA_REQUIRED"  # fail where the stub cannot be had
_PLAYED: Final = "13."  # the CUDA whose structures and symbols the source knows
_HERE: Final = Path(__file__).parent
_SOURCES: Final = (
    *sorted(_HERE.glob("*.[ch]")),
    _HERE / "include/crt/host_defines.h",
    _HERE.parent / "nvml_stub/nvml_state.h",
)
# Without importing torch, which takes seconds: what version.py says, and where the headers are.
_ASK: Final = """\
import json, pathlib, re
from importlib.util import find_spec
torch = find_spec("torch")
folder = pathlib.Path(torch.origin).parent if torch else None
text = (folder / "version.py").read_text() if folder else ""
found = re.search(r"^cuda\\b.*= '([^']+)'", text, re.MULTILINE)
headers = sorted(folder.parent.glob("nvidia/*/include/driver_types.h")) if folder else []
print(json.dumps([found and found[1], str(headers[0].parent) if headers else None]))
"""


class Unavailable(RuntimeError):
    """There is no CUDA stub here; the message says why."""


@dataclass(frozen=True)
class CudaPython:
    """An interpreter whose torch was built for CUDA.

    Attributes:
        path: The interpreter.
        headers: Where its CUDA wheels keep `driver_types.h`.
    """

    path: Path
    headers: Path


def find_python() -> CudaPython:
    """This interpreter if its torch was built for CUDA, else the one that a variable names.

    Raises:
        Unavailable: Neither has one.
    """
    reasons = []
    for path in (sys.executable, os.environ.get(PYTHON_VARIABLE)):
        if not path:
            continue
        done = subprocess.run(
            [path, "-c", _ASK], capture_output=True, text=True, check=False, cwd=_HERE
        )
        if done.returncode:
            reasons.append(f"{path} does not run: {done.stderr.strip()[-200:]}")
            continue
        version, headers = json.loads(done.stdout)
        if version is None:
            reasons.append(f"{path} has no torch built for CUDA")
        elif not version.startswith(_PLAYED):
            reasons.append(f"the torch of {path} is built for CUDA {version}, not {_PLAYED}x")
        elif headers is None:
            reasons.append(f"{path} has no CUDA headers (the wheel nvidia-cuda-runtime)")
        else:
            return CudaPython(Path(path), Path(headers))
    raise Unavailable(f"{'; '.join(reasons)} ({PYTHON_VARIABLE} can name another interpreter)")


def build(directory: Path, python: CudaPython) -> Path:
    """Compile the library into a folder of its own below `directory`, unless it is there already.

    Raises:
        Unavailable: No `cc` (or `$CC`) on this machine.
        subprocess.CalledProcessError: The compiler refused.
    """
    content = b"".join(path.read_bytes() for path in _SOURCES) + bytes(python.headers)
    library = directory / f"cuda-stub-{hashlib.sha256(content).hexdigest()[:12]}" / LIBRARY
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Unavailable("no C compiler (cc) on this machine")
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.parent.parent / f"{library.parent.name}.{os.getpid()}"
    # Under its soname whoever asks for the driver gets this one, the real one is never loaded.
    flags = ["-O1", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-Wl,-soname,{LIBRARY}", f"-I{_HERE / 'include'}", "-isystem", str(python.headers)]
    subprocess.run(
        [compiler, *flags, str(_HERE / "cuda_stub.c"), "-o", str(unfinished), "-ldl"],
        check=True,
        capture_output=True,
        text=True,
    )
    os.replace(unfinished, library)
    return library


class StubCuda:
    """GPUs that compute nothing, for processes that are started in `environment`."""

    def __init__(self, library: Path, python: CudaPython) -> None:
        self.library = library
        self.python = str(python.path)

    def environment(
        self, inherited: Mapping[str, str], *, limit: int | None = None
    ) -> dict[str, str]:
        """Variables for a process of `python` that is to see the GPUs.

        Args:
            inherited: What it gets otherwise; the NVML stub's, so that both show the same GPUs.
            limit: Bytes of memory that each device has for a process; what NVML says if None.
        """
        kept = {k: v for k, v in inherited.items() if k not in _CONFUSING}
        first = [kept["LD_PRELOAD"]] if kept.get("LD_PRELOAD") else []
        path = [str(ROOT), *([kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [])]
        own = {
            "LD_PRELOAD": ":".join([*first, str(self.library)]),
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            # Torch 2.13 compiles some kernels by Triton, which looks for the real driver.
            "TORCH_DISABLE_NATIVE_JIT": "1",
            "TRITON_LIBCUDA_PATH": str(self.library.parent),
            "TRITON_CACHE_DIR": str(self.library.parent / "triton"),
        }
        return kept | own | ({} if limit is None else {"CUDA_STUB_BYTES": str(limit)})


# What a person's shell may say, and the rehearsal must not hear.
_CONFUSING: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "CUDA_STUB_BYTES",
        "CUDA_STUB_DEVICES",
        "LOCAL_RANK",
        "RANK",
        "WORLD_SIZE",
        "FSDP_TUI_CPU_JOBS",
    }
)
