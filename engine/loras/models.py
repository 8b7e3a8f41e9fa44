"""Locate the weights of the models that LoRAs are merged into or extracted from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.exports.stock import read_index
from engine.model.files.weight_files import read_header, stored_tensors
from jobs.errors import UserError
from jobs.models.find_model import index_of
from jobs.paths import expand
from jobs.run.rundir import read_json
from jobs.spec.families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    import torch

    from engine.model.files.weight_files import StoredTensor

# Prefixes of a denoiser's weights in files that use its authors' layout.
_PREFIXES: Final = ("model.diffusion_model.", "diffusion_model.")
_SECOND: Final = "transformer_2"
# Tensor name prefixes that identify checkpoints which include their text encoders.
_CHECKPOINTS: Final = {
    "conditioner.embedders.1.model.": "sdxl",
    "cond_stage_model.transformer.text_model.": "stable_diffusion",
}
_CLIP: Final = re.compile(
    r"(?:conditioner\.embedders\.0|cond_stage_model)\.transformer\.(text_model\..+)\.weight"
)
_OPEN_CLIP: Final = re.compile(
    r"conditioner\.embedders\.1\.model\.transformer\.resblocks\.(\d+)\.(.+_weight|.+\.weight)"
)
_OPEN_LAYERS: Final = {
    "attn.out_proj.weight": "self_attn.out_proj",
    "mlp.c_fc.weight": "mlp.fc1",
    "mlp.c_proj.weight": "mlp.fc2",
}


@dataclass(frozen=True)
class Place:
    """Location of a layer's weight: a tensor of the model, or some of its rows.

    Attributes:
        tensor: The tensor.
        first: The first row that belongs to the layer.
        rows: The number of rows; None for all.
    """

    tensor: StoredTensor
    first: int = 0
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the layer's weight."""
        whole = self.tensor.shape
        return whole if self.rows is None else (self.rows, *whole[1:])

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the layer's rows of the full tensor."""
        return whole if self.rows is None else whole[self.first : self.first + self.rows]


@dataclass(frozen=True)
class Component:
    """A network of a model.

    Attributes:
        name: Its name in the pipeline; "" for a single-file model.
        directory: The directory of its files.
        tensors: Location of each tensor by its name in the files.
        prefix: Prefix of its tensor names in the files.
        original: Whether the names are the authors' rather than diffusers'.
    """

    name: str
    directory: Path
    tensors: Mapping[str, StoredTensor]
    prefix: str = ""
    original: bool = False

    @property
    def layers(self) -> dict[str, Place]:
        """Return the weights that adapters can change, by layer; this includes embeddings."""
        return {
            name.removeprefix(self.prefix).removesuffix(".weight"): Place(place)
            for name, place in self.tensors.items()
            if name.startswith(self.prefix)
            and name.endswith(".weight")
            and len(place.shape) in (2, 4, 5)
        }

    @property
    def lora_prefix(self) -> str:
        """Return the prefix of LoRA module names; in diffusers, all transformers share one."""
        if self.original:
            return "diffusion_model."
        return "transformer." if self.name in ("", _SECOND) else f"{self.name}."


@dataclass(frozen=True)
class Model:
    """A model on disk: a pipeline, a component of one, or a single file.

    Attributes:
        root: The directory or file.
        family: The family's name; None if unknown.
        components: Its denoisers, and the text encoders that a LoRA can be for.
        index: The pipeline's index; None for other models.
    """

    root: Path
    family: str | None
    components: Mapping[str, Component]
    index: Mapping[str, Any] | None = None

    @property
    def denoisers(self) -> list[str]:
        return [name for name in self.components if not name.startswith("text_encoder")]

    @property
    def texts(self) -> dict[str, tuple[str, Place]]:
        """Return component and weight of text encoder layers, by diffusers' LoRA module names."""
        if self.root.is_file():
            (name,) = self.components
            return {layer: (name, p) for layer, p in _texts(self.components[name].tensors).items()}
        layers = {}
        for name, component in self.components.items():
            if name.startswith("text_encoder"):
                for layer, place in component.layers.items():
                    inner = layer if layer.startswith("text_model.") else f"text_model.{layer}"
                    layers[f"{name}.{inner}"] = name, place
        return layers


