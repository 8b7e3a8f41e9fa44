"""Byte code of libraries: kept for the next process, wherever Python may not keep it by itself.

Compiling what a rank imports takes about as long as importing it, 6 to 9 s of processor time, and
each rank of each job would: where packages were installed without byte code (as uv does) in a place
that the person may not write to, and where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import os
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Final

from jobs.paths import cache_home

# Large ones, and our own.
_PACKAGES: Final = ("torch", "transformers", "diffusers", "engine")
_NEVER: Final = "PYTHONDONTWRITEBYTECODE"
_PLACE: Final = "PYTHONPYCACHEPREFIX"
VARIABLES: Final = (_NEVER, _PLACE)


def bytecode_variables() -> dict[str, str]:
    """Environment variables with which a process of ours finds byte code, or leaves it for others.

    Empty where Python finds or leaves it by itself. Else it is kept below our cache directory:
    PYTHONDONTWRITEBYTECODE is about what lies beside the sources, and nothing is written there.
    """
    if all(_is_kept(package) for package in _PACKAGES):
        return {}
    # An empty one is as good as none.
    return {_NEVER: "", _PLACE: str(cache_home() / "bytecode")}


def _is_kept(package: str) -> bool:
    """Whether a package's byte code is there, or will be when the package was imported once."""
    module = find_spec(package)
    if module is None or not module.origin:
        return True
    compiled = Path(cache_from_source(module.origin))
    if compiled.exists():
        return True
    return not os.environ.get(_NEVER) and _may_create(compiled.parent)


def _may_create(directory: Path) -> bool:
    there = next(place for place in (directory, *directory.parents) if place.exists())
    return os.access(there, os.W_OK | os.X_OK)
