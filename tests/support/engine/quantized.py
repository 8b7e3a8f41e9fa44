"""A weight to pack, and a packed layer of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.model.packing import Packing
from engine.model.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from jobs.spec.values.value_types import BasePrecision


def some_weight(rows: int = 24, columns: int = 192) -> torch.Tensor:
    """Normal, with rows of other sizes and a few outliers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight *= torch.logspace(-1, 1, rows).unsqueeze(1)
    weight[1, 5] = 1.5
    return weight


def layer_of(
    scheme: BasePrecision, weight: torch.Tensor, dtype: torch.dtype
) -> tuple[QuantizedLinear, torch.Tensor]:
    """A packed layer, and the weight that it computes with."""
    rows, columns = weight.shape
    layer = QuantizedLinear(torch.nn.Linear(columns, rows, dtype=dtype), Packing(scheme), dtype)
    packed, scale = layer.packing.pack(weight)
    layer.weight.copy_(packed)
    if scale is not None:
        assert layer.weight_scale is not None
        layer.weight_scale.copy_(scale)
    assert layer.bias is not None
    layer.bias.requires_grad_(False)
    return layer, layer.packing.unpack(packed, scale, layer.codes, dtype)
