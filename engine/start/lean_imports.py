"""Import large libraries without paying more than once, and without what a process never uses.

A rank imports 3,500 modules. Python's collector of cycles walks all of that again and again while
it grows, in every full collection afterwards, and twice when the interpreter ends, though none of
it is garbage: 1.2 s of processor time, 0.3 s each time, and 1.3 s (Python 3.11, torch 2.13).
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

# What transformers, diffusers and peft import wherever it is installed, for models that are stored
# quantised. They have no variable that says otherwise (transformers 5.23, diffusers 0.42).
QUANTISERS: Final = ("torchao", "bitsandbytes")


@contextmanager
def uncollected() -> Iterator[None]:
    """Exempt objects made in this context from garbage collection; for imports at startup."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def hide(*packages: str) -> None:
    """Make packages look as if they were not installed, to all that is imported after this.

    `None` in `sys.modules` is Python's own word for it: `import` raises ModuleNotFoundError, and
    `importlib.util.find_spec`, by which libraries look for each other, returns None.
    """
    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def unneeded(spec: RecipeKeys) -> tuple[str, ...]:
    """Return the packages that a job's ranks can do without; they take half a second to import.

    Raises:
        UserError: There is no such model.
    """
    if spec.optimizer == "adamw_8bit":  # torchao's
        return ()
    model = find_model(spec.pretrained_model_name_or_path)
    parts = [read_json(path) or {} for path in model.glob("*/config.json")]
    return () if any(part.get("quantization_config") for part in parts) else QUANTISERS
