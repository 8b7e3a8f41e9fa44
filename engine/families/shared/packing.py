"""Convert latents to the form that a pipeline keeps them in: packed, or a video of one frame.

FLUX and its relatives pack 2×2 cells of latents into one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.families.shared.base import Family

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from jobs.spec.keys.prompts import SampleRequest


class PackedFamily(Family):
    """A family whose pipeline keeps latents packed."""

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        scale = pipeline.vae_scale_factor
        return unpack(latents, request.height // scale, request.width // scale)


class OneFrameFamily(Family):
    """A family of images whose autoencoder is one of videos."""

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return super().encode_pictures(vae, pixels.unsqueeze(2)).squeeze(2)

    def decode(
        self, pipeline: Any, latents: torch.Tensor, request: SampleRequest
    ) -> list[Image.Image]:
        latents = self.denormalise(pipeline.vae, self.unpack(pipeline, latents, request))
        pixels = pipeline.vae.decode(latents.unsqueeze(2), return_dict=False)[0][:, :, 0]
        pictures: list[Image.Image] = pipeline.image_processor.postprocess(
            pixels, output_type="pil"
        )
        return pictures


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
