"""A model as block detection would describe it, for tests of what shows it."""

from __future__ import annotations

from typing import Any

from jobs.models.blocks import BlockClass, Detection
from jobs.models.parts import Part, Parts

DOUBLE, SINGLE = "FluxTransformerBlock", "FluxSingleTransformerBlock"
_M = 10**6

# FLUX.1's shape: 19 double and 38 single blocks, 11.9 B parameters.
_PARTS = Parts(
    (
        Part("AdaLayerNormZero", 56 * _M),
        Part("FeedForward", 76 * _M),
        Part("FluxAttention", 76 * _M),
        Part(DOUBLE, 0, ((0, 2), (1, 2), (2, 1))),
        Part("AdaLayerNormZeroSingle", 28 * _M),
        Part("FluxAttention", 28 * _M),
        Part(SINGLE, 85 * _M, ((4, 1), (5, 1))),
        Part("FluxTransformer2DModel", 64 * _M, ((3, 19), (6, 38))),
    )
)


def flux(**changes: Any) -> Detection:
    """FLUX.1 dev in bf16; two of its classes are recommended."""
    total = _PARTS.total()

    def one(name: str, count: int, each: int, where: list[str], all_of: int = 0) -> BlockClass:
        everything = all_of or count * each
        return BlockClass(
            name,
            count,
            each,
            everything,
            everything / total,
            name in (DOUBLE, SINGLE),
            name in (DOUBLE, SINGLE),
            name in (DOUBLE, SINGLE),
            where,
        )

    def within(blocks: str, part: str) -> list[str]:
        return [f"{blocks}.{number}{part}" for number in range(3)]

    classes = [
        one(SINGLE, 38, 141 * _M, within("single_transformer_blocks", "")),
        one(DOUBLE, 19, 340 * _M, within("transformer_blocks", "")),
        one("AdaLayerNormZero", 38, 56 * _M, within("transformer_blocks", ".norm1")),
        one("FeedForward", 38, 76 * _M, within("transformer_blocks", ".ff")),
        one(
            "FluxAttention",
            57,
            76 * _M,
            within("transformer_blocks", ".attn"),
            19 * 76 * _M + 38 * 28 * _M,
        ),
        one("AdaLayerNormZeroSingle", 38, 28 * _M, within("single_transformer_blocks", ".norm")),
    ]
    facts: dict[str, Any] = {
        "model_family": "flux",
        "model_flavour": "dev",
        "pretrained_model": "black-forest-labs/FLUX.1-dev",
        "model_class": "FluxTransformer2DModel",
        "total_params": total,
        "no_split_modules": [DOUBLE, SINGLE],
        "cached": True,
        "classes": classes,
        "dtype_bytes": 2,
        "parts": _PARTS,
    }
    return Detection(**facts | changes)