def open_model(place: str) -> Model:
    """Open a model, reading only headers.

    Args:
        place: A pipeline's directory, that of its denoiser, or a safetensors file.

    Raises:
        UserError: There is no such model, it is damaged, or the files hold several.
    """
    root = expand(place)
    if root.is_file():
        return _of_file(root)
    if not root.is_dir():
        raise UserError(f"there is no model at {place}")
    if index_of(root) is not None:
        return _of_pipeline(root)
    tensors = _checked(stored_tensors(root))
    if not _class_of(root):
        return Model(root, None, {"": Component("", root, tensors, _prefix(tensors), True)})
    name = "unet" if _class_of(root).startswith("UNet") else ""
    name = _SECOND if root.name == _SECOND else name
    return Model(root, _family_of_component(root), {name: Component(name, root, tensors)})


def _of_pipeline(root: Path) -> Model:
    index = read_index(root)
    family = next(
        (f for f in FAMILIES.values() if index.get("_class_name") in f.pipelines),
        None,
    )
    names = [name for name in ("transformer", "unet", _SECOND) if _has(root, index, name)]
    if not names:
        raise UserError(f"{root} has no transformer or unet")
    if family is not None:
        names += [name for name in family.text_lora if _has(root, index, name)]
    components = {
        name: Component(name, root / name, _checked(stored_tensors(root / name))) for name in names
    }
    return Model(root, family.name if family else None, components, index)


def _has(root: Path, index: Mapping[str, Any], name: str) -> bool:
    listed = index.get(name)
    return isinstance(listed, list) and bool(listed[0]) and (root / name).is_dir()


def _of_file(file: Path) -> Model:
    if not file.stat().st_size:
        raise UserError(f"{file} is empty")
    tensors = _checked({tensor.name: tensor for tensor in read_header(file)})
    prefix = _prefix(tensors)
    component = _class_of(file.parent) if not prefix else ""
    name = "unet" if component.startswith("UNet") else ""
    only = Component(name, file.parent, tensors, prefix, original=not component)
    family = next(
        (f for p, f in _CHECKPOINTS.items() if any(n.startswith(p) for n in tensors)), None
    )
    if component:
        family = _family_of_component(file.parent)
    return Model(file, family, {name: only})


def _texts(tensors: Mapping[str, StoredTensor]) -> dict[str, Place]:
    """Return the text encoder layers of a single-file checkpoint.

    SDXL's second encoder has its authors' layers, in which query, key and value are fused.
    """
    layers: dict[str, Place] = {}
    for name, tensor in tensors.items():
        if (match := _CLIP.fullmatch(name)) and len(tensor.shape) == 2:
            layers[f"text_encoder.{match[1]}"] = Place(tensor)
        elif match := _OPEN_CLIP.fullmatch(name):
            block = f"text_encoder_2.text_model.encoder.layers.{match[1]}"
            if match[2] == "attn.in_proj_weight":
                rows = tensor.shape[0] // 3
                for number, part in enumerate("qkv"):
                    place = Place(tensor, number * rows, rows)
                    layers[f"{block}.self_attn.{part}_proj"] = place
            elif match[2] in _OPEN_LAYERS:
                layers[f"{block}.{_OPEN_LAYERS[match[2]]}"] = Place(tensor)
    return layers


def _prefix(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the prefix of a denoiser's tensor names in a file that may contain other parts too."""
    return next((p for p in _PREFIXES if any(name.startswith(p) for name in tensors)), "")


def _checked(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    if not tensors:
        raise UserError("the model's files hold no tensors")
    return tensors


def _class_of(directory: Path) -> str:
    """Return the class that a component's config names; "" if it has none."""
    return str((read_json(directory / "config.json") or {}).get("_class_name") or "")


def _family_of_component(directory: Path) -> str | None:
    """Return the family of a denoiser by its class, or None if several families use it."""
    config = read_json(directory / "config.json") or {}
    names = [f.name for f in FAMILIES.values() if f.transformer == config.get("_class_name")]
    if set(names) == {"sdxl", "stable_diffusion"}:  # only SDXL is conditioned on sizes
        names = ["sdxl" if config.get("addition_embed_type") else "stable_diffusion"]
    return names[0] if len(names) == 1 else None
