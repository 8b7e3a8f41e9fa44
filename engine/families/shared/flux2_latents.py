"""Latents of FLUX.2's autoencoder: cells of 2×2 as one of 128 channels, normed by a batch norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import Flux2Pipeline

from engine.families.shared.base import Family

if TYPE_CHECKING:
    from jobs.spec.keys.prompts import SampleRequest


class Flux2LatentsFamily(Family):
    """A family with FLUX.2's autoencoder, whose pipeline keeps latents as tokens."""

    def normalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """`(B, 32, 2h, 2w)` of the VAE → `(B, 128, h, w)`."""
        cells = Flux2Pipeline._patchify_latents(latents)
        mean, deviation = _statistics(vae, cells)
        return (cells - mean) / deviation

    def denormalise(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """`(B, 128, h, w)` → `(B, 32, 2h, 2w)` for the VAE."""
        mean, deviation = _statistics(vae, latents)
        unpatched: torch.Tensor = Flux2Pipeline._unpatchify_latents(latents * deviation + mean)
        return unpatched

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        """Its latents are cells of 2×2 already."""
        return height * width * frames

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        """From the scheduler as tokens; some pipelines return cells."""
        if latents.dim() == 4:
            return latents
        step = 2 * pipeline.vae_scale_factor
        return grid(latents, request.height // step, request.width // step)


def grid(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """`(B, h·w, C)` → `(B, C, h, w)`."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each channel, `(1, 128, 1, 1)`, which the VAE's batch norm keeps."""
    norm = vae.bn
    deviation = torch.sqrt(norm.running_var + vae.config.batch_norm_eps)
    return norm.running_mean.view(1, -1, 1, 1).to(latents), deviation.view(1, -1, 1, 1).to(latents)
