"""`python unpacking.py interpreted | compiled`: what the Triton kernels that unpack weights do.

Run by an interpreter that has Triton. `interpreted`, with TRITON_INTERPRET=1, runs them without a
GPU and prints how many cases equal torch's numbers. `compiled` compiles them for GPUs that need not
be here, and prints what a thread loads and stores.
"""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any, Final

import torch

from engine.model.packing import Packing

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
CASES: Final = 12  # shapes of each scheme
THREADS: Final = 128
_ACCESS: Final = re.compile(r"\b(ld|st)\.global(?:\.L\w+::\w+)*(?:\.v(\d))?\.b(\d+)")


def interpreted() -> dict[str, int]:
    """Compare shapes with and without a partial last tile; returns how many were equal."""
    draws = random.Random(0)
    equal = {}
    for packing in (Packing("nf4"), Packing("int8"), Packing("fp8_scaled")):
        count = 0
        for number in range(CASES):
            rows = draws.randint(1, 9)
            columns = draws.choice((1, 7, 16, 96, 1000, 1024, 1025, 1100))
            if packing.scheme == "nf4":
                rows, columns = (1, 64 * 64) if number == 0 else (rows, 64 * draws.randint(1, 9))
            for dtype in DTYPES:
                count += _is_equal(packing, rows, columns, dtype, number)
        equal[packing.scheme] = count
    return equal


def _is_equal(packing: Packing, rows: int, columns: int, dtype: torch.dtype, seed: int) -> bool:
    """Compare one weight, of any bytes and with scales that make some numbers subnormal."""
    generator = torch.Generator().manual_seed(seed)
    shape, of_scale = packing.shapes(rows, columns)
    assert of_scale is not None
    packed = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = torch.randn(of_scale, generator=generator) * 10.0 ** -(seed % 4 * 2)
    scale[0, 0] = 1e-40 if dtype is torch.float32 else 1e-6
    codes = packing.code_table(dtype)
    from engine.model import unpack_kernels  # where Triton is

    found = unpack_kernels.unpack(packed, scale, codes, dtype, packing.scheme)
    if dtype is torch.bfloat16:
        # The interpreter cuts bits off where a GPU rounds: so does this.
        wide = None if codes is None else codes.float()
        exact = packing.unpack_by_torch(packed, scale, wide, torch.float32)
        expected = (exact.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()
    else:
        expected = packing.unpack_by_torch(packed, scale, codes, dtype)
    nan = expected.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(found[~nan], expected[~nan])


def compiled() -> dict[str, Any]:
    """Return for each scheme and compute capability what the PTX of bf16 weights says."""
    return {
        f"{scheme} {capability}": _read(scheme, capability)
        for scheme in ("nf4", "int8", "fp8_scaled")
        for capability in (80, 90, 120)
    }


def _read(scheme: str, capability: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.model import unpack_kernels

    nf4 = scheme == "nf4"
    fn = unpack_kernels.unpack_nf4 if nf4 else unpack_kernels.unpack_rows
    constants: dict[str, Any] = (
        {"BLOCKS": unpack_kernels._BLOCKS, "BYTES": 32}
        if nf4
        else {"FP8": scheme == "fp8_scaled", "COLUMNS": unpack_kernels._COLUMNS}
    )
    types = {"packed": "*u8", "scale": "*fp32", "codes": "*bf16", "weight": "*bf16"}
    names = [name for name in fn.arg_names if name not in constants]
    signature = {name: types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=fn,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(len(names))},
    )
    target = GPUTarget("cuda", capability, 32)
    text = triton.compile(source, target=target, options={"num_warps": THREADS // 32}).asm["ptx"]
    bytes_of = {"packed": 0, "stored": 0}
    for access, vector, bits in _ACCESS.findall(text):
        if access == "st":
            bytes_of["stored"] += int(vector or 1) * int(bits) // 8
        elif vector:  # scales and codes are loaded one by one
            bytes_of["packed"] += int(vector) * int(bits) // 8
    tile = constants["BLOCKS"] * constants["BYTES"] if nf4 else constants["COLUMNS"]
    return bytes_of | {
        "tile": tile,
        "scales": constants["BLOCKS"] if nf4 else 1,
        "rounds to nearest": "cvt.rn.bf16x2.f32" in text,
        "flushes subnormal numbers": ".ftz" in text,
    }


if __name__ == "__main__":
    print(json.dumps({"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()))
