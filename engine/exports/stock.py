"""An export as stock diffusers sees it: loaded by its own functions, into no memory to speak of."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from peft.utils import load_peft_weights
from safetensors.torch import load_file
from transformers.utils import DummyObject, is_torchvision_available

from engine.exports.components import INDEX, components_of
from engine.exports.readback import DamagedError
from engine.model.adapters import text_lora
from engine.model.files import weights
from engine.model.meta_device import parameters_on_meta
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from engine.exports.recipe import Recipe


PEFT_PREFIX: Final = "base_model.model."
"""What the names in a LoRA file of peft's own begin with."""


def loads_loras(pipeline_class: Any) -> bool:
    """Whether a stock pipeline has functions for LoRAs; for others there is peft itself."""
    return hasattr(pipeline_class, "load_lora_weights")


def check_lora(
    recipe: Recipe,
    file: Path,
    layers: Mapping[str, torch.Tensor],
    modules: Collection[str],
    model: Any,
    texts: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
) -> None:
    """Have the stock pipeline load a LoRA, or else peft, and compare what it got.

    Args:
        recipe: What is exported.
        file: The LoRA.
        layers: What it is to hold, by diffusers' names without a prefix.
        modules: The adapted modules, also of text encoders; nothing is to scale their products.
        model: The bare base model on the meta device; gets the adapter's modules.
        texts: What it is to hold for each text encoder.

    Raises:
        DamagedError: The pipeline refuses it, or understands it differently.
    """
    stock = "stock diffusers"
    if not loads_loras(recipe.family.pipeline_class()):
        stock = "peft"
    encoders: dict[str, Any] = text_lora.on_meta(recipe.family, recipe.root) if texts else {}
    with _quiet():
        try:
            if stock == "peft":
                read = _load_by_peft(recipe, file, model)
            else:
                read = _load_by_diffusers(recipe, file, model, encoders)
        except Exception as error:  # whatever the libraries raise, it is no export
            raise DamagedError(f"{stock} does not load {file.name}: {error}") from error
    whole = dict(layers)
    for part, own in texts.items():
        whole |= {f"{part}.{name}": tensor for name, tensor in own.items()}
    for name, tensor in whole.items():
        got = read.get(name)
        if got is None or not torch.equal(got, tensor.to(got.dtype)):
            raise DamagedError(f"{stock} reads {name} of {file.name} differently")
    for part, own in texts.items():
        _check_encoder(part, encoders[part], own, file)
    (adapter,) = model.peft_config
    added = re.compile(recipe.family.LORA_FILLED_UP or r"(?!)")
    shapes = {
        name: tensor.shape
        for name, tensor in get_peft_model_state_dict(model, adapter_name=adapter).items()
        if name in layers or not added.match(name)
    }
    if shapes != {name: tensor.shape for name, tensor in layers.items()}:
        raise DamagedError(f"{stock} applies the adapter of {file.name} to other modules")
    for name, module in model.named_modules():
        layer = isinstance(module, (LoraLayer, LoKrLayer))
        if not layer or (name not in modules and added.match(name)):
            continue
        if module.scaling[adapter] != 1:
            raise DamagedError(f"{stock} scales the adapter of {file.name} differently")


def _check_encoder(
    part: str,
    encoder: Any,
    layers: Mapping[str, torch.Tensor],
    file: Path,
) -> None:
    """Compare a text encoder that a LoRA was loaded into.

    Raises:
        DamagedError: It has other adapters.
    """
    (adapter,) = encoder.peft_config
    adapted = text_lora.AdaptedEncoder(encoder)
    modules = {n: m for n, m in adapted.named_modules() if isinstance(m, LoraLayer)}
    shapes = {}
    for name, module in modules.items():
        shapes[f"{name}.lora_A.weight"] = module.lora_A[adapter].weight.shape
        shapes[f"{name}.lora_B.weight"] = module.lora_B[adapter].weight.shape
    if shapes != {name: tensor.shape for name, tensor in layers.items()}:
        raise DamagedError(f"stock diffusers applies {part} of {file.name} to other modules")
    if any(module.scaling[adapter] != 1 for module in modules.values()):
        raise DamagedError(f"stock diffusers scales {part} of {file.name} differently")


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
                recipe.family.transformer_class(), directory / recipe.family.component, recipe.spec
            )
            _pipeline(recipe, directory, model)
    except Exception as error:  # whatever the libraries raise, it is no export
        raise DamagedError(f"stock diffusers does not load the export: {error}") from error


def _load_by_diffusers(
    recipe: Recipe, file: Path, model: Any, encoders: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Load a LoRA around a model; what was read, by the names in it.

    Args:
        recipe: What is exported.
        file: The LoRA.
        model: The base model.
        encoders: The text encoders that it is for too, by their names in the pipeline.
    """
    family = recipe.family
    if recipe.spec.lora_variant == "lokr":  # most pipelines have no names for it, all models do
        model.load_lora_adapter(
            file.parent,
            weight_name=file.name,
            prefix=family.lora_prefix,
            low_cpu_mem_usage=True,
        )
        return _without_prefix(load_file(file), f"{family.lora_prefix}.")
    pipeline_class = family.pipeline_class()
    read = pipeline_class.lora_state_dict(file.parent, weight_name=file.name)
    if isinstance(read, tuple):  # those of UNets give alphas besides, of kohya's files
        read = read[0]
    pipeline = _pipeline(recipe, recipe.root, model, only_it=True)
    pipeline.register_modules(**encoders)
    if family.second_denoiser is not None:  # of two, diffusers looks at both
        model_class = family.transformer_class()
        with parameters_on_meta():
            other = model_class.from_config(
                model_class.load_config(recipe.root / family.second_denoiser)
            )
        pipeline.register_modules(**{family.second_denoiser: other})
    pipeline.load_lora_weights(file.parent, weight_name=file.name, **family.lora_options())
    texts = {name: t for name, t in read.items() if name.partition(".")[0] in encoders}
    return _without_prefix(read, f"{family.lora_prefix}.") | texts


def _load_by_peft(recipe: Recipe, file: Path, model: Any) -> dict[str, torch.Tensor]:
    """Load an adapter by peft where pipelines cannot load it, and return its tensors."""
    PeftModel.from_pretrained(model, file.parent, low_cpu_mem_usage=True)
    return _without_prefix(load_peft_weights(str(file.parent), device="cpu"), PEFT_PREFIX)


def _without_prefix(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _pipeline(recipe: Recipe, root: Path, transformer: Any, *, only_it: bool = False) -> Any:
    """Build the stock pipeline around a transformer, without other weights (or any other part)."""
    index = read_json(root / INDEX) or {}
    absent: dict[str, Any] = {
        name: None
        for name in components_of(index)
        if only_it or any((root / name).glob("*.safetensors")) or _is_missing_here(*index[name])
    }
    return recipe.family.pipeline_class().from_pretrained(
        root, **absent | {recipe.family.component: transformer}, local_files_only=True
    )


def _is_missing_here(library: str, class_name: str) -> bool:
    """Whether a class wants a library that training does not: those processors, torchvision.

    Transformers has an empty class in the place of FLUX.2's then; Qwen-Image-Edit's cannot be made.
    """
    processor = getattr(transformers, class_name, None) if library == "transformers" else None
    if processor is None or isinstance(processor, DummyObject):
        return processor is not None
    processes_videos = issubclass(processor, transformers.ProcessorMixin) and (
        "video_processor" in signature(processor.__init__).parameters
    )
    return processes_videos and not is_torchvision_available()


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
