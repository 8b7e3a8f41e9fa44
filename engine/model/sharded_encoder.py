"""Load a transformers model onto devices, as FSDP2 shards or unsharded, without a host copy.

The result computes the same as `from_pretrained`. Transformers (5.23) can also shard while loading,
but only classes with a plan (T5, CLIP and Qwen2.5-VL have none), over its own mesh with torch's
default timeout, and through mapped files, whose pages count toward the rank's memory.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import _CAN_RECORD_REGISTRY

from engine.model.files.weights import local_part, materialise, stored_tensors, stream
from engine.model.meta_device import parameters_on_meta
from engine.model.quantized_linear import replace_layers
from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from engine.model.files.weight_files import StoredTensor
    from engine.model.packing import Packing


UNPACKED: Final = "wo"
"""Name of layers whose weights are never packed."""


def load_encoder(
    model_class: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    *,
    say: Callable[[str], None],
    moved: Callable[[], None],
    packing: Packing | None = None,
) -> torch.nn.Module:
    """Build a model without weights, shard it by block, and fill it. All ranks call it together.

    Args:
        model_class: A transformers class.
        directory: The directory with its config.json and weights.
        dtype: The dtype argument of `from_pretrained`.
        device: The device that this rank computes on.
        mesh: All ranks, in one dim.
        say: Called with a log line about the sharding, and one if the encoder cannot be read by
            rows.
        moved: Called for each tensor that this rank has filled.
        packing: How to pack its linear layers, if at all.

    Returns:
        The model in eval mode, frozen. Its parameters are `DTensor`s, which only a call of the
        model itself gathers: calling a part of it finds shards.

    Raises:
        UserError: The weights are quantized, or their shapes differ from the config.
    """
    model = _build(model_class, directory, dtype)
    # The result is the same on all ranks, since it depends only on the files.
    stored, obstacle = _places(model, stored_tensors(directory))
    if packing and not obstacle and (note := _pack(model, packing, dtype)):
        say(f"{directory.name}: {note}")
    units = _shard(model, mesh)
    materialise(model, device)
    if obstacle:
        say(f"{directory.name}: {obstacle}, so rank 0 loads all of it and sends out the shards")
        _broadcast_shards(model, model_class, directory, dtype, device, mesh, moved)
    else:
        stream(model, stored, progress=lambda done: moved())
    parameters = list(model.parameters())
    whole = sum(p.numel() * p.element_size() for p in parameters)
    here = sum(local_part(p).numel() * p.element_size() for p in parameters)
    say(
        f"{directory.name}: {model_class.__name__} over {mesh.size()} ranks by "
        f"{', '.join(f'{count} {name}' for name, count in units.items()) or 'nothing'}; "
        f"{here / 2**20:.1f} of {whole / 2**20:.1f} MiB here"
    )
    return model


def load_encoder_whole(
    model_class: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    moved: Callable[[], None],
    packing: Packing | None = None,
    say: Callable[[str], None] = lambda note: None,
) -> torch.nn.Module | None:
    """Build a model without weights, and fill it on the device; host memory holds a few chunks.

    Args:
        model_class: A transformers class.
        directory: The directory with its config.json and weights.
        dtype: The dtype argument of `from_pretrained`.
        device: The target device.
        moved: Called for each filled tensor.
        packing: How to pack its linear layers, if at all.
        say: Called with a log line about packed layers.

    Returns:
        The model in eval mode, frozen; None if its files store the tensors in another form.

    Raises:
        UserError: The weights are quantized, or their shapes differ from the config.
    """
    model: torch.nn.Module = _build(model_class, directory, dtype)
    stored, obstacle = _places(model, stored_tensors(directory))
    if obstacle:
        return None
    if packing and (note := _pack(model, packing, dtype)):
        say(f"{directory.name}: {note}")
    materialise(model, device)
    stream(model, stored, progress=lambda done: moved())
    return model


def is_quantised(directory: Path) -> bool:
    """Return whether a model's config.json says that its weights are quantized."""
    return bool((read_json(directory / "config.json") or {}).get("quantization_config"))


def _build(model_class: Any, directory: Path, dtype: torch.dtype) -> Any:
    """Return the model with parameters on the meta device, each in its final precision.

    Buffers are real, so those that no file holds have their initial values.
    """
    if is_quantised(directory):
        raise UserError(
            f"{directory} is quantized; quantized text encoders cannot be sharded",
            "set shard_text_encoders: false, or use its bf16 weights",
        )
    config = model_class.config_class.from_pretrained(directory)
    # `from_pretrained` does the same. Classes build their parts in the precision that the config
    # names.
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    with parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype)
    model.requires_grad_(False).eval()
    # In transformers 5.0 the plan is an attribute; later versions compute it from the precision.
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else model.dtype_plan
    for names in _aliases(model):
        tensor = model.get_parameter_or_buffer(names[0])
        kept_in = next((plan[p] for p in plan if re.search(p.replace("*", ".*"), names[0])), None)
        if isinstance(tensor, torch.nn.Parameter) and kept_in not in (None, tensor.dtype):
            _replace(model, names, tensor.to(kept_in))
    return model


