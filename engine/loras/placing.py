"""Find the weights of a model that a LoRA changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from engine import families
from engine.loras.kinds import SECOND, expert_of, families_of, is_second
from engine.loras.lora_file import TEXT
from engine.model.adapters.lora_file import Layer, naming_of_texts
from engine.model.adapters.training_adapter import any_naming
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.loras.lora_file import LoraFile, Parts
    from engine.loras.models import Component, Model, Place

_NAMED: Final = 3  # modules to list in an error


class Source(Protocol):
    """A source of adapters: a LoRA file, or one converted to other names."""

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        ...

    def shapes(self, module: str) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a module's adapter by part."""
        ...

    def read(self, module: str) -> Parts:
        """Return a module's adapter, scaled."""
        ...


@dataclass(frozen=True)
class Update:
    """An adapter that changes a layer.

    Attributes:
        source: The source of the adapter.
        module: Its name in the source.
        rows: For each output of the adapter, the layer's row that it changes, or -1 if it belongs
            to another layer; `(out of the adapter,)`.
        weight: The factor of the update.
    """

    source: Source
    module: str
    rows: torch.Tensor
    weight: float


class Converted:
    """A LoRA with diffusers' names, converted to the authors' names and held in memory.

    Args:
        file: The LoRA.
        modules: Names in diffusers of the modules to convert, by their names in the file.
        family: The model's family.
    """

    def __init__(self, file: LoraFile, modules: Mapping[str, str], family: str) -> None:
        self.path = file.path
        style = families.load(family).COMFYUI
        assert style is not None
        layers: dict[str, torch.Tensor] = {}
        for module, name in modules.items():
            parts = file.read(module)
            layers[f"{name}.lora_A.weight"] = parts["down"]
            layers[f"{name}.lora_B.weight"] = parts["up"]
        self._tensors = style.convert(layers)
        self.modules = [
            name.removesuffix(".lora_A.weight")
            for name in self._tensors
            if name.endswith(".lora_A.weight")
        ]

    def equals(self, other: Converted) -> bool:
        """Return whether another family's conversion is the same."""
        mine, theirs = self._tensors, other._tensors
        return mine.keys() == theirs.keys() and all(
            torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
        )

    def shapes(self, module: str) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a module's adapter by part."""
        return {part: tuple(tensor.shape) for part, tensor in self.read(module).items()}

    def read(self, module: str) -> Parts:
        """Return a module's adapter."""
        return {
            "down": self._tensors[f"{module}.lora_A.weight"],
            "up": self._tensors[f"{module}.lora_B.weight"],
        }


def updates_of(
    file: LoraFile, weight: float, model: Model, component: str | None
) -> dict[str, dict[str, list[Update]]]:
    """Return the updates that a file makes, by component and tensor name.

    Raises:
        UserError: A module of the file matches no layer, or has another size.
    """
    possible = families_of(file.modules, file.header)
    if possible and model.family and model.family not in possible:
        raise UserError(
            f"{file.path.name} is for {' or '.join(sorted(possible))}, and the model is "
            f"{model.family}"
        )
    texts = {module: parts for module, parts in file.modules.items() if module.startswith(TEXT)}
    others = {module: parts for module, parts in file.modules.items() if module not in texts}
    updates: dict[str, dict[str, list[Update]]] = {}
    of_denoisers = _by_denoiser(file, others, model, component) if others else {}
    for name, modules in of_denoisers.items():
        updates[name] = _of_denoiser(file, modules, weight, model, model.components[name])
    if texts:
        _of_texts(file, texts, weight, model, updates)
    return updates


