"""Layers with adapters: base and adapter as one operation, in the base's precision.

Peft's layer (0.21) takes five operations, and twelve if fp32 adapters meet a bf16 base, since every
adapter is cast separately in forward and backward. Here, the multiplication that computes the
adapter's product also adds it to the output, and all adapters of a model are cast together, once
per forward. They stay fp32 for training, saving and averaging.
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
    """Replaces peft's layer for the plain case: one adapter, no dropout, a dense base.

    Attributes:
        narrow: A and B in the base's precision, valid for this forward; see `narrow_together`.
        keeps: Whether selective recomputation may keep the output, which then must not be changed
            in place.
    """

    narrow: tuple[torch.Tensor, ...] | None = None
    keeps: bool = False

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map `(…, in)` to `(…, out)`."""
        base, dropout = self.base_layer, self.lora_dropout[_ADAPTER]
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        masters = [part[_ADAPTER].weight for part in (self.lora_A, self.lora_B)]
        packing, *packed = _packed(base)
        if (
            args
            or kwargs
            # This excludes layers that FSDP gathers on call, since their class differs.
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
            out = self._apply_dora(out, narrow[0], narrow[1])
        return out.view(*x.shape[:-1], out.shape[-1])

    def _apply_dora(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Apply DoRA: scale each output by its magnitude over its weight row's norm; `(N, out)`.

        Add the factor's difference from 1, since 1.001 rounds to 1 in bf16.
        """
        base = self.base_layer
        lengths = row_lengths(base.weight, a, b, self.scaling[_ADAPTER])
        factor = self.lora_magnitude_vector[_ADAPTER].weight / lengths - 1
        out = torch.addcmul(out, out, factor.to(out.dtype))
        return out if base.bias is None else out + base.bias


class LoraConv2d(Conv2d):
    """Replaces peft's layer, which would compute its adapter in the masters' precision."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with autocast_to(x.dtype, x.device):
            return super().forward(x, *args, **kwargs)


def autocast_to(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast for bf16 or fp16 inputs outside of autocast, else a null context."""
    if dtype is torch.float32 or torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def narrow_together(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast all adapters to `dtype` together at the start of each forward of the model.

    Forwards inside a backward, which recompute activations, reuse the same casts, since nothing is
    trained in between. Adapters that FSDP gathers are cast when used.
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

    Peft (0.21) computes it, and an identity matrix of the layer's width. Gradients do not flow
    through the norms, as in section 4.3 of Liu et al. 2024.
    """
    with torch.autocast(weight.device.type, enabled=False):
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
        cross = ((weight @ a.t()) * b).sum(1, dtype=torch.float32)
        own = ((b @ (a @ a.t())) * b).sum(1, dtype=torch.float32)
        return squares.add_(cross, alpha=2 * scale).add_(own, alpha=scale**2).clamp_(min=0).sqrt_()


class _Adapted(torch.autograd.Function):
    """Compute `x Wᵀ + bias + scale · (x Aᵀ) Bᵀ`, with a frozen W."""

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
        """Compute the output for `x (N, in)`, `weight (out, in)`, `a (r, in)`, `b (out, r)`.

        All have the same precision. For a packed weight, only the packed bytes are kept for
        backward. `wide_a` and `wide_b` are the masters of `a` and `b`, which receive the gradients.
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
        """Return gradients of the masters in fp32, straight from their matrix products."""
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
            if ctx.packing is not None:
                weight = ctx.packing.unpack(weight, weight_scale, codes, gradient.dtype, gradient)
            of_x = (gradient @ weight).addmm_(of_low, a)
        return of_x, None, None, None, None, None, of_a, of_b, None, None, None, None


def _packed(
    base: torch.nn.Module,
) -> tuple[Packing | None, torch.Tensor | None, torch.Tensor | None]:
    """Return a layer's packing, the scale of its weight, and the values of its codes."""
    if isinstance(base, QuantizedLinear):
        return base.packing, base.weight_scale, base.codes
    return None, None, None


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply two matrices, and return the product in `dtype`.

    On a GPU, the fp32 accumulator is returned without rounding.
    """
    if left.dtype is dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
