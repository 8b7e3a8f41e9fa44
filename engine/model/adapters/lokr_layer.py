"""LoKr: a layer's weight update is the Kronecker product of two small matrices.

After Yeh et al. 2023 (LyCORIS). Peft (0.21) forms the full update, `(out, in)` in fp32, in every
forward, and keeps it for backward, which for a large model takes as much memory as its weights.
Multiplying an input by the update needs only the two factors. It does not touch the base layer's
weight, which may be quantized, or sharded in its own unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from peft.tuners.lokr import Conv2d, Linear, LoKrModel
from torch.nn import functional

from engine.model.adapters.lora_layer import autocast_to, product

if TYPE_CHECKING:
    from collections.abc import Sequence

_ADAPTER: Final = "default"


class _Lokr:
    """Shared by both layer types: one adapter, and LyCORIS's scale."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Create the factors. As in LyCORIS, alpha is ignored if neither is factorized."""
        super().update_layer(adapter_name, *args, **kwargs)  # type: ignore[misc]
        layer: Any = self
        if adapter_name in layer.lokr_w1 and adapter_name in layer.lokr_w2:
            layer.scaling[adapter_name] = 1.0

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replace peft's forward, which draws a number on the host for module dropout."""
        layer: Any = self
        out: torch.Tensor = layer.base_layer(x, *args, **kwargs)
        if layer.disable_adapters or layer.merged:
            return out
        change: torch.Tensor = layer._get_delta_activations(_ADAPTER, x)
        return out + change.to(out.dtype)


class LokrLinear(_Lokr, Linear):
    """A linear layer whose weight update is never materialized."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`(…, in)` → `(…, out)`."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once, for the base too
        return super().forward(x, *args, **kwargs)

    def _get_delta_activations(
        self, adapter_name: str, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        whole = adapter_name in self.lokr_w2
        right = [self.lokr_w2] if whole else [self.lokr_w2_a, self.lokr_w2_b]
        left, scale = self.lokr_w1[adapter_name], self.scaling[adapter_name]
        return kronecker(x, left, [part[adapter_name] for part in right], scale)


class LokrConv2d(_Lokr, Conv2d):
    """A convolution, computed as in peft, in the precision of the base."""

    def _get_delta_activations(
        self, adapter_name: str, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        with autocast_to(x.dtype, x.device):
            change: torch.Tensor = super()._get_delta_activations(adapter_name, x)
        return change


class LokrModel(LoKrModel):
    """Injects these layers into a model."""

    layers_mapping = {torch.nn.Conv2d: LokrConv2d, torch.nn.Linear: LokrLinear}  # noqa: RUF012


def kronecker(
    x: torch.Tensor, left: torch.Tensor, right: Sequence[torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """Multiply by a Kronecker product without forming it: `scale · x (left ⊗ right)ᵀ`.

    Args:
        x: `(…, b d)`, in the compute precision.
        left: `(a, b)`.
        right: Matrices whose product is `(c, d)`.
        scale: A factor.

    Returns:
        `(…, a c)`.
    """
    out: torch.Tensor = _Kronecker.apply(x, scale, left, *right)
    return out


class _Kronecker(torch.autograd.Function):
    """See `kronecker`. Backward recomputes input-sized tensors instead of keeping them.

    Gradients of fp32 matrices are returned in fp32 straight from their matrix products.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, *masters: torch.Tensor) -> torch.Tensor:
        first = masters[0] if scale == 1 else masters[0] * scale
        left, *right = (master.to(x.dtype) for master in (first, *masters[1:]))
        ctx.save_for_backward(x, left, *right)
        ctx.scale, ctx.dtypes = scale, [master.dtype for master in masters]
        return torch.einsum("ab,...bc->...ac", left, _chain(x, left, right)[-1]).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, left, *right = ctx.saved_tensors
        outer = gradient.unflatten(-1, (len(left), -1))  # (…, a, c)
        *inputs, low = _chain(x, left, right)
        of_left = product(
            outer.movedim(-2, 0).flatten(1), low.movedim(-2, 0).flatten(1).t(), ctx.dtypes[0]
        )
        if ctx.scale != 1:
            of_left = of_left * ctx.scale
        of_low = torch.einsum("ab,...ac->...bc", left, outer)
        of_right = []
        for factor, given, dtype in zip(right, reversed(inputs), ctx.dtypes[1:], strict=True):
            of_right.append(product(of_low.flatten(0, -2).t(), given.flatten(0, -2), dtype))
            of_low = of_low @ factor
        return of_low.flatten(-2), None, of_left, *of_right


def _chain(
    x: torch.Tensor, left: torch.Tensor, right: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the input `(…, b, d)` and each product along the chain, the last `(…, b, c)`."""
    steps = [x.unflatten(-1, (left.shape[1], -1))]
    for factor in reversed(right):
        steps.append(functional.linear(steps[-1], factor))
    return steps