def _by_denoiser(
    file: LoraFile, modules: Mapping[str, Any], model: Model, component: str | None
) -> dict[str, dict[str, str]]:
    """Return, per denoiser, the modules for it and their names for a model with one denoiser.

    Raises:
        UserError: The model has two denoisers, and the file does not say which one it is for.
    """
    names = model.denoisers
    if component is not None and component not in names:
        raise UserError(
            f"the model has no {component}", f"it has {' and '.join(filter(None, names)) or 'one'}"
        )
    second = {m: m.replace(f"{SECOND}.", "transformer.", 1) for m in modules if is_second(m)}
    if component is not None or len(names) == 1:
        if second and len(second) < len(modules) and len(names) == 1:
            raise UserError(f"{file.path.name} is for two denoisers, and the model has one")
        return {component or names[0]: {m: second.get(m, m) for m in modules}}
    if second:
        first = {m: m for m in modules if m not in second}
        return {SECOND: second} | ({"transformer": first} if first else {})
    if (own := expert_of(file.header)) in names:
        return {own: {m: m for m in modules}}
    raise UserError(
        f"the model has two denoisers, and {file.path.name} does not say which one it is for",
        "--component transformer is for high noise, --component transformer_2 for low",
    )


def _of_denoiser(
    file: LoraFile,
    modules: Mapping[str, str],
    weight: float,
    model: Model,
    component: Component,
) -> dict[str, list[Update]]:
    """Return the updates that a file makes to a denoiser, by tensor name.

    Args:
        file: The LoRA.
        modules: Its modules for this denoiser, with their names for a model with one.
        weight: The factor of the update.
        model: The model.
        component: Its denoiser.
    """
    own = {name: module for module, name in modules.items()}
    layers = _layers(component.layers)
    family = None
    if model.family is not None and not component.original:
        family = families.load(model.family)
    named = any_naming(own, layers, family)
    if missing := sorted(own.keys() - named.keys()):
        if component.original and file.style == "diffusers" and not file.is_lokr:
            return _of_converted(file, modules, weight, model, component)
        raise _unknown(file, [own[name] for name in missing], model)
    rows = {module: named[name] for name, module in own.items()}
    return _spread(file, rows, weight, layers, component.layers)


def _of_converted(
    file: LoraFile,
    modules: Mapping[str, str],
    weight: float,
    model: Model,
    component: Component,
) -> dict[str, list[Update]]:
    """Return the updates if the model has its authors' layers, and the file diffusers' names.

    Raises:
        UserError: No family that the file can be for has such layers.
    """
    if file.is_dora:
        raise UserError(
            f"{file.path.name} is a DoRA with diffusers' names, and {model.root} has its authors'",
            "merge the file with ComfyUI's or kohya's names",
        )
    prefixes = ("transformer.", "unet.")
    inner = {m: n[len(p) :] for m, n in modules.items() for p in prefixes if n.startswith(p)}
    layers, missing = _layers(component.layers), sorted(modules)
    fitting: dict[str, Converted] = {}
    for family in sorted(families_of(file.modules, file.header)):
        if families.load(family).COMFYUI is None or len(inner) < len(modules):
            continue
        try:
            converted = Converted(file, inner, family)
        except UserError:
            continue
        named = any_naming(dict.fromkeys(converted.modules), layers, None)
        missing = sorted(set(converted.modules) - named.keys())
        if not missing:
            fitting[family] = converted
    if not fitting:
        raise _unknown(file, missing, model)
    first, *others = fitting.values()
    if not all(first.equals(other) for other in others):  # families may order halves differently
        raise UserError(
            f"{file.path.name} can be for {' or '.join(fitting)}, which is not the same here",
            "merge the file with ComfyUI's or kohya's names",
        )
    named = any_naming(dict.fromkeys(first.modules), layers, None)
    rows = {module: named[module] for module in first.modules}
    return _spread(first, rows, weight, layers, component.layers)


def _of_texts(
    file: LoraFile,
    texts: Mapping[str, Any],
    weight: float,
    model: Model,
    updates: dict[str, dict[str, list[Update]]],
) -> None:
    """Add the updates that a file makes to text encoders.

    Raises:
        UserError: The model has no text encoders here, or not these layers.
    """
    places = model.texts
    if not places:
        raise UserError(
            f"{file.path.name} also changes text encoders, and {model.root} is merged without them",
            "merge it --into a diffusers directory of the model",
        )
    whole = {layer: place for layer, (_, place) in places.items()}
    layers = _layers(whole)
    named: dict[str, torch.Tensor] = {}
    if model.family is not None:
        named = naming_of_texts(texts, layers, families.load(model.family))
    if missing := sorted(texts.keys() - named.keys()):
        raise _unknown(file, missing, model)
    for module in texts:
        by_tensor = _spread(file, {module: named[module]}, weight, layers, whole)
        owner = torch.bucketize(named[module][:1], _firsts(layers), right=True) - 1
        component, _ = places[list(layers)[int(owner)]]
        for name, some in by_tensor.items():
            updates.setdefault(component, {}).setdefault(name, []).extend(some)


