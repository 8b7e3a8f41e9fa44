"""Verify exports with stock diffusers or peft, on the meta device to save memory."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import json
import logging
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
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

from engine.exports.readback import DamagedError
from engine.model.adapters import text_lora
from engine.model.files import weights
from engine.model.meta_device import parameters_on_meta
from jobs.errors import UserError
from jobs.models.find_model import find_index, index_of
from jobs.models.model_files import variant_of
from jobs.spec.values.hub_names import INDEXES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from engine.exports.recipe import Recipe


PEFT_PREFIX: Final = "base_model.model."
"""Prefix of tensor names in LoRA files in peft's own format."""


def loads_loras(pipeline_class: Any) -> bool:
    """Return whether a stock pipeline has LoRA functions; without them, LoRAs load through peft."""
    return hasattr(pipeline_class, "load_lora_weights")


def check_lora(
    recipe: Recipe,
    file: Path,
    layers: Mapping[str, torch.Tensor],
    modules: Collection[str],
    model: Any,
    texts: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
) -> None:
    """Have the stock pipeline (or else peft) load a LoRA, and compare the result.

    Args:
        recipe: Describes the export.
        file: The LoRA.
        layers: The expected tensors, by diffusers' names without a prefix.
        modules: The adapted modules, including those of text encoders; all scales must be 1.
        model: The bare base model on the meta device, to which the adapter's modules are added.
        texts: The expected tensors of each text encoder.

    Raises:
        DamagedError: The pipeline rejects the LoRA or reads it differently.
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
        except Exception as error:  # any exception means failure
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
    """Compare a text encoder that a LoRA was loaded into with the expected tensors.

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
    """Build the model class from the written files, and have the stock pipeline read the rest.

    Only components without weights are loaded: schedulers and tokenizers. The other components are
    the base model's own files.

    Raises:
        DamagedError: A file does not fit the others.
    """
    try:
        with _quiet():
            # This compares names and shapes with those that the written config.json implies.
            model, _ = weights.build_on_meta(
                recipe.family.transformer_class(), directory / recipe.family.component, recipe.spec
            )
            _pipeline(recipe, directory, model)
    except Exception as error:  # any exception means failure
        raise DamagedError(f"stock diffusers does not load the export: {error}") from error


