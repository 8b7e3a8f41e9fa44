"""The C compiler with which torch makes kernels while a job runs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import SpecError

if TYPE_CHECKING:
    from jobs.spec.job_spec import RecipeKeys

# Backends of torch.compile that only rearrange calls.
_WITHOUT: Final = ("eager", "aot_eager", "cudagraphs")


def check_compiler(spec: RecipeKeys, *, on_gpus: bool) -> None:
    """Look for what the job will compile with.

    Args:
        spec: The job.
        on_gpus: Whether its ranks compute on GPUs; kernels for CPUs are in C++.

    Raises:
        SpecError: The job compiles, and there is no compiler.
    """
    compiles = spec.torch_compile and spec.torch_compile_backend not in _WITHOUT
    # On the CPU it runs eagerly: see `engine.train.optimizer`.
    eight_bit = spec.optimizer == "adamw_8bit" and on_gpus and not spec.fsdp_cpu_offload
    if not (compiles or eight_bit):
        return
    if lack := what_lacks(on_gpus=on_gpus):
        key = "torch_compile" if compiles else "optimizer: adamw_8bit"
        raise SpecError(f"{key} compiles kernels at run time, but {lack}", hint(on_gpus=on_gpus))


def what_lacks(*, on_gpus: bool) -> str | None:
    """Name what compiling lacks; None if nothing.

    As Triton (3.7) and torch's Inductor (2.13) look for it: by CC or CXX, else by name.
    """
    variable, names = ("CC", ("gcc", "clang")) if on_gpus else ("CXX", ("g++",))
    if chosen := os.environ.get(variable):
        names = (chosen.split()[0],)
    if not any(shutil.which(name) for name in names):
        where = f"{variable}={chosen}" if chosen else "PATH"
        return f"there is no {' or '.join(names)} ({where})"
    headers = Path(sysconfig.get_paths()["include"])
    if on_gpus and not (headers / "Python.h").is_file():
        return f"there is no Python.h in {headers}"
    return None


def hint(*, on_gpus: bool) -> str:
    """Say how to install it."""
    packages = "gcc python3-dev" if on_gpus else "g++"
    return f"apt install {packages}, or the equivalent"