def _pack(model: Any, packing: Packing, dtype: torch.dtype) -> str:
    """Pack the linear layers of repeated blocks, and return a log line, or "" if there are none.

    T5's `wo` is not packed, since the layer's own code casts its input to its weight's dtype.
    """
    kinds = _block_classes(model)
    blocks = tuple(f"{n}." for n, m in model.named_modules() if type(m).__name__ in kinds)
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and name.startswith(blocks)
        and name.rpartition(".")[2] != UNPACKED
        and module.weight.dtype is dtype
        and packing.fits(module.in_features)
    ]
    return replace_layers(model, dict.fromkeys(names, packing), dtype) if names else ""


def _block_classes(model: Any) -> set[str]:
    """Collect the block classes of all submodules; transformers 5.0 does not propagate them."""
    return {
        name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }


def _places(model: Any, files: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], str]:
    """Locate each tensor of the model, by its name in `named_parameters` or `named_buffers`.

    Transformers renames tensors on load, since its classes were renamed after the files were
    written; the same rules apply here. If the model shares a tensor between modules, but the files
    hold several, it is split into several, which is correct whether they differ or not.

    Returns:
        The locations, and why the tensors cannot be read from there ("" if they can).

    Raises:
        UserError: A shape differs from the config.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    expected, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    renamed_places: dict[str, StoredTensor] = {}
    owners: dict[int, str] = {}
    for name in sorted(files, key=dot_natural_key):  # some renamings need that order
        renamed, converter = rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, converter = rename_source_key(name, [], [], prefix, expected)
        if renamed not in expected:
            continue  # like `from_pretrained`: another class's head, old buffers
        if converter is not None:
            return {}, f"{name} is stored differently than in the model"
        renamed_places.setdefault(renamed, files[name])
        tensor = expected[renamed]
        if owners.setdefault(id(tensor), renamed) != renamed and tensor.is_meta:
            _replace(model, [renamed], tensor)
    places = {}
    for names in _aliases(model):
        tensor = model.get_parameter_or_buffer(names[0])
        place = next((renamed_places[name] for name in names if name in renamed_places), None)
        if place is not None:
            if place.shape != tuple(tensor.shape):
                raise UserError(
                    f"{place.file}: {place.name} has shape {place.shape}, the config says "
                    f"{tuple(tensor.shape)}"
                )
            places[names[0]] = place
        elif isinstance(tensor, torch.nn.Parameter):
            return {}, f"its files lack {names[0]}"
    return places, ""


def _aliases(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each parameter and persistent buffer, the listed one first."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _replace(model: torch.nn.Module, names: list[str], tensor: torch.Tensor) -> None:
    """Set one new parameter under several names."""
    parameter = torch.nn.Parameter(tensor.detach(), requires_grad=False)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def _shard(model: Any, mesh: DeviceMesh) -> Counter[str]:
    """Make each repeated block a unit, and the model the root; return unit counts by class."""
    blocks = _block_classes(model)
    units: Counter[str] = Counter()
    for module in reversed(list(model.modules())):  # nested ones first
        name = type(module).__name__
        if name in blocks and module is not model:
            fully_shard(module, mesh=mesh)
            units[name] += 1
    # Reshard the root after its forward too, since no backward needs it.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Transformers (5.0 to 5.23) looks up which outputs a model can record by the string of its
    # class, and `fully_shard` changes the class. Without this entry, it would record no hidden
    # states.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)
    return units


def _broadcast_shards(
    model: Any,
    model_class: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    moved: Callable[[], None],
) -> None:
    """Load the full model on rank 0, and send each rank its rows, tensor by tensor.

    Use the mesh's own group: torch's `set_model_state_dict(broadcast_from_rank0=True)` uses the
    default group, whose timeout may be shorter than the loading.
    """
    main = mesh.get_rank() == 0
    whole = model_class.from_pretrained(directory, dtype=dtype).state_dict() if main else {}
    for name, parameter in model.named_parameters():
        full = whole.pop(name) if main else torch.empty(parameter.shape, dtype=parameter.dtype)
        rows = distribute_tensor(full.to(device), mesh, [Shard(0)])
        local_part(parameter).copy_(local_part(rows))
        moved()
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            if main:
                buffer.copy_(whole.pop(name))
            dist.broadcast(buffer, src=0, group=mesh.get_group())
