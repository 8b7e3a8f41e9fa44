"""Load a transformers model as FSDP2 shards, each rank its own rows, or whole; never by the host.

The result computes what `from_pretrained` would. Transformers (5.23) can shard while it loads too,
but only classes that bring a plan (T5, CLIP and Qwen2.5-VL bring none), over a mesh of its own with
torch's default timeout, and through mapped files, whose pages count as the rank's memory.
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
"""The name of layers whose weights are never packed."""


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
    """Build without weights, shard by block, fill. All ranks call it together.

    Args:
        model_class: A transformers class.
        directory: With its config.json and weights.
        dtype: What `from_pretrained` would be asked for.
        device: Where this rank computes.
        mesh: All ranks, in one dim.
        say: Called with a line about what is where, and with one about an encoder that cannot be
            read by rows.
        moved: Called for each tensor that this rank has filled.
        packing: How to pack its linear layers, if at all.

    Returns:
        The model in eval mode, frozen. Its parameters are `DTensor`s, and only a call of the model
        itself gathers them: what calls a part of it finds shards.

    Raises:
        UserError: The weights are quantised, or of other shapes than the config says.
    """
    model = _build(model_class, directory, dtype)
    # The same on all ranks: it depends on nothing but the files.
    stored, obstacle = _places(model, stored_tensors(directory))
    if packing and not obstacle and (note := _pack(model, packing, dtype)):
        say(f"{directory.name}: {note}")
    units = _shard(model, mesh)
    materialise(model, device)
    if obstacle:
        say(f"{directory.name}: {obstacle}, so rank 0 loads all of it and sends out the shards")
        _hand_out(model, model_class, directory, dtype, device, mesh, moved)
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
    """Build without weights, and fill them on the device; host memory holds a few chunks.

    Args:
        model_class: A transformers class.
        directory: With its config.json and weights.
        dtype: What `from_pretrained` would be asked for.
        device: Where to.
        moved: Called for each tensor that is filled.
        packing: How to pack its linear layers, if at all.
        say: Called with a line about what is packed.

    Returns:
        The model in eval mode, frozen; None if its files do not hold the tensors as it does.

    Raises:
        UserError: The weights are quantised, or of other shapes than the config says.
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
    """Whether a model's config.json says that its weights are quantised."""
    return bool((read_json(directory / "config.json") or {}).get("quantization_config"))


def _build(model_class: Any, directory: Path, dtype: torch.dtype) -> Any:
    """Return the model with its parameters on the meta device, each in the precision it will have.

    Buffers are real, so those that no file holds have the values they are initialised with.
    """
    if is_quantised(directory):
        raise UserError(
            f"{directory} is quantized; quantized text encoders cannot be sharded",
            "set shard_text_encoders: false, or use its bf16 weights",
        )
    config = model_class.config_class.from_pretrained(directory)
    # As `from_pretrained` does. Classes build their parts by the precision that the config names.
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    with parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype)
    model.requires_grad_(False).eval()
    # Transformers 5.0 has the plan as an attribute, later ones ask for the precision.
    plan = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else model.dtype_plan
    for names in _aliases(model):
        tensor = model.get_parameter_or_buffer(names[0])
        kept_in = next((plan[p] for p in plan if re.search(p.replace("*", ".*"), names[0])), None)
        if isinstance(tensor, torch.nn.Parameter) and kept_in not in (None, tensor.dtype):
            _replace(model, names, tensor.to(kept_in))
    return model


def _pack(model: Any, packing: Packing, dtype: torch.dtype) -> str:
    """Have the linear layers of repeated blocks packed; a line for the log, or "" for none.

    T5's `wo` stays as it is: the layer's own code casts its input to its weight's dtype.
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
    """Of all parts: in transformers 5.0 a model does not have the names that its parts have."""
    return {
        name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }


def _places(model: Any, files: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], str]:
    """Where each tensor of the model is, by its name in `named_parameters` or `named_buffers`.

    Transformers renames on load, as its classes were renamed since the files were written; its
    own rules apply here too. A tensor that the model shares between modules, but of which the
    files hold several, becomes several: whether they differ or not, that is right.

    Returns:
        The places, and why the tensors cannot be read from there ("" if they can).

    Raises:
        UserError: Another shape than the config says.
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
            continue  # as `from_pretrained`: a head that this class does not have, old buffers
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
    """Put one new parameter in each of some places."""
    parameter = torch.nn.Parameter(tensor.detach(), requires_grad=False)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def _shard(model: Any, mesh: DeviceMesh) -> Counter[str]:
    """Make each repeated block a unit, and the model the root; counts units by class."""
    blocks = _block_classes(model)
    units: Counter[str] = Counter()
    for module in reversed(list(model.modules())):  # inner ones first
        name = type(module).__name__
        if name in blocks and module is not model:
            fully_shard(module, mesh=mesh)
            units[name] += 1
    # The root too is gathered only while it runs: there is no backward for which to keep it.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Transformers (5.0 to 5.23) looks up which outputs a model can record by the text of its
    # class, and `fully_shard` gives it a class of its own: unknown, it records no hidden states.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(model)), model._can_record_outputs)
    return units


def _hand_out(
    model: Any,
    model_class: Any,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    moved: Callable[[], None],
) -> None:
    """Rank 0 loads the model whole into host memory; each rank gets its rows, tensor by tensor.

    In the mesh's own group. Torch's `set_model_state_dict(broadcast_from_rank0=True)` works in
    the default one, whose timeout may be shorter than the loading.
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
