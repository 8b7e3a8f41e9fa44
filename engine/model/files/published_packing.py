"""Read weights published in 8 or 4 bits, whose scales are in separate tensors.

Two layouts are supported: E4M3 with a scale per tensor or per row (ComfyUI's `scale_weight`,
compressed-tensors' `weight_scale`), and nf4 as bitsandbytes stores it, with scales in fp32 or
quantized to 8 bits. The packed bytes are kept unchanged; scales get the shapes that
`engine.model.packing` uses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.model.files.weight_files import PackedParts, StoredTensor
from engine.model.packing import NF4_BLOCK, NF4_CODES
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from jobs.spec.values.value_types import BasePrecision

BASE_HINT: Final = "use the model's bf16 weights; base_precision quantizes them as they are read"

_FP8_SCALES: Final = ("scale_weight", "weight_scale")
_FP8_UNUSED: Final = ("scale_input", "input_scale", "comfy_quant")  # for activations in fp8
_FP8_MARK: Final = "scaled_fp8"
_STATE: Final = "quant_state.bitsandbytes__nf4"


def join_packed(files: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a model's tensors, joining each packed weight with its scales and its logical shape.

    Args:
        files: Location of every tensor in the files, by name.

    Raises:
        UserError: A weight is packed in an unsupported way.
    """
    joined = dict(files)
    for name, place in files.items():
        if not name.endswith(".weight"):
            continue
        if place.dtype is torch.float8_e4m3fn:
            _join_fp8(joined, name, place)
        elif f"{name}.{_STATE}" in files:
            _join_nf4(joined, name, place)
    if any(place.packed for place in joined.values()):
        joined.pop(_FP8_MARK, None)
    return joined


def check_packed(
    directory: Path,
    files: Mapping[str, StoredTensor],
    described: Any,
    expected: BasePrecision,
) -> None:
    """Reject a model that is packed differently than the job says.

    Args:
        directory: The model's directory.
        files: From `join_packed`.
        described: The quantization entry of its config.json.
        expected: `base_precision`.

    Raises:
        UserError: The packing differs from `expected`.
    """
    packed = {place.packed.scheme for place in files.values() if place.packed}
    if packed and packed != {expected}:
        raise UserError(
            f"{directory} is quantized to {' and '.join(sorted(packed))}",
            f"set base_precision: {min(packed)} to train a LoRA on it as it is",
        )
    if described and not packed:
        method = described.get("quant_method") if isinstance(described, dict) else None
        raise UserError(
            f"{directory} is quantized ({method or described}); training on a quantized base "
            "is not supported",
            BASE_HINT,
        )


def scale_of(source: StoredTensor, read: Callable[[StoredTensor], torch.Tensor]) -> torch.Tensor:
    """Return all scales of a packed weight in fp32, in the shape that its packing uses.

    Args:
        source: The weight.
        read: Reads a full small tensor.
    """
    assert source.packed is not None
    parts, rows = source.packed.parts, source.shape[0]
    scale = read(parts["scale"])
    if source.packed.scheme == "fp8_scaled":
        return scale.float().reshape(-1, 1).expand(rows, 1)
    if "nested_scale" in parts:
        nested, codes = read(parts["nested_scale"]), read(parts["nested_codes"])
        each = nested.repeat_interleave(source.packed.nested_block)[: scale.numel()]
        scale = codes[scale.view(-1).int()] * each + source.packed.offset
    return scale.float().view(rows, -1)


def _join_fp8(joined: dict[str, StoredTensor], name: str, place: StoredTensor) -> None:
    """Join an fp8 weight with its scale. Without a scale, its values already are the weights."""
    layer = name.removesuffix("weight")
    scales = [joined[layer + leaf] for leaf in _FP8_SCALES if layer + leaf in joined]
    if not scales:
        return
    if scales[0].elements not in (1, place.shape[0]):
        raise _refusal(place, f"its scale has shape {scales[0].shape}")
    joined[name] = replace(place, packed=PackedParts("fp8_scaled", {"scale": scales[0]}))
    for leaf in (*_FP8_SCALES, *_FP8_UNUSED):
        joined.pop(layer + leaf, None)


def _join_nf4(joined: dict[str, StoredTensor], name: str, place: StoredTensor) -> None:
    beside = {n: joined.pop(n) for n in list(joined) if n.startswith(f"{name}.")}
    by_leaf = {n.removeprefix(f"{name}."): tensor for n, tensor in beside.items()}
    state = _read_state(by_leaf[_STATE])
    shape = tuple(int(n) for n in state["shape"])
    if state["blocksize"] != NF4_BLOCK or len(shape) != 2 or shape[1] % NF4_BLOCK:
        raise _refusal(place, f"it has blocks of {state['blocksize']} in {shape}")
    codes = by_leaf["quant_map"].read_whole()
    if not torch.allclose(codes, torch.tensor(NF4_CODES), atol=1e-6):
        raise _refusal(place, "its codes are not those of nf4")
    parts = {"scale": by_leaf["absmax"]}
    if "nested_absmax" in by_leaf:
        parts |= {
            "nested_scale": by_leaf["nested_absmax"],
            "nested_codes": by_leaf["nested_quant_map"],
        }
    packed = PackedParts(
        "nf4",
        parts,
        nested_block=int(state.get("nested_blocksize", 0)),
        offset=float(state.get("nested_offset", 0.0)),
    )
    joined[name] = replace(place, shape=shape, packed=packed)


def _read_state(tensor: StoredTensor) -> dict[str, Any]:
    """Read bitsandbytes' state of a packed weight: JSON in a tensor of bytes."""
    try:
        state = json.loads(bytes(tensor.read_whole().tolist()))
        if state["quant_type"] == "nf4" and isinstance(state["shape"], list):
            return dict(state)
    except (ValueError, KeyError, TypeError, OSError):
        pass
    raise _refusal(tensor, "its quantization is not described as nf4")


def _refusal(place: StoredTensor, why: str) -> UserError:
    return UserError(
        f"{place.file}: {place.name} is quantized in a way that cannot be read: {why}",
        BASE_HINT,
    )
