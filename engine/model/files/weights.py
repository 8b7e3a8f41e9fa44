"""Build a model on the meta device and stream its weights: each rank reads only its own rows.

A dim-0 shard is contiguous in a safetensors file, so a rank reads it directly into its destination:
host memory grows by the shard, and the ranks of a node together read the file once.
`engine.model.files.weight_files` locates the tensors, `engine.model.files.weight_reader` reads
them.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard

from engine.model.files.published_packing import BASE_HINT, check_packed, join_packed
from engine.model.files.weight_files import StoredTensor, stored_tensors
from engine.model.files.weight_reader import Reading, read_all
from engine.model.meta_device import parameters_on_meta
from engine.model.precision import storage_dtype
from engine.model.quantized_linear import base_precision, quantized_layers, weights_per_element
from jobs.errors import UserError
from jobs.spec.families import denoiser_config, widened_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from pathlib import Path

    from engine.model.quantized_linear import QuantizedLinear
    from jobs.spec.job_spec import RecipeKeys
    from jobs.spec.keys.job import JobKeys


# -- widening -------------------------------------------------------------------------------
# Handle a layer with more inputs than in its file. The additional inputs are for a conditioning
# image, and their weights start at zero.


def shape_in_file(shape: tuple[int, ...], place: StoredTensor) -> tuple[int, ...]:
    """Return the expected shape of a widened layer's weight in the file.

    Args:
        shape: The weight's shape in the model, `(out, in)`.
        place: Its location, with at most as many inputs.

    Raises:
        UserError: It is quantized.
    """
    if place.packed is not None:
        raise UserError(
            f"{place.file.parent} has {place.name} quantized, which cannot get inputs for a "
            "conditioning image",
            BASE_HINT,
        )
    return (*shape[:1], min(shape[1], place.shape[-1]))


def narrowed(here: torch.Tensor, place: StoredTensor) -> torch.Tensor:
    """Return the columns of a weight that its file has, after zeroing all others.

    Args:
        here: Rows of the weight. Other tensors are returned unchanged.
        place: Its location.
    """
    if len(place.shape) != 2 or here.dim() != 2 or here.shape[1] <= place.shape[1]:
        return here
    whole = here.detach()
    whole[:, place.shape[1] :].zero_()
    return whole[:, : place.shape[1]]


# -- pinned memory --------------------------------------------------------------------------
# Allocate host memory that a GPU can copy from directly, without rounding up sizes.
#
# Torch's own allocator of pinned memory (2.11 to 2.13) rounds each tensor up to a power of two, so
# that 48 GB of offloaded shards take about 80. Its option against that,
# `pinned_max_round_threshold_mb`, reuses freed memory for tensors that are larger than it (2.13).
# So the shards are in our own memory, which is registered with CUDA in the way torch's checkpoints
# do it.


_ALIGNMENT: Final = 512  # bytes; same alignment as CUDA's allocations


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that `PinnedMemory` needs for tensors like these."""
    return sum(_rounded(tensor.nbytes) for tensor in tensors)