def _load_by_diffusers(
    recipe: Recipe, file: Path, model: Any, encoders: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Load a LoRA into a model, and return the tensors read, by their names in the model.

    Args:
        recipe: Describes the export.
        file: The LoRA.
        model: The base model.
        encoders: The text encoders that the LoRA also adapts, by their names in the pipeline.
    """
    family = recipe.family
    if recipe.spec.lora_variant == "lokr":  # most pipelines cannot load it, all models can
        model.load_lora_adapter(
            file.parent,
            weight_name=file.name,
            prefix=family.lora_prefix,
            low_cpu_mem_usage=True,
        )
        return _without_prefix(load_file(file), f"{family.lora_prefix}.")
    pipeline_class = family.pipeline_class()
    read = pipeline_class.lora_state_dict(file.parent, weight_name=file.name)
    if isinstance(read, tuple):  # UNet pipelines also return kohya's alphas
        read = read[0]
    pipeline = _pipeline(recipe, recipe.root, model, only_it=True)
    pipeline.register_modules(**encoders)
    if family.second_denoiser is not None:  # with two denoisers, diffusers needs both
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
    """Build the stock pipeline around a transformer, without other weights (or components)."""
    index = find_index(root) or {}
    absent: dict[str, Any] = {
        name: None
        for name in components_of(index)
        if only_it or any((root / name).glob("*.safetensors")) or _is_missing_here(*index[name])
    }
    return recipe.family.pipeline_class().from_pretrained(
        root, **absent | {recipe.family.component: transformer}, local_files_only=True
    )


def _is_missing_here(library: str, class_name: str) -> bool:
    """Return whether a class needs a library that training does not: for processors, torchvision.

    Without it, transformers exports a dummy class for FLUX.2's processor, and Qwen-Image-Edit's
    cannot be instantiated.
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
    """Suppress the library's advice."""
    from diffusers.utils import logging as diffusers_logging

    before = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(before)


# -- components -----------------------------------------------------------------------------
# Copy the components that training does not change from the base model.


_FICLONE: Final = 0x40049409  # ioctl: share the blocks of another file until one of them is written
_LARGE: Final = 2**20  # bytes; smaller files are copied
# Other formats of the same weights, which hub repositories often include.
_FOREIGN: Final = (
    ".bin",
    ".msgpack",
    ".h5",
    ".onnx",
    ".onnx_data",
    ".pb",
    ".ckpt",
    ".pt",
    ".pth",
    ".gguf",
)
_FOREIGN_NAMES: Final = ("openvino_",)
# These check finished images and often are not downloaded. The checker needs its extractor.
_CHECKS: Final[tuple[str, ...]] = ("safety_checker", "feature_extractor")


@dataclass(frozen=True)
class Copy:
    """A file to copy: its path with the links of a hub cache resolved, and its relative name."""

    source: Path
    name: str


def read_index(root: Path) -> dict[str, Any]:
    """Return a model's index.

    Raises:
        UserError: It cannot be read, or names a component outside the model's folder.
    """
    path, index = index_of(root), find_index(root)
    if path is None or index is None:
        raise UserError(f"{root} has no readable model_index.json", "download the model again")
    for name in components_of(index):
        if name in ("", ".", "..") or "/" in name:  # files could be copied anywhere
            raise UserError(f"{path}: {name} is no folder of the model")
    return index


def files_of(
    root: Path,
    index: Mapping[str, Any],
    trained: Collection[str],
    places: Mapping[str, Path] = MappingProxyType({}),
) -> list[Copy]:
    """Return a pipeline's untrained files, and the configs of its trained components.

    Args:
        root: The base model.
        index: Its index.
        trained: The names of the trained components.
        places: Directories of components that have another name.

    Raises:
        UserError: A component that the index names is missing, and pipelines need it.
    """
    path = index_of(root) or root / INDEXES[0]
    copies = [Copy(path.resolve(), path.name)]
    copies += [
        Copy(path.resolve(), path.name)
        for path in sorted(root.iterdir())
        if path.name.upper().startswith(("LICENSE", "NOTICE")) and path.is_file()
    ]
    absent = absent_checks(root, index)
    for name in components_of(index):
        if name in absent:
            continue
        folder = places.get(name, root / name)
        if not folder.is_dir():
            raise UserError(f"{root} lacks {name}, listed in its index", "download it again")
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if name in trained:
            paths = [
                path for path in paths if path.suffix == ".json" and ".index." not in path.name
            ]
        elif any(p.suffix == ".safetensors" and variant_of(p.name) is None for p in paths):
            paths = [path for path in paths if not _is_another_copy(path)]
        copies += [Copy(path.resolve(), f"{name}/{path.relative_to(folder)}") for path in paths]
    return copies


def _is_another_copy(path: Path) -> bool:
    """Return whether a file duplicates the plain safetensors files in another format or variant."""
    return (
        path.suffix in _FOREIGN
        or path.name.startswith(_FOREIGN_NAMES)
        or variant_of(path.name) is not None
    )


def components_of(index: Mapping[str, Any]) -> list[str]:
    """List the components that a model index names as present."""
    return [
        name
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and value[0] is not None
    ]


def absent_checks(root: Path, index: Mapping[str, Any]) -> list[str]:
    """Return the optional components that a model's index names but that are missing."""
    named = components_of(index)
    absent = [name for name in _CHECKS if name in named and not (root / name).is_dir()]
    return [] if "safety_checker" in named and "safety_checker" not in absent else absent


def write_index_without(names: Iterable[str], index: Mapping[str, Any], directory: Path) -> None:
    """Write an index for an export that marks components as absent.

    Args:
        names: From `absent_checks`.
        index: The base model's index.
        directory: The export.
    """
    changed = {**index, **{name: [None, None] for name in names}}
    if "requires_safety_checker" in changed:
        changed["requires_safety_checker"] = False
    (directory / INDEXES[0]).write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def write_schedule(settings: Mapping[str, Any], directory: Path) -> None:
    """Write the settings of an export's scheduler, in place of the base model's."""
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (directory / "scheduler" / "scheduler_config.json").write_text(text, encoding="utf-8")


def bytes_to_copy(files: Iterable[Copy], beside: Path) -> int:
    """Return the bytes that copies in a directory need; linked files need none."""
    device = beside.stat().st_dev
    sizes = [copy.source.stat() for copy in files]
    return sum(s.st_size for s in sizes if s.st_dev != device or s.st_size < _LARGE)


def copy_or_link(copy: Copy, directory: Path) -> None:
    """Put a file into the export: as a clone or link if possible, else as a verified copy.

    Raises:
        OSError: It could not be written, or the copy differs from the source.
    """
    target = directory / copy.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if copy.source.stat().st_size >= _LARGE and (
        _clone(copy.source, target) or _link(copy, target)
    ):
        return
    shutil.copyfile(copy.source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if not filecmp.cmp(copy.source, target, shallow=False):
        raise OSError(errno.EIO, "it differs from its source", str(target))


def _clone(source: Path, target: Path) -> bool:
    """Clone a file by sharing its blocks: as cheap as a link, but later changes stay separate."""
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            fcntl.ioctl(new, _FICLONE, old.fileno())
        except OSError:
            cloned = False
        else:
            cloned = True
    if not cloned:
        target.unlink()
    return cloned


def _link(copy: Copy, target: Path) -> bool:
    try:
        os.link(copy.source, target)
    except OSError:  # another file system, or no permission to link the file
        return False
    return True
