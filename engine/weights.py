"""Build a model on the meta device and stream its weights: each rank reads only its own rows.

A dim-0 shard is contiguous in a safetensors file, so host memory stays near zero and the ranks of
a node together read the file once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from engine.precision import compute_dtype, storage_dtype
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.spec import JobSpec

_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies on disk."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name → place of every tensor of a model saved in one or several safetensors files.

    Raises:
        UserError: A file is missing or damaged, or a tensor is of an unsupported type.
    """
    indices = sorted(directory.glob("*.safetensors.index.json"))
    try:
        if indices:
            listed = set(json.loads(indices[0].read_text())["weight_map"].values())
            files = [directory / name for name in sorted(listed)]
        else:
            files = sorted(directory.glob("*.safetensors"))[:1]
    except (ValueError, KeyError) as error:
        raise UserError(f"{indices[0]} is damaged ({error})", "fetch the model again") from None
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    view = tensors.get_slice(name)
                    kind = view.get_dtype()
                    if kind not in _DTYPES:
                        raise UserError(
                            f"{file}: {name} is stored as {kind}",
                            f"supported are {', '.join(_DTYPES)}",
                        )
                    found[name] = StoredTensor(file, tuple(view.get_shape()), _DTYPES[kind])
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {file} ({error})", "fetch the model again") from None
        except Exception as error:  # safetensors' own error class is not a subclass of these
            if isinstance(error, UserError):
                raise
            raise UserError(f"{file} is damaged ({error})", "fetch the model again") from None
    return found


def build_on_meta(
    model_class: Any, directory: Path, spec: JobSpec
) -> tuple[torch.nn.Module, dict[str, StoredTensor]]:
    """Construct a model without its weights.

    Parameters are on the meta device in the precision they will be kept in; buffers are real, so
    those that no file holds (rotary tables and such) have their computed values.

    Returns:
        The model, and where its tensors are.

    Raises:
        UserError: Files and model do not fit together; names the tensors.
    """
    stored = stored_tensors(directory)
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(model_class.load_config(directory))
    _check_names(model, stored, directory)
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in list(model.named_parameters()):
        kept_fp32 = any(part in name.split(".") for part in keep)
        in_file = stored[name].dtype
        if in_file.itemsize < compute_dtype(spec).itemsize and spec.model_type == "lora":
            raise UserError(
                f"{directory} holds {in_file} weights, and mixed_precision: no computes in fp32",
                "set mixed_precision: bf16; base weights are never upcast",
            )
        dtype = storage_dtype(spec, in_file, keep_fp32=kept_fp32)
        owner, _, leaf = name.rpartition(".")
        setattr(
            model.get_submodule(owner),
            leaf,
            torch.nn.Parameter(parameter.to(dtype), requires_grad=spec.model_type == "full"),
        )
    return model, stored


def materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on `device` (contents undefined), and move buffers there."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    model._apply(place)  # what `to_empty` does, without emptying the buffers


def stream(
    model: torch.nn.Module,
    stored: dict[str, StoredTensor],
    *,
    names: Callable[[str], str] = lambda name: name,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Fill parameters and persistent buffers from disk, each rank its own rows.

    Args:
        model: Materialised, sharded or not.
        stored: What `build_on_meta` returned.
        names: Name in the file → name in the model (adapters wrap modules and rename them).
        progress: Called with the number of tensors done.

    Returns:
        Bytes read by this rank.
    """
    targets: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    by_file: dict[Path, list[str]] = {}
    for name, place in stored.items():
        by_file.setdefault(place.file, []).append(name)
    done = read = 0
    with torch.no_grad():
        for file, contents in by_file.items():
            with safe_open(file, framework="pt") as tensors:
                for name in contents:
                    values = _own_rows(targets[names(name)], tensors.get_slice(name))
                    if values is not None:
                        local_part(targets[names(name)]).copy_(values)
                        read += values.numel() * values.element_size()
                    done += 1
                    progress(done)
    return read


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this rank holds of a possibly sharded one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of(tensor: DTensor) -> slice:
    """The rows along dim 0 that this rank holds."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return slice(offset[0], offset[0] + shape[0])


def _own_rows(target: torch.Tensor, view: Any) -> torch.Tensor | None:
    if not isinstance(target, DTensor):
        return view[...]
    rows = rows_of(target)
    return view[rows] if rows.stop > rows.start else None


def _check_names(model: torch.nn.Module, stored: dict[str, StoredTensor], directory: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = []
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(f"{len(missing)} tensors are missing ({', '.join(missing[:3])} …)")
    if extra := sorted(stored.keys() - wanted.keys()):
        problems.append(f"{len(extra)} are not in the model ({', '.join(extra[:3])} …)")
    wrong = [name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name].shape]
    if wrong:
        name = min(wrong)
        problems.append(f"{name} has shape {stored[name].shape}, the config says {wanted[name]}")
    if problems:
        raise UserError(f"{directory} does not fit its config.json: {'; '.join(problems)}")
