"""Triton kernels that unpack frozen weights: read each packed byte once, write each weight once.

Imported for GPUs only, since Triton comes with torch builds for CUDA. They compute what
`Packing.unpack_by_torch` does, bit for bit: a number is rounded to the result's precision,
multiplied by its fp32 scale in fp32, and rounded once more.

E4M3 is decoded by shifting its bits into fp16 rather than by a conversion of its own, which Triton
has from compute capability 8.9 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

    from jobs.spec.values.value_types import BasePrecision


_BLOCKS: Final = 64  # blocks of nf4 that a program unpacks: 16 bytes for each of 128 threads
_COLUMNS: Final = 1024  # 8-bit weights of a row that a program unpacks


def unpack(
    packed: torch.Tensor,
    scale: torch.Tensor,
    codes: torch.Tensor | None,
    dtype: torch.dtype,
    scheme: BasePrecision,
) -> torch.Tensor:
    """Return the weight, `(rows, columns)`: one launch on the current stream, no synchronization.

    Args:
        packed: Contiguous bytes, on the current device.
        scale: Contiguous, for each row or, of nf4, each block.
        codes: `Packing.code_table`, of any precision; None for 8 bits.
        dtype: The precision of the result.
        scheme: How it is packed: `nf4`, `int8` or `fp8_scaled`.
    """
    rows, columns = packed.shape
    if codes is not None:
        weight = packed.new_empty((rows, 2 * columns), dtype=dtype)
        blocks = scale.numel()
        of_block = packed.numel() // blocks
        unpack_nf4[(triton.cdiv(blocks, _BLOCKS),)](
            packed, scale, codes, weight, blocks, _BLOCKS, of_block
        )
        return weight
    weight = packed.new_empty((rows, columns), dtype=dtype)
    tiles = triton.cdiv(columns, _COLUMNS)
    unpack_rows[(rows * tiles,)](
        packed, scale, weight, columns, tiles, scheme == "fp8_scaled", _COLUMNS
    )
    return weight


@triton.jit  # type: ignore[untyped-decorator]
def unpack_nf4(  # type: ignore[no-untyped-def]
    packed,
    scale,
    codes,
    weight,
    blocks,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Unpack `BLOCKS` blocks of `BYTES` bytes, of `blocks` in all; the last program's may be fewer.

    Row n of the first 16 in `codes (256, 2)` has the value of a low half of n in its second column:
    64 bytes of bf16, which stay in L1.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(packed + at, mask=inside[:, None], other=0).to(tl.int32)
    factor = tl.load(scale + block, mask=inside, other=0.0)[:, None]
    dtype = weight.dtype.element_ty
    high = tl.load(codes + 2 * (byte >> 4) + 1).to(dtype).to(tl.float32) * factor
    low = tl.load(codes + 2 * (byte & 15) + 1).to(dtype).to(tl.float32) * factor
    both = tl.interleave(high.to(dtype), low.to(dtype))
    to = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(weight + to, both, mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def unpack_rows(  # type: ignore[no-untyped-def]
    packed,
    scale,
    weight,
    columns,
    tiles,
    FP8: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Unpack up to `COLUMNS` weights of 8 bits of a row, one of its `tiles`.

    Every such number is exact in fp16 and bf16, so that it is rounded once, after the scale.
    """
    row = tl.program_id(0) // tiles
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    at = row.to(tl.int64) * columns + column
    byte = tl.load(packed + at, mask=inside, other=0)
    if FP8:
        bits = byte.to(tl.int16)
        magnitude = bits & 0x7F
        # Its exponent is biased by 7 and fp16's by 15, so this is too small by 2 ** 8.
        half = ((bits & 0x80) << 8 | magnitude << 7).to(tl.float16, bitcast=True)
        number = tl.where(magnitude == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    else:
        number = byte.to(tl.int8, bitcast=True).to(tl.float32)
    number *= tl.load(scale + row)
    tl.store(weight + at, number.to(weight.dtype.element_ty), mask=inside)
