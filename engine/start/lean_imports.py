"""Import large libraries cheaply: without repeated garbage collection and unneeded packages.

A rank imports 3,500 modules. Python's cyclic garbage collector traverses their objects repeatedly
while they are loaded, in every full collection afterwards, and twice at exit, though none of it is
garbage: 1.2 s of processor time, 0.3 s each time, and 1.3 s (Python 3.11, torch 2.13).
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from jobs.models.find_model import find_model
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.spec.job_spec import RecipeKeys

# Packages that transformers, diffusers and peft import if installed, to load quantized models. They
# have no variable to disable that (transformers 5.23, diffusers 0.42).
QUANTISERS: Final = ("torchao", "bitsandbytes")


@contextmanager
def uncollected() -> Iterator[None]:
    """Exempt objects created in this context from garbage collection; for imports at startup."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def hide(*packages: str) -> None:
    """Make packages appear as not installed to all later imports.

    Python documents `None` in `sys.modules` for this: `import` raises ModuleNotFoundError, and
    `importlib.util.find_spec`, which libraries use to look for each other, returns None.
    """
    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def unneeded(spec: RecipeKeys) -> tuple[str, ...]:
    """Return the packages that a job's ranks do not need; importing them takes half a second.

    Raises:
        UserError: There is no such model.
    """
    if spec.optimizer == "adamw_8bit":  # from torchao
        return ()
    model = find_model(spec.pretrained_model_name_or_path)
    parts = [read_json(path) or {} for path in model.glob("*/config.json")]
    return () if any(part.get("quantization_config") for part in parts) else QUANTISERS
