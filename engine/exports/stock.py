"""An export as stock diffusers sees it: loaded by its own functions, into no memory to speak of."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer

from engine import weights
from engine.exports.components import INDEX, TRAINED, components_of
from engine.exports.readback import DamagedError
from jobs.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.exports.recipe import Recipe


def check_lora(recipe: Recipe, file: Path, layers: Mapping[str, torch.Tensor], model: Any) -> None:
    """Have the stock pipeline load a LoRA, and compare what it got.

    Args:
        recipe: What is exported.
        file: The LoRA.
        layers: What it is to hold, by diffusers' names without a prefix.
        model: The bare base model on the meta device; gets the adapter's modules.

    Raises:
        DamagedError: The pipeline refuses it, or understands it differently.
    """
    family, spec = recipe.family, recipe.spec
    pipeline_class = family.pipeline_class()
    with _quiet():
        try:
            read = pipeline_class.lora_state_dict(file.parent, weight_name=file.name)
            pipeline = _pipeline(recipe, recipe.root, model, only_it=True)
            pipeline.load_lora_weights(file.parent, weight_name=file.name)
        except Exception as error:  # whatever the libraries raise, it is no export
            raise DamagedError(f"stock diffusers does not load {file.name}: {error}") from error
    prefix = f"{pipeline_class.transformer_name}."
    for name, tensor in layers.items():
        got = read.get(prefix + name)
        if got is None or not torch.equal(got, tensor.to(got.dtype)):
            raise DamagedError(f"stock diffusers reads {name} of {file.name} differently")
    (adapter,) = model.peft_config
    shapes = {n: t.shape for n, t in get_peft_model_state_dict(model, adapter_name=adapter).items()}
    if shapes != {name: tensor.shape for name, tensor in layers.items()}:
        raise DamagedError(f"stock diffusers puts the adapter of {file.name} into other modules")
    scale = (spec.lora_alpha or spec.lora_rank) / spec.lora_rank
    for module in model.modules():
        if isinstance(module, LoraLayer) and module.scaling[adapter] != scale:
            raise DamagedError(f"stock diffusers scales the adapter of {file.name} differently")


def check_model(recipe: Recipe, directory: Path) -> None:
    """Build the class from what was written, and have the stock pipeline read the rest.

    Only what has no weights is loaded: schedulers and tokenizers. The other components are the
    base model's own files.

    Raises:
        DamagedError: A file does not fit the others.
    """
    try:
        with _quiet():
            # Compares names and shapes with what the written config.json asks for.
            model, _ = weights.build_on_meta(
                recipe.family.transformer_class(), directory / TRAINED, recipe.spec
            )
            _pipeline(recipe, directory, model)
    except Exception as error:  # whatever the libraries raise, it is no export
        raise DamagedError(f"stock diffusers does not load the export: {error}") from error


def _pipeline(recipe: Recipe, root: Path, transformer: Any, *, only_it: bool = False) -> Any:
    """The stock pipeline around a transformer, with nothing else that has weights, or nothing."""
    absent: dict[str, Any] = {
        name: None
        for name in components_of(read_json(root / INDEX) or {})
        if only_it or any((root / name).glob("*.safetensors"))
    }
    return recipe.family.pipeline_class().from_pretrained(
        root, **absent | {TRAINED: transformer}, local_files_only=True
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' bars and advice."""
    from diffusers.utils import logging as diffusers_logging

    before = diffusers_logging.get_verbosity()
    bars = diffusers_logging.is_progress_bar_enabled()
    diffusers_logging.set_verbosity(logging.ERROR)
    diffusers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(before)
        if bars:
            diffusers_logging.enable_progress_bar()
