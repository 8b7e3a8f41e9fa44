"""Build the model that a config describes, without weights."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.model.meta_device import NoInitialValues
from engine.start.lean_imports import hide
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# -- lean imports ---------------------------------------------------------------------------
# Import diffusers without the libraries that building a model never uses.
#
# Walking a model takes a tenth of a second, but importing all of diffusers takes nine seconds of
# processor time, since it imports peft, transformers, and torch's compiler. Without these, it takes
# two (diffusers 0.42, torch 2.13). A model that cannot be built this way is built in a process that
# imports everything.


# Optional for diffusers.
_OPTIONAL: Final = ("peft", "transformers", "torchao", "bitsandbytes")


def import_lean() -> None:
    """Make later imports in this process lean. Call before torch or diffusers are imported."""
    hide(*_OPTIONAL)
    # The imported modules only mark functions that must not be compiled, and nothing is compiled
    # here.
    _stand_in("torch._dynamo", disable=_identity, allow_in_graph=_identity)
    # The real module imports sympy, 33 MiB (torch 2.15), for kernels that a model without weights
    # never runs.
    _stand_in("torch.nn.attention.flex_attention", BlockMask=object, create_block_mask=_identity)


def _stand_in(name: str, **contents: Any) -> None:
    """Register a module with only these names in place of the real one."""
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(name, module)


def _identity(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return the decorated function unchanged, with or without decorator arguments."""
    return function if callable(function) else _identity


# -- build ----------------------------------------------------------------------------------


class CannotBuildError(UserError):
    """The config does not describe a model that can be built here."""


class NoSuchClassError(CannotBuildError):
    """No library has the class, even with full imports."""


@contextmanager
def on_meta() -> Iterator[None]:
    """Build models on the meta device in this context, including buffers, without values."""
    with torch.device("meta"), NoInitialValues():
        yield


def build(config: dict[str, Any], directory: Path) -> torch.nn.Module:
    """Build a model on the meta device, buffers included.

    Parameters shared by modules stay one object, as in the real model;
    `accelerate.init_empty_weights` would split them.

    Args:
        config: Config of a diffusers or transformers model.
        directory: The directory that contains it as config.json.

    Raises:
        CannotBuildError: There is no such class here, or it rejects the config.
    """
    try:
        with on_meta():
            if "_class_name" in config:
                return _build_diffusers(config)
            return _build_transformers(config, directory)
    except CannotBuildError:
        raise
    except Exception as error:  # constructors raise many exceptions for invalid configs
        name = config.get("_class_name") or config.get("model_type")
        words = " ".join(str(error).split())
        raise CannotBuildError(
            f"{name} cannot be built from its config ({type(error).__name__}: {words[:300]})",
            "check its values, or use the config of a published model",
        ) from error


def _build_diffusers(config: dict[str, Any]) -> torch.nn.Module:
    import diffusers
    from diffusers.models.modeling_utils import ModelMixin

    name = config["_class_name"]
    if isinstance(name, list):  # refers to a class in the repository itself
        name = name[-1]
    model_class: Any = getattr(diffusers, str(name), None)
    is_model = isinstance(model_class, type) and issubclass(model_class, ModelMixin)
    if not is_model:
        kind = CannotBuildError if hasattr(diffusers, str(name)) else NoSuchClassError
        raise kind(
            f"diffusers {diffusers.__version__} has no model class {name}",
            "check _class_name in config.json, or update diffusers",
        )
    model: torch.nn.Module = model_class.from_config(config)
    return model


def _build_transformers(config: dict[str, Any], directory: Path) -> torch.nn.Module:
    import transformers

    # Code that comes with a model is never run.
    settings = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    named = [getattr(transformers, str(name), None) for name in config.get("architectures") or ()]
    for model_class in named:
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            model: torch.nn.Module = model_class(settings)
            return model
    return transformers.AutoModel.from_config(settings, trust_remote_code=False)
