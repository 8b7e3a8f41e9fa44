"""Pack 2×2 cells of latents into one token, as FLUX and its relatives take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.families.shared.base import Family

if TYPE_CHECKING:
    import torch

    from jobs.spec.keys.prompts import SampleRequest


class PackedFamily(Family):
    """A family whose pipeline keeps latents packed."""

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        scale = pipeline.vae_scale_factor
        return unpack(latents, request.height // scale, request.width // scale)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Convert `(B, C, h, w)` to `(B, h/2·w/2, C·4)`, with tokens in row-major order."""
    batch, channels, height, width = latents.shape
    cells = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Convert `(B, h/2·w/2, C·4)` to `(B, C, h, w)`."""
    batch, _, depth = tokens.shape
    grid = tokens.view(batch, height // 2, width // 2, depth // 4, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(batch, depth // 4, height, width)
