"""Layers with adapters: a linear one and its adapter as one operation, in the base's precision.

Peft's layer (0.21) is five operations, and twelve where fp32 adapters meet a bf16 base: every
adapter is cast up and down on its own, in forward and in backward. Here the product of the adapter
is added by the very multiplication that makes it, and all adapters of a model are cast together,
once in a forward. They stay fp32 where they are trained, saved and averaged.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from peft.tuners.lora import Conv2d, Linear
from torch.distributed.tensor import DTensor
from torch.nn import functional

from engine.model.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from engine.model.packing import Packing

_ADAPTER: Final = "default"


class LoraLinear(Linear):
    """Peft's, but for how it computes what is plain: one adapter, no dropout, a dense base.

    Attributes:
        narrow: A and B in the precision of the base, as of this forward; see `narrow_together`.
        keeps: Whether what is computed may be kept, for recomputation, and so not be added to.
    """

    narrow: tuple[torch.Tensor, ...] | None = None
    keeps: bool = False

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`(…, in)` → `(…, out)`."""
        base, dropout = self.base_layer, self.lora_dropout[_ADAPTER]
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        masters = [part[_ADAPTER].weight for part in (self.lora_A, self.lora_B)]
        packing, *packed = _packed(base)
        if (
            args
            or kwargs
            # Not one that FSDP gathers when it is called, whose class is another.
            or type(base) not in (torch.nn.Linear, QuantizedLinear)
            or (packing is None and base.weight.dtype is not dtype)
            or any(isinstance(master, DTensor) for master in masters)
            or (self.training and not isinstance(dropout, torch.nn.Identity))
            or self.disable_adapters
            or self.merged
            or self.active_adapters != [_ADAPTER]
            or (self.lora_variant and not self.lora_magnitude_vector)
        ):
            with autocast_to(x.dtype, x.device):
                return super().forward(x, *args, **kwargs)
        narrow = self.narrow
        if narrow is None or narrow[0].dtype is not dtype:
            narrow = tuple(master.detach().to(dtype) for master in masters)
        flat = x.to(dtype).reshape(-1, x.shape[-1])
        bias = base.bias if base.bias is None else base.bias.to(dtype)
        dora = bool(self.lora_magnitude_vector)
        out: torch.Tensor = _Adapted.apply(
            flat,
            base.weight,
            *packed,
            packing,
            None if dora else bias,
            *masters,
            *narrow,
            self.scaling[_ADAPTER],
            self.keeps,
        )
        if dora:
            out = self._stretched(out, narrow[0], narrow[1])
        return out.view(*x.shape[:-1], out.shape[-1])

    def _stretched(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """DoRA: each output times its magnitude over the length of its row of weights; `(N, out)`.

        What the factor differs from 1 by is added, since 1.001 is 1 in bf16.
        """
        base = self.base_layer
        lengths = row_lengths(base.weight, a, b, self.scaling[_ADAPTER])
        factor = self.lora_magnitude_vector[_ADAPTER].weight / lengths - 1
        out = torch.addcmul(out, out, factor.to(out.dtype))
        return out if base.bias is None else out + base.bias


class LoraConv2d(Conv2d):
    """Peft's, which would else compute its adapter in the precision of the masters."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with autocast_to(x.dtype, x.device):
            return super().forward(x, *args, **kwargs)


def autocast_to(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Autocast, for what is given bf16 or fp16 outside of it."""
    if dtype is torch.float32 or torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def narrow_together(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Have all adapters be cast to `dtype` at the beginning of each forward of the model.

    Forwards that are part of a backward, by which activations are recomputed, find what the whole
    forward found: nothing is trained in between. Adapters that FSDP gathers are cast when used.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]

    @torch.no_grad()
    def narrow(*_: Any) -> None:
        narrow: list[torch.Tensor] = []
        wide: list[torch.Tensor] = []
        for layer in layers:
            masters = [part[_ADAPTER].weight for part in (layer.lora_A, layer.lora_B)]
            if any(isinstance(master, DTensor) for master in masters):
                continue
            if layer.narrow is None or layer.narrow[0].device != masters[0].device:
                layer.narrow = tuple(torch.empty_like(m, dtype=dtype) for m in masters)
            assert layer.narrow is not None
            narrow += layer.narrow
            wide += masters
        if wide:
            torch._foreach_copy_(narrow, wide)

    model.register_forward_pre_hook(narrow)


@torch.no_grad()
def row_lengths(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the row norms of `weight + scale · b a`, `(out,)` in fp32, without computing that sum.

    Peft (0.21) makes it, and an identity of the layer's width. No gradient goes through the
    norms, as in section 4.3 of Liu et al. 2024.
    """
    with torch.autocast(weight.device.type, enabled=False):
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
        cross = ((weight @ a.t()) * b).sum(1, dtype=torch.float32)
        own = ((b @ (a @ a.t())) * b).sum(1, dtype=torch.float32)
        return squares.add_(cross, alpha=2 * scale).add_(own, alpha=scale**2).clamp_(min=0).sqrt_()


class _Adapted(torch.autograd.Function):
    """`x Wᵀ + bias + scale · (x Aᵀ) Bᵀ`, with a frozen W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        codes: torch.Tensor | None,
        packing: Packing | None,
        bias: torch.Tensor | None,
        wide_a: torch.Tensor,
        wide_b: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
        keeps: bool,
    ) -> torch.Tensor:
        """`x (N, in)`, `weight (out, in)`, `a (r, in)`, `b (out, r)` of one precision.

        Of a packed weight only the packed bytes are kept for backward.

        `wide_a` and `wide_b` are the masters of `a` and `b`, which get the gradients.
        """
        if packing is None:
            out = functional.linear(x, weight, bias)
        else:
            out = packing.product(x, weight, weight_scale, codes, bias)
        low = functional.linear(x, a)  # (N, r)
        if keeps:
            out = torch.addmm(out, low, b.t(), alpha=scale)
        else:
            out.addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, weight_scale, codes, a, b, low)
        ctx.packing, ctx.scale, ctx.dtypes = packing, scale, (wide_a.dtype, wide_b.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gradients of the masters come out of their products in fp32."""
        (gradient,) = gradients
        x, weight, weight_scale, codes, a, b, low = ctx.saved_tensors
        of_a = of_b = of_x = None
        of_low = gradient @ b  # (N, r)
        if ctx.scale != 1:
            of_low, low = of_low * ctx.scale, low * ctx.scale
        if ctx.needs_input_grad[6]:
            of_a = product(of_low.t(), x, ctx.dtypes[0])
        if ctx.needs_input_grad[7]:
            of_b = product(gradient.t(), low, ctx.dtypes[1])
        if ctx.needs_input_grad[0]:
            dense = _dense(weight, weight_scale, codes, ctx.packing, gradient.dtype)
            of_x = (gradient @ dense).addmm_(of_low, a)
        return of_x, None, None, None, None, None, of_a, of_b, None, None, None, None


def _packed(
    base: torch.nn.Module,
) -> tuple[Packing | None, torch.Tensor | None, torch.Tensor | None]:
    """How a layer's weight is packed, its scale, and what its bytes stand for."""
    if isinstance(base, QuantizedLinear):
        return base.packing, base.weight_scale, base.codes
    return None, None, None


def _dense(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    codes: torch.Tensor | None,
    packing: Packing | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a weight in the precision that computes."""
    return weight if packing is None else packing.unpack(weight, scale, codes, dtype)


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply two matrices, and return the product in `dtype`.

    On a GPU, the sum is not rounded before it is returned.
    """
    if left.dtype is dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