def _firsts(layers: Mapping[str, Layer]) -> torch.Tensor:
    return torch.tensor([layer.first for layer in layers.values()])


def _layers(stored: Mapping[str, Place]) -> dict[str, Layer]:
    """Return a model's layers with their sizes and row numbers, as input for matching names."""
    layers: dict[str, Layer] = {}
    first = 1
    for name, place in stored.items():
        parts: Any = {
            "down": torch.empty(0, *place.shape[1:]),
            "up": torch.empty(place.shape[0], 0),
        }
        layers[name] = Layer(parts, 1.0, first)
        first += place.shape[0]
    return layers


def _spread(
    source: Source,
    modules: Mapping[str, torch.Tensor],
    weight: float,
    layers: Mapping[str, Layer],
    stored: Mapping[str, Place],
) -> dict[str, list[Update]]:
    """Return the adapters that change each tensor, by the tensor's name in the files.

    Args:
        source: The source of the adapters.
        modules: The rows of the model's layers that each module changes.
        weight: The factor of the updates.
        layers: The model's layers.
        stored: Locations of their weights.

    Raises:
        UserError: A module has another size than the layers that it changes.
    """
    updates: dict[str, list[Update]] = {}
    names = list(layers)
    for module, rows in modules.items():
        _check_size(source, module, rows, stored, layers)
        owners = torch.bucketize(rows, _firsts(layers), right=True) - 1
        for owner in owners[rows > 0].unique().tolist():
            place = stored[names[owner]]
            first = layers[names[owner]].first - place.first
            own = torch.where(owners == owner, rows - first, -1)
            updates.setdefault(place.tensor.name, []).append(Update(source, module, own, weight))
    return updates


def _check_size(
    source: Source,
    module: str,
    rows: torch.Tensor,
    stored: Mapping[str, Place],
    layers: Mapping[str, Layer],
) -> None:
    """Compare an adapter's sizes with those of the layers that it changes.

    Raises:
        UserError: The sizes differ (a 1x1 convolution matches a linear layer), or the adapter
            changes a part of a fused layer that the model does not have.
    """
    names = list(layers)
    owners = (torch.bucketize(rows, _firsts(layers), right=True) - 1)[rows > 0].unique().tolist()
    inputs = {math.prod(stored[names[owner]].shape[1:]) for owner in owners}
    shapes = source.shapes(module)
    if "down" in shapes:
        ours = shapes["up"][0], math.prod(shapes["down"][1:])
        fits = math.prod(shapes["up"][1:]) == shapes["down"][0]
    else:
        left = shapes.get("lokr_w1") or (shapes["lokr_w1_a"][0], shapes["lokr_w1_b"][1])
        right = shapes.get("lokr_w2")
        right = right or (shapes["lokr_w2_a"][0], *shapes["lokr_w2_b"][1:])
        ours, fits = (left[0] * right[0], left[1] * math.prod(right[1:])), True
    if not fits or inputs != {ours[1]} or len(rows) != ours[0]:
        raise UserError(f"{source.path.name}: {module} has another size than the model's layer")
    if (rows == 0).any() and "up" in shapes and source.read(module)["up"][rows == 0].any():
        raise UserError(f"{source.path.name}: {module} changes a part that the model does not have")


def _unknown(file: LoraFile, modules: list[str], model: Model) -> UserError:
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    return UserError(
        f"{file.path.name} changes {', '.join(modules[:_NAMED])}{more}, which {model.root} does "
        "not have"
    )
