"""Supply values that fake tensors lack, and make the CPU imitate a GPU's memory use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.packing import UNPACK, bytes_of_indices

if TYPE_CHECKING:
    from collections.abc import Callable


# -- assumptions ----------------------------------------------------------------------------
# Answer questions that a fake tensor cannot: it has a shape but no values.


_ATEN: Final = torch.ops.aten
_OVER_MASKS: Final = (_ATEN.all.default, _ATEN.all.dim)


class Assume(TorchDispatchMode):
    """While active, conditions hold, masks are true everywhere, and numbers are 1.

    Args:
        all_true: The result of `mask.all()`; True lets models skip the mask.
    """

    def __init__(self, *, all_true: bool = True) -> None:
        super().__init__()
        self._all_true = all_true

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
            if func in _OVER_MASKS:
                result.assumed = self._all_true
            return result
        except DataDependentOutputException:
            return self._number(func, args)
        except DynamicOutputShapeException:
            return _everywhere(func, args)

    def _number(self, func: Any, args: tuple[Any, ...]) -> Any:
        assumed = getattr(args[0], "assumed", True)
        if func is not _ATEN._local_scalar_dense.default or args[0].dtype is torch.bool:
            return assumed
        return 0.5 if args[0].dtype.is_floating_point else 1


def _everywhere(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of an operation whose mask is true everywhere.

    Raises:
        NotImplementedError: The operation is not supported.
    """
    if func is _ATEN.nonzero.default:
        return torch.stack(_places(args[0]), dim=1)
    if func is _ATEN.masked_select.default:
        return args[0].flatten()
    if func in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            masks = index is not None and index.dtype in (torch.bool, torch.uint8)
            indices += _places(index) if masks else [index]
        return func(args[0], indices, *args[2:])
    raise NotImplementedError(f"{func} of a tensor without numbers")


def _places(mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices of all elements of a mask, one vector per dimension."""
    count = mask.numel()
    return [torch.empty(count, dtype=torch.int64, device=mask.device) for _ in mask.shape]


# -- cuda -----------------------------------------------------------------------------------
# Differences between a GPU and the CPU that fake tensors pretend to be on.
#
# Fake tensors are on the CPU, since torch needs a driver for other devices. Three differences
# affect memory: autocast converts other functions to fp32, `rms_norm` consists of single steps that
# keep tensors which the fused kernel does not keep, and attention's backward has no accumulator.


# Functions from the lists in torch's `ATen/autocast_mode.h` (2.13) that models here call and that
# CPU autocast does not convert.
_TO_FP32: Final[tuple[Callable[..., Any], ...]] = tuple(
    getattr(place, name)
    for place in (torch, torch.Tensor, functional)
    for name in (
        "exp",
        "log",
        "log1p",
        "reciprocal",
        "rsqrt",
        "pow",
        "__pow__",
        "__rpow__",
        "softplus",
        "layer_norm",
        "group_norm",
        "cosine_similarity",
        "logsumexp",
        "softmax",
        "log_softmax",
        "prod",
        "cumprod",
        "cumsum",
        "sum",
        "norm",
    )
    if hasattr(place, name)
)
_RMS_NORM: Final = (functional.rms_norm, torch.rms_norm)
_ATTENTION_BACKWARD: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)


class AsOnCuda(TorchFunctionMode):
    """While active, functions keep the same tensors in memory as on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.backward, torch.autograd.backward):
            # A mode is disabled while it handles a function, but backward may recompute forwards
            # under it.
            with self:
                return _run_backward(*args, **kwargs)
        if func in _RMS_NORM:
            return _rms_norm(*args, **kwargs)
        if func in _FP32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_widened, args), **{k: _widened(v) for k, v in kwargs.items()})
        return func(*args, **kwargs)


_FP32: Final = frozenset(_TO_FP32)


def temporary(function: Any, given: Any) -> int:
    """Return the bytes that an operation takes only while it runs, and only on a GPU.

    Flash attention accumulates the gradient of queries in fp32, plus one number per query. Weights
    are unpacked by torch where no other kernel can, which takes more.
    """
    if function is UNPACK:
        packed, _, codes, dtype, *_ = given
        indices = bytes_of_indices(packed, codes)
        return indices and indices + 2 * packed.numel() * dtype.itemsize  # beside the result
    if function is not _ATTENTION_BACKWARD:
        return 0
    query = given[1]  # (B, H, L, D)
    batch, heads, length, width = query.shape
    tile, lane = 128, 32
    length = math.ceil(length / tile) * tile
    width = math.ceil(width / lane) * lane
    return 4 * batch * heads * length * (width + 1)


def _run_backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    """Run the final call of `torch.autograd.backward` (torch 2.13), bypassing function modes."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    gradients = tuple(torch.ones_like(root) for root in roots)
    _engine_run_backward(
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _widened(value: Any) -> Any:
    """Convert a half-precision tensor to fp32; return other values unchanged."""
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def _rms_norm(
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        x, weight = _widened(x), _widened(weight)
    normed: torch.Tensor = _FusedRmsNorm.apply(x, weight, len(normalized_shape))
    return normed


class _FusedRmsNorm(torch.autograd.Function):
    """The memory behavior of the fused kernel: it keeps input, weight and 1 / rms."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dimensions: int
    ) -> torch.Tensor:
        rstd = x.new_empty(x.shape[:-dimensions], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        # A copy reads and writes as much as the kernel does, for those who count.
        return x.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        mine = torch.add(x, grad, out=torch.empty_like(x)) if ctx.needs_input_grad[0] else None
        trained = weight is not None and ctx.needs_input_grad[1]
        return mine, torch.empty_like(weight) if trained else None, None
