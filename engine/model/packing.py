"""Frozen weights in 8 or 4 bits: how they are packed, and how they become numbers again.

Packed weights are plain `uint8` tensors. In float8 FSDP2 would cast them to its `param_dtype`
before it gathers them, and gloo does not know float8. Scales are fp32 and have a row for each row
of the weight, so that both are sharded alike.

Sources: fp8 is OCP's E4M3 without infinities; nf4 is NormalFloat of Dettmers et al. 2023 (QLoRA,
appendix E), packed as bitsandbytes packs it, but with a scale in fp32 for each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.spec.values.value_types import BasePrecision


_FP8: Final = torch.float8_e4m3fn
_LARGEST_FP8: Final = 448.0
_LARGEST_INT8: Final = 127.0
_EXPONENT: Final = 0x7F800000  # these bits of fp32 alone are a power of two
_SMALLEST: Final = 2.0**-100  # of a row's largest number, so that no scale is zero
_AT_ONCE: Final = 2**22  # bytes of nf4 that torch unpacks together, by indices of 16 MiB
_INDEX: Final = 4  # bytes
_FIRST: Final = (8, 0)  # compute capability that has bf16
NF4_BLOCK: Final = 64  # weights that share a scale, along a row

# Quantiles of a normal distribution, scaled to [-1, 1]; zero is among them.
NF4_CODES: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def packing_of(scheme: BasePrecision) -> Packing | None:
    """Return the packing of a scheme; None of `none`."""
    return None if scheme == "none" else Packing(scheme)


@dataclass(frozen=True)
class Packing:
    """A scheme of `base_precision`.

    Attributes:
        scheme: Its name there.
        scaled: Whether products are computed in fp8, for which their inputs are rounded too.
        traced: Whether it is only counted what unpacking on a GPU takes.
    """

    scheme: BasePrecision
    scaled: bool = False
    traced: bool = False

    @property
    def per_byte(self) -> int:
        """Weights in a byte."""
        return 2 if self.scheme == "nf4" else 1

    def fits(self, columns: int) -> bool:
        """Whether rows of that many weights can be packed."""
        return self.scheme != "nf4" or columns % NF4_BLOCK == 0

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Shapes of the packed weight and of its scale; None for a scheme without one."""
        if self.scheme == "fp8":
            return (rows, columns), None
        if self.scheme == "nf4":
            return (rows, columns // 2), (rows, columns // NF4_BLOCK)
        return (rows, columns), (rows, 1)

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a packed weight and its scale."""
        weight, scale = self.shapes(rows, columns)
        return weight[0] * weight[1] + (4 * scale[0] * scale[1] if scale else 0)

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Round some rows of a weight.

        Args:
            weight: `(rows, columns)`, of any float type, on any device.

        Returns:
            Packed weight and scale of the shapes of `shapes`, on the same device.
        """
        wide = weight.float()
        if self.scheme == "fp8":
            return wide.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(_FP8).view(torch.uint8), None
        if self.scheme == "nf4":
            return _pack_nf4(wide)
        largest = _LARGEST_INT8 if self.scheme == "int8" else _LARGEST_FP8
        scale = wide.abs().amax(1, keepdim=True) / largest
        wide = (wide / _no_zero(scale)).clamp_(-largest, largest)
        packed = wide.round_().to(torch.int8) if self.scheme == "int8" else wide.to(_FP8)
        return packed.view(torch.uint8), scale

    def unpack(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor | None,
        codes: torch.Tensor | None,
        dtype: torch.dtype,
        after: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weight in the compute precision, `(rows, columns)`.

        The scale is multiplied in fp32 and the product rounded once.

        Args:
            packed: Of `pack`.
            scale: Of `pack`.
            codes: Of `code_table`; None where the scheme has none.
            dtype: The precision.
            after: In backward, the gradient that the weight is needed for: a compiled backward
                unpacks once it has that, and so does not keep the weight from forward on.
        """
        if self.traced or torch.compiler.is_compiling():
            return unpack_in_graph(packed, scale, codes, dtype, self.scheme, after)
        return _unpack(self, packed, scale, codes, dtype)

    def unpack_by_torch(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor | None,
        codes: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Unpack with torch's own kernels: one of fp8, two of int8 and scaled fp8, three of nf4.

        For any device and layout, and what `engine.model.unpack_kernels` is compared with.
        """
        if codes is not None:
            assert scale is not None
            weight = _look_up(packed, codes.to(dtype))
            weight.view(*scale.shape, NF4_BLOCK).mul_(scale.unsqueeze(-1))
            return weight
        stored = torch.int8 if self.scheme == "int8" else _FP8
        weight = packed.view(stored).to(dtype)
        return weight if scale is None else weight.mul_(scale)

    def product(
        self,
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor | None,
        codes: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """`x Wᵀ + bias` in the precision of `x`, `(…, in)` → `(…, out)`.

        Args:
            x: What the layer is given.
            packed: Of `pack`.
            scale: Of `pack`.
            codes: Of `code_table`.
            bias: In the precision of `x`.
        """
        if not self.scaled:
            return functional.linear(x, self.unpack(packed, scale, codes, x.dtype), bias)
        out = scaled_product(x.reshape(-1, x.shape[-1]), packed, scale, bias)
        return out.view(*x.shape[:-1], len(packed))

    def code_table(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what each byte stands for, `(256, 2)`; None where there is no table."""
        if self.scheme != "nf4":
            return None
        codes = torch.tensor(NF4_CODES, dtype=torch.float32)
        byte = torch.arange(256)
        return torch.stack([codes[byte >> 4], codes[byte & 15]], dim=1).to(dtype)


@torch.library.custom_op(
    "fsdp_tui::unpack",
    mutates_args=(),
    schema="(Tensor packed, Tensor? scale, Tensor? codes, ScalarType dtype, str scheme,"
    " Tensor? after) -> Tensor",
)
def unpack_in_graph(
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    codes: torch.Tensor | None,
    dtype: torch.dtype,
    scheme: BasePrecision,
    after: torch.Tensor | None,
) -> torch.Tensor:
    """Unpack as a single operation of a compiled graph.

    AOTAutograd would see that forward and backward unpack the same, and keep the weight in between:
    a model in bf16, in the end. It does not where backward's depends on a gradient.
    """
    return _unpack(Packing(scheme), packed, scale, codes, dtype)


@unpack_in_graph.register_fake
def _(
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    codes: torch.Tensor | None,
    dtype: torch.dtype,
    scheme: BasePrecision,
    after: torch.Tensor | None,
) -> torch.Tensor:
    rows, columns = packed.shape
    return packed.new_empty((rows, columns * Packing(scheme).per_byte), dtype=dtype)


UNPACK: Final = torch.ops.fsdp_tui.unpack.default


def bytes_by_torch(
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    codes: torch.Tensor | None,
    weight: torch.Tensor,
) -> int:
    """Return the bytes that `unpack_by_torch` reads and writes."""
    of_weight = weight.numel() * weight.itemsize
    if scale is None:
        return packed.numel() + of_weight
    of_indices = 2 * packed.numel() * _INDEX if codes is not None else 0
    return packed.numel() + of_indices + 3 * of_weight + scale.numel() * scale.itemsize


def bytes_of_indices(packed: torch.Tensor, codes: torch.Tensor | None) -> int:
    """Return what `unpack_by_torch` needs besides the weight, in bytes."""
    rows, columns = packed.shape
    at_once = min(rows, max(1, _AT_ONCE // columns)) * columns
    return at_once * _INDEX if codes is not None else 0


def _unpack(
    packing: Packing,
    packed: torch.Tensor,
    scale: torch.Tensor | None,
    codes: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Unpack by one kernel of ours where that can be, else by torch's.

    Not of fp8, for which torch needs one as well, nor of what is no plain tensor: a `DTensor`, or
    one without memory of the estimate.
    """
    if (
        scale is not None
        and packed.is_cuda
        and type(packed) in (torch.Tensor, torch.nn.Parameter)
        and packed.get_device() == torch.cuda.current_device()
        and packed.is_contiguous()
        and scale.is_contiguous()
        and (kernel := find_kernel(packed.get_device())[0]) is not None
    ):
        return kernel(packed, scale, codes, dtype, packing.scheme)
    return packing.unpack_by_torch(packed, scale, codes, dtype)


@cache
def find_kernel(index: int) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """Return what unpacks weights on a GPU in one launch, or None and why there is nothing.

    Triton needs a C compiler, Python's headers and a directory for what it compiles: only trying
    tells. Ranks may differ, since the numbers do not.

    Args:
        index: Of the current device.
    """
    if torch.version.hip or torch.cuda.get_device_capability(index) < _FIRST:
        return None, "needs an NVIDIA GPU of compute capability 8.0 (Ampere) or later"
    try:
        from engine.model.unpack_kernels import unpack

        device = torch.device("cuda", index)
        return (unpack, "") if _is_equal(unpack, device) else (None, "computes wrong numbers")
    except Exception as error:  # of Triton, the compiler that it calls, the driver
        words = str(error).strip().rpartition("\n")[2][:200]
        return None, f"fails ({type(error).__name__}: {words})"


def unpacked_by(device: torch.device) -> str:
    """Say for the log what unpacks weights on a rank's device."""
    if device.type != "cuda":
        return "torch"
    kernel, why_not = find_kernel(torch.cuda.current_device())
    return "Triton" if kernel else f"torch, since Triton {why_not}"


def _is_equal(kernel: Callable[..., torch.Tensor], device: torch.device) -> bool:
    """Return whether a kernel computes what torch does, of every byte; waits once."""
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    packed = torch.arange(256, device=device).to(torch.uint8).expand(3, 256).contiguous()
    for packing in (Packing("nf4"), Packing("int8"), Packing("fp8_scaled")):
        _, shape = packing.shapes(3, 256 * packing.per_byte)
        assert shape is not None
        scale = torch.linspace(1e-3, 2.0, math.prod(shape), device=device).view(shape)
        codes = packing.code_table(torch.bfloat16)
        given: Any = packed, scale, None if codes is None else codes.to(device), torch.bfloat16
        unpacked, expected = kernel(*given, packing.scheme), packing.unpack_by_torch(*given)
        wrong += (unpacked.nan_to_num(1.0) != expected.nan_to_num(1.0)).sum()
    return not wrong.item()


def scaled_product(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `x Wᵀ + bias` of fp8 with a scale for each row, `(N, out)` in the precision of `x`.

    Dynamo takes it whole, see `engine.model.compiled`.

    Args:
        x: `(N, in)`.
        packed: E4M3 as bytes, `(out, in)`.
        scale: fp32, `(out, 1)`; None for ones.
        bias: `(out,)` in the precision of `x`.
    """
    rounded, scale_x = round_rows(x)
    if scale is None:
        scale = scale_x.new_ones(len(packed), 1)
    # Sums in full: fast ones of Hopper keep 14 bits, see docs/training.md for what that costs.
    return functional.scaled_mm(
        rounded,
        packed.view(_FP8).t(),
        scale_x,
        ScalingType.RowWise,
        scale.t(),
        ScalingType.RowWise,
        bias=bias,
        output_dtype=x.dtype,
        use_fast_accum=False,
    )


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to E4M3, whatever the other rows are: ranks compute what one would.

    Scales are powers of two, so that dividing by them rounds nothing, and no wide copy is made.

    Args:
        x: `(N, in)`, bf16 or fp32.

    Returns:
        E4M3 `(N, in)`, and the scales in fp32, `(N, 1)`.
    """
    largest = torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True).float()
    power = largest.clamp_(min=_SMALLEST).view(torch.int32) & _EXPONENT  # ≤ largest < 2 · power
    scale = power.view(torch.float32) * 2**-7  # so that nothing exceeds 256
    rounded = (x / scale.to(x.dtype)).to(_FP8)
    return rounded.contiguous(), scale


def _pack_nf4(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each weight to the nearest code of its block; the first of two is in the high bits."""
    blocks = wide.view(len(wide), -1, NF4_BLOCK)
    scale = blocks.abs().amax(2)
    middles = _middles(wide.device)
    places = torch.bucketize(blocks / _no_zero(scale).unsqueeze(2), middles, out_int32=True)
    places = places.view(len(wide), -1, 2).to(torch.uint8)
    return places[..., 0] * 16 + places[..., 1], scale


@cache
def _middles(device: torch.device) -> torch.Tensor:
    """Return the limits between nf4's codes, `(15,)`; made once, since the copy to a GPU waits."""
    codes = torch.tensor(NF4_CODES, dtype=torch.float32, device=device)
    return (codes[1:] + codes[:-1]) / 2


def _look_up(packed: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Look up the codes of packed bytes, `(rows, 2 * columns)`.

    Rows are processed in chunks, since indices take 4 bytes.
    """
    rows, columns = packed.shape
    weight = torch.empty(rows, 2 * columns, dtype=codes.dtype, device=packed.device)
    step = max(1, _AT_ONCE // columns)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        # Without a name, the indices are gone before the next ones are made.
        torch.index_select(codes, 0, packed[part].view(-1).int(), out=weight[part].view(-1, 2))
    return weight


def _no_zero(scale: torch.Tensor) -> torch.Tensor:
    """Zeros, which are of weights that are all zero, as ones."""
    return torch.where(scale > 0, scale, 1.0)
