"""Latents of about zero mean and unit size, by the statistics in the VAE's config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def normalise(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return what the VAE encodes → what the denoiser sees, `(B, C, …)`."""
    mean, scale = _statistics(vae, latents)
    return (latents - mean) * scale


def denormalise(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return what the denoiser makes → what the VAE decodes, `(B, C, …)`."""
    mean, scale = _statistics(vae, latents)
    return latents / scale + mean


def _statistics(vae: Any, latents: torch.Tensor) -> tuple[Any, Any]:
    """Mean and factor: of each channel where the config lists them, else one for all."""
    config = vae.config
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is None or deviation is None:
        return config.get("shift_factor") or 0.0, config.get("scaling_factor") or 1.0
    shape = [1, -1] + [1] * (latents.dim() - 2)
    deviations = latents.new_tensor(deviation).view(shape)
    # Stable Diffusion's VAEs scale besides; the video models' do not.
    return latents.new_tensor(mean).view(shape), (config.get("scaling_factor") or 1.0) / deviations