class PinnedMemory:
    """Memory for tensors, which is released when the last of them is gone.

    If CUDA refuses to register it, it is ordinary memory: check `Tensor.is_pinned`.

    Args:
        size: Bytes, from `bytes_of`.
        pages: The memory, if it is to be some that other processes share.
        pin: Whether to register it with CUDA.

    Attributes:
        used: Bytes that tensors have.
    """

    def __init__(self, size: int, pages: mmap.mmap | None = None, *, pin: bool = True) -> None:
        # Tensors hold the array, and the array holds the pages, so the array is finalized after the
        # tensors.
        pages = mmap.mmap(-1, max(1, size)) if pages is None else pages
        self._array = (ctypes.c_char * max(1, size)).from_buffer(pages)
        self.used = 0
        if not pin:
            return
        address = ctypes.addressof(self._array)
        with suppress(RuntimeError):
            pin_memory(address, len(self._array))
            weakref.finalize(self._array, _unpin, address)

    def take_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a zero tensor with the same shape and dtype.

        Args:
            tensor: On any device, contiguous, and counted by `bytes_of`.
        """
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        first, self.used = self.used, self.used + _rounded(tensor.nbytes)
        flat = torch.frombuffer(self._array, dtype=tensor.dtype, count=tensor.numel(), offset=first)
        return flat.view(tensor.shape)

    def bytes_between(self, first: int, end: int) -> torch.Tensor:
        """Return the bytes from `first` to before `end`, `(end - first,)`."""
        if first == end:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._array, dtype=torch.uint8, count=end - first, offset=first)


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _unpin(address: int) -> None:
    with suppress(AssertionError, RuntimeError):  # at process exit, CUDA may be gone
        unpin_memory(address)


# -- weights --------------------------------------------------------------------------------


__all__ = [
    "StoredTensor",
    "build_on_meta",
    "check_precision",
    "computed_in_fp32",
    "local_part",
    "materialise",
    "rows_of",
    "stored_tensors",
    "stream",
    "targets_of",
]

# Suffixes of the extra tensors that quantizers store: scales of fp8 files (ComfyUI,
# compressed-tensors), bitsandbytes, quanto, GPTQ and AWQ.
_QUANTISED: Final = re.compile(
    r"(^|\.)(scaled_fp8|scale_weight|scale_input|weight_scale(_\w+)?|input_scale|comfy_quant"
    r"|weight\.(absmax|quant_map|nested_\w+|quant_state\.\S+|_data|_scale)|SCB"
    r"|qweight|qzeros|scales|g_idx)$"
)


def build_on_meta(
    model_class: Any,
    directory: Path,
    spec: RecipeKeys,
    *,
    say: Callable[[str], None] = lambda note: None,
) -> tuple[torch.nn.Module, dict[str, StoredTensor]]:
    """Construct a model without its weights.

    Parameters are on the meta device in their storage precision. Buffers are real, so those that no
    file holds (such as rotary tables) have their computed values. A parameter shared by several
    modules stays one object.

    Args:
        model_class: A diffusers model class.
        directory: The directory with its config.json and weights.
        spec: The job.
        say: Called with a line for each kind of tensor whose precision differs from the file's.

    Returns:
        The model, and the location of its tensors by their names in `named_parameters` or
        `named_buffers`, even if the file uses another name of a shared tensor.

    Raises:
        UserError: Files and model do not fit, or the weights are quantized in an unknown way.
    """
    config = denoiser_config(spec, model_class.load_config(directory))
    files = join_packed(stored_tensors(directory))
    check_packed(directory, files, config.get("quantization_config"), base_precision(spec))
    with parameters_on_meta():
        model = model_class.from_config(config)
    tensors, aliases = _own_tensors(model)
    stored = _fit(model, tensors, aliases, files, directory, widened_of(spec))
    changes: Counter[str] = Counter()
    for name, place in stored.items():
        tensor, keep_fp32 = tensors[name], _kept_in_fp32(model, name)
        _check_kind(tensor, place)
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        dtype = storage_dtype(spec, keep_fp32=keep_fp32)
        if dtype is not place.dtype:
            changes[_change(place.dtype, dtype, spec, keep_fp32=keep_fp32)] += 1
        trained = spec.model_type == "full" and tensor.requires_grad
        replaced = torch.nn.Parameter(tensor.to(dtype), requires_grad=trained)
        for alias in aliases[name]:
            owner, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(owner), leaf, replaced)
    for change, count in changes.items():
        say(f"{count} tensors of {directory.name} {change}")
    return model, stored


def materialise(
    model: torch.nn.Module,
    device: torch.device,
    parameters_on: torch.device | None = None,
    *,
    hosts: Mapping[int, torch.Tensor] | None = None,
) -> None:
    """Allocate meta parameters (with undefined contents), and move buffers.

    Args:
        model: Sharded or not.
        device: The device that this rank computes on.
        parameters_on: The device of sharded parameters, if different (the CPU, for FSDP's offload).
        hosts: `id` of a parameter → the tensor that it becomes.
    """
    shared: dict[int, tuple[torch.nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), (parameter, []))[1].append(name)
    placed: dict[int, torch.Tensor] = dict(hosts or {})
    offloads = parameters_on is not None and parameters_on.type == "cpu" and device.type == "cuda"
    shards = [local_part(p) for p in model.parameters() if offloads and isinstance(p, DTensor)]
    pinned = PinnedMemory(bytes_of(shards)) if shards else None

    def place(tensor: torch.Tensor) -> torch.Tensor:
        sharded = isinstance(tensor, DTensor)
        where = parameters_on if sharded and parameters_on is not None else device
        if not tensor.is_meta:
            return tensor.to(where)
        if isinstance(tensor, DTensor):
            there: Any = torch.empty_like(tensor, device=where)  # its pages are never touched
            if pinned is not None:
                # FSDP does the same; `from_local` would move it to the mesh's device.
                there._local_tensor = pinned.take_like(local_part(tensor))
            return there
        if id(tensor) not in placed:  # once per shared tensor; `shared` keeps the ids valid
            placed[id(tensor)] = torch.empty_like(tensor, device=where)
        return placed[id(tensor)]

    model._apply(place)  # like `to_empty`, but keeps the buffers' values
    # `_apply` keeps the identity of a `DTensor`, but replaces a plain meta parameter separately in
    # each module that shares it.
    for _, names in shared.values():
        for name in names[1:]:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(names[0]))


def stream(
    model: torch.nn.Module,
    stored: dict[str, StoredTensor],
    *,
    names: Callable[[str], str] = lambda name: name,
    skip: Container[str] = (),
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Fill parameters and persistent buffers from disk; each rank reads its own rows.

    Args:
        model: Materialized, sharded or not.
        stored: From `build_on_meta`.
        names: Maps a name in `stored` to the model's (adapters wrap modules and rename them).
        skip: The model's names of what is left as it is.
        progress: Called with the number of tensors done.

    Returns:
        Bytes read by this rank.
    """
    targets, packed = targets_of(model)
    readings = [
        reading_of(name, place, targets[names(name)], packed.get(names(name)))
        for name, place in stored.items()
        if names(name) not in skip
    ]
    return read_all(readings, progress)


def targets_of(
    model: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, QuantizedLinear]]:
    """Return a model's tensors by name, and the layers that pack some of them, by those names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    layers = quantized_layers(model).items()
    return tensors, {f"{name}.weight": layer for name, layer in layers}


def check_precision(model: torch.nn.Module, spec: RecipeKeys) -> None:
    """Verify that trained parameters are fp32, and frozen ones in their storage precision.

    Raises:
        RuntimeError: Names a tensor with another precision. This ends the job, which would
            otherwise train badly, or take twice the memory for its base.
    """
    packed = weights_per_element(model)
    for name, parameter in model.named_parameters():
        if id(parameter) in packed:
            continue
        if parameter.requires_grad:
            if parameter.dtype is not torch.float32:
                raise RuntimeError(f"{name} is trained in {parameter.dtype}, not in float32")
            continue
        kept = storage_dtype(spec, keep_fp32=_kept_in_fp32(model, name))
        if parameter.dtype is not kept:
            raise RuntimeError(f"{name} is frozen and kept in {parameter.dtype}, not in {kept}")


def computed_in_fp32(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return parameters that the model lists as needing fp32 in computations too.

    A sharded unit gathers all its weights in one precision, so these stay replicated instead, also
    those that a job freezes. They are few: norms, shift tables, the time embedding.
    """
    named = model.named_parameters()
    return [parameter for name, parameter in named if _kept_in_fp32(model, name)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's plain tensor of a possibly sharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: DTensor) -> slice:
    """Return the rows along dim 0 that are on this rank."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return slice(offset[0], offset[0] + shape[0])


def _own_tensors(
    model: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Return parameters and persistent buffers by their first name, and all their names."""
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_name = first.setdefault(id(tensor), name)
        tensors.setdefault(first_name, tensor)
        aliases.setdefault(first_name, []).append(name)
    return tensors, aliases


def _fit(
    model: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    aliases: dict[str, list[str]],
    files: dict[str, StoredTensor],
    directory: Path,
    widened: str,
) -> dict[str, StoredTensor]:
    """Return the location of each tensor of the model, checking names and shapes.

    For a widened layer, the file may have fewer columns.

    Raises:
        UserError: Names tensors that are missing, unexpected or of another shape.
    """
    every = {alias for group in aliases.values() for alias in group}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = [
        name
        for name in sorted(files.keys() - every)
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if scales := [name for name in extra if _QUANTISED.search(name)]:
        raise UserError(
            f"{directory} is quantized: it has {scales[0]}, and weights that need scales are not "
            "supported",
            BASE_HINT,
        )
    problems = []
    present = {name: [a for a in group if a in files] for name, group in aliases.items()}
    if missing := sorted(name for name, group in present.items() if not group):
        problems.append(f"{len(missing)} tensors are missing ({', '.join(missing[:3])} …)")
    if extra:
        problems.append(f"{len(extra)} are not in the model ({', '.join(extra[:3])} …)")
    for name, group in sorted(present.items()):
        expected = tuple(tensors[name].shape)
        if widened and name == f"{widened}.weight":
            expected = shape_in_file(expected, files[group[0]])
        if wrong := [alias for alias in group if files[alias].shape != expected]:
            shape = files[wrong[0]].shape
            problems.append(f"{wrong[0]} has shape {shape}, the config says {expected}")
            break
    if problems:
        raise UserError(f"{directory} does not fit its config.json: {'; '.join(problems)}")
    return {name: files[group[0]] for name, group in present.items()}


def _check_kind(tensor: torch.Tensor, place: StoredTensor) -> None:
    """Reject integers for a floating-point tensor, and vice versa.

    Raises:
        UserError: Names the tensor.
    """
    if place.packed is not None:
        return
    if place.dtype.is_floating_point != tensor.is_floating_point() or (
        isinstance(tensor, torch.nn.Parameter) and not place.dtype.is_floating_point
    ):
        what = str(place.dtype).removeprefix("torch.")
        raise UserError(
            f"{place.file}: {place.name} is stored as {what}; training on a quantized base is not "
            "supported",
            BASE_HINT,
        )


def _kept_in_fp32(model: torch.nn.Module, name: str) -> bool:
    """Return whether the model lists a tensor's module as needing fp32, by diffusers' own rule."""
    listed = getattr(model, "_keep_in_fp32_modules", None) or ()
    parts = name.split(".")
    return any(part in parts for part in ([listed] if isinstance(listed, str) else listed))


def _change(in_file: torch.dtype, kept_in: torch.dtype, spec: JobKeys, *, keep_fp32: bool) -> str:
    """Describe how and why a tensor's precision differs from the file's."""
    if spec.model_type == "full":
        reason = "full training keeps fp32 master weights"
    elif keep_fp32:
        reason = "the model asks for fp32 there"
    elif in_file.itemsize == 1:
        times = "twice" if kept_in.itemsize == 2 else "four times"
        reason = f"fp8 is not a compute precision here, so they take {times} their size on disk"
    elif in_file.itemsize < kept_in.itemsize:
        reason = "mixed_precision: no computes in fp32, so they take twice their size on disk"
    else:
        reason = "the compute precision"
    stored, kept = (str(dtype).removeprefix("torch.") for dtype in (in_file, kept_in))
    return f"are {stored} in the file and kept in {kept} ({reason})"


def reading_of(
    name: str, place: StoredTensor, target: torch.Tensor, layer: QuantizedLinear | None = None
) -> Reading:
    """Return this rank's range of one tensor.

    Args:
        name: Its name, for messages.
        place: Its location.
        target: The tensor to fill.
        layer: The layer that keeps it packed, if any.

    Raises:
        RuntimeError: The tensor is sharded in another way than by rows.
    """
    packing = scale = None
    shape = place.shape[1:]
    if layer is not None:
        packing, shape = layer.packing, layer.weight.shape[1:]
        scale = None if layer.weight_scale is None else local_part(layer.weight_scale)
    if not isinstance(target, DTensor):
        return Reading(place, 0, narrowed(target, place), packing, scale)
    by_rows = all(
        type(placement) is Replicate or (type(placement) is Shard and placement.dim == 0)
        for placement in target.placements
    )
    here, rows = narrowed(local_part(target), place), rows_of(target)
    if not by_rows or here.shape != (rows.stop - rows.start, *shape):
        raise RuntimeError(
            f"{name} is sharded as {target.placements}, of which {tuple(here.shape)} is here: "
            "only rows can be streamed"
        )
    return Reading(place, rows.start * place.row_elements, here, packing, scale)
