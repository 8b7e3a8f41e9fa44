"""LoKr: a layer's weight changes by the Kronecker product of two small matrices.

After Yeh et al. 2023 (LyCORIS). Peft (0.21) makes the whole change, `(out, in)` in fp32, in every
forward, and keeps it for backward: of a large model, that is as much as its weights again. The
product of an input with it needs only the two factors, and knows nothing of the base layer's
weight, which may be packed, or sharded in a unit of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from peft.tuners.lokr import Conv2d, Linear, LoKrModel
from torch.nn import functional

from engine.model.lora_layer import autocast_to

if TYPE_CHECKING:
    from collections.abc import Sequence

_ADAPTER: Final = "default"


class _Lokr:
    """What both kinds of layers share: one adapter, and LyCORIS's scale."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Make the factors; as elsewhere, alpha says nothing where both are whole."""
        super().update_layer(adapter_name, *args, **kwargs)  # type: ignore[misc]
        layer: Any = self
        if adapter_name in layer.lokr_w1 and adapter_name in layer.lokr_w2:
            layer.scaling[adapter_name] = 1.0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Peft's without module dropout, for which it draws a number on the host each time."""
        layer: Any = self
        out: torch.Tensor = layer.base_layer(x, *args, **kwargs)
        if layer.disable_adapters or layer.merged:
            return out
        change: torch.Tensor = layer._get_delta_activations(_ADAPTER, x)
        return out + change.to(out.dtype)


class LokrLinear(_Lokr, Linear):
    """A linear layer, whose change is never made whole."""

    def _get_delta_activations(
        self, adapter_name: str, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        left = (self.lokr_w1[adapter_name] * self.scaling[adapter_name]).to(dtype)
        whole = adapter_name in self.lokr_w2
        right = [self.lokr_w2] if whole else [self.lokr_w2_a, self.lokr_w2_b]
        return kronecker(x.to(dtype), left, [part[adapter_name].to(dtype) for part in right])


class LokrConv2d(_Lokr, Conv2d):
    """A convolution, computed as peft does, in the precision of the base."""

    def _get_delta_activations(
        self, adapter_name: str, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        with autocast_to(x.dtype, x.device):
            change: torch.Tensor = super()._get_delta_activations(adapter_name, x)
        return change


class LokrModel(LoKrModel):
    """Puts these layers into a model."""

    layers_mapping = {torch.nn.Conv2d: LokrConv2d, torch.nn.Linear: LokrLinear}  # noqa: RUF012


def kronecker(x: torch.Tensor, left: torch.Tensor, right: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply by a Kronecker product without making it: `x (left ⊗ right)ᵀ`.

    Args:
        x: `(…, b d)`.
        left: `(a, b)`.
        right: Matrices whose product is `(c, d)`.

    Returns:
        `(…, a c)`.
    """
    low = x.unflatten(-1, (left.shape[1], -1))  # (…, b, d)
    for factor in reversed(right):
        low = functional.linear(low, factor)
    return torch.einsum("ab,...bc->...ac", left, low).flatten(-2)
