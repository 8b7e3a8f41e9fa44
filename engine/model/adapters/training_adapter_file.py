"""Read the file of a training adapter: a LoRA of any rank, which is not trained on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from engine.model.adapters.lora_file import (
    CANNOT,
    Layer,
    naming,
    parted,
    read_lora,
    refusal,
    scales_in,
)
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engine.families import Family
    from engine.families.shared.lora_names import LoraStyle


def read_training_adapter(
    file: Path, linears: Mapping[str, torch.nn.Linear], family: Family
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Read the adapters of a file, of whatever ranks, for any of a model's linear layers.

    Args:
        file: A safetensors file.
        linears: Name → layer, of all that the model has.
        family: The model's.

    Yields:
        A layer's name, and its down `(rank, in)` and up `(out, rank)` in fp32, whose product is
        what is added to the layer's weight.

    Raises:
        UserError: The file is no LoRA, or not one of these layers.
    """
    layers: dict[str, Layer] = {}
    first = 1
    for name, linear in linears.items():
        down, up = torch.empty(0, linear.in_features), torch.empty(linear.out_features, 0)
        layers[name] = Layer({"down": down, "up": up}, 1.0, first)  # type: ignore[dict-item]
        first += linear.out_features
    try:
        stored, header = read_lora(file)
        scale_of = scales_in(file, header, stored, family)
        yield from _products(file, stored, layers, family, scale_of)
    except UserError as error:
        raise UserError(
            f"training_adapter: cannot use {error.message.removeprefix(CANNOT)}"
        ) from None


def _products(
    file: Path,
    stored: Mapping[str, dict[str, torch.Tensor]],
    layers: Mapping[str, Layer],
    family: Family,
    scale_of: Any,
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Name, down and scaled up of each layer that a file adapts.

    Raises:
        UserError: A part of the file is for no layer, is no plain LoRA, or has another size.
    """
    named = any_naming(stored, layers, family)
    for key, tensors in stored.items():
        if key not in named:
            raise refusal(file, f"it adapts {key}, which the model does not have")
        if tensors.keys() - {"alpha"} != {"down", "up"}:
            raise refusal(file, f"{key} is no plain LoRA")
        for name, part in parted(file, key, tensors, named[key], layers):
            down, up = part["down"].float(), part["up"].float()
            if (down.shape[1:], up.shape[1:]) != (
                layers[name].parts["down"].shape[1:],
                (len(down),),
            ):
                raise refusal(file, f"{name} has another size than the model's layer")
            if not (down.isfinite().all() and up.isfinite().all()):
                raise refusal(file, f"{name} has values that are not finite")
            scale = float(tensors.get("alpha", torch.nan)) / len(down)
            yield name, (down, up * (scale_of(name, len(down)) if math.isnan(scale) else scale))


def any_naming(
    stored: Mapping[str, Any], layers: Mapping[str, Layer], family: Family | None
) -> dict[str, torch.Tensor]:
    """Return `naming`, where other tools need not have names for all the layers."""
    candidates = [layers]
    for style in (family.KOHYA, family.COMFYUI) if family is not None else ():
        if style is not None:
            candidates.append({n: a for n, a in layers.items() if _has_name(style, n, a)})
    ways = [naming(stored, some, family) for some in candidates]
    return max(ways, key=lambda way: len(way.keys() & stored.keys()))


def _has_name(style: LoraStyle, name: str, layer: Layer) -> bool:
    down, up = torch.zeros(1, *layer.parts["down"].shape[1:]), torch.zeros(layer.outputs, 1)
    try:
        style.convert({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up})
    except UserError:
        return False
    return True
