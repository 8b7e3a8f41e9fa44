"""Keep the byte code of libraries for the next process where Python itself cannot.

Compiling what a rank imports takes about as long as importing it, 6 to 9 s of processor time, in
every rank of every job. This happens if packages were installed without byte code (as uv does) into
a read-only location, or if PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import os
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Final

from jobs.paths import cache_home

# Large libraries, and our own package.
_PACKAGES: Final = ("torch", "transformers", "diffusers", "engine")
_NEVER: Final = "PYTHONDONTWRITEBYTECODE"
_PLACE: Final = "PYTHONPYCACHEPREFIX"
VARIABLES: Final = (_NEVER, _PLACE)


def bytecode_variables() -> dict[str, str]:
    """Return environment variables with which our processes find byte code or cache it.

    Empty if Python itself finds or writes it. Otherwise it is cached below our cache directory.
    This respects PYTHONDONTWRITEBYTECODE, whose purpose is to keep source directories unchanged.
    """
    if all(_is_kept(package) for package in _PACKAGES):
        return {}
    # Python treats an empty variable like an unset one.
    return {_NEVER: "", _PLACE: str(cache_home() / "bytecode")}


def _is_kept(package: str) -> bool:
    """Return whether a package's byte code exists, or will once the package has been imported."""
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
