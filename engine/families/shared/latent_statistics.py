"""Normalize latents to about zero mean and unit variance, by the statistics in the VAE's config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def normalise(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Convert latents `(B, C, …)` from the VAE's encoder to the denoiser's scale."""
    mean, scale = _statistics(vae, latents)
    return (latents - mean) * scale


def denormalise(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Convert latents `(B, C, …)` from the denoiser's scale to the VAE's decoder."""
    mean, scale = _statistics(vae, latents)
    return latents / scale + mean


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[Any, Any]:
    """Return mean and factor, per channel if the config lists them, else the same for all."""
    config = vae.config
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is None or deviation is None:
        return config.get("shift_factor") or 0.0, config.get("scaling_factor") or 1.0
    shape = [1, -1] + [1] * (latents.dim() - 2)
    deviations = latents.new_tensor(deviation).view(shape)
    # Stable Diffusion's VAEs have a scaling factor in addition; the video models' do not.
    return latents.new_tensor(mean).view(shape), (config.get("scaling_factor") or 1.0) / deviations
