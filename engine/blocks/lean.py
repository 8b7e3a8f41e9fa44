"""Import diffusers without what building a model never uses.

Looking at a model takes a tenth of a second, importing diffusers whole nine seconds of processor
time: it pulls in peft, transformers, and torch's compiler. Without them, two (diffusers 0.42,
torch 2.13). A model that cannot be built so is built in a process that imports everything.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

from engine.start.lean_imports import hide

# Optional for diffusers.
_OPTIONAL: Final = ("peft", "transformers", "torchao", "bitsandbytes")


def import_lean() -> None:
    """Make the rest of this process import lean; before torch or diffusers are imported."""
    hide(*_OPTIONAL)
    # Modules that are imported only name functions that must not be compiled, of which there are
    # none here.
    _stand_in("torch._dynamo", disable=_as_it_is, allow_in_graph=_as_it_is)
    # Imports sympy, 33 MiB (torch 2.15), for kernels that a model without weights never runs.
    _stand_in("torch.nn.attention.flex_attention", BlockMask=object, create_block_mask=_as_it_is)


def _stand_in(name: str, **contents: Any) -> None:
    """Put a module with only these names where the real one would be imported."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(name, module)


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Decorate nothing, with or without arguments."""
    return function if callable(function) else _as_it_is
