"""Denoising diffusion: epsilon- and v-prediction on a discrete schedule, min-SNR weighting.

Ho et al. 2020; v-prediction after Salimans & Ho 2022; min-SNR after Hang et al. 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.diffusion.objective import NoiseDraw, NoisySample
from jobs.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusers import DDPMScheduler

    from engine.diffusion.huber import Huber


@dataclass(frozen=True)
class Denoising:
    """The objective of epsilon- and v-prediction models.

    Attributes:
        scheduler: The model's noise schedule; diffusers adds the noise and computes v.
        snr_gamma: Min-SNR's cap on the signal-to-noise ratio; None weights all steps equally.
        huber: The schedule of the loss's threshold; None if it has none.
    """

    scheduler: DDPMScheduler
    snr_gamma: float | None
    huber: Huber | None = None

    def __post_init__(self) -> None:
        if self.prediction not in ("epsilon", "v_prediction"):
            raise UserError(
                f"the model's scheduler_config.json has prediction_type: {self.prediction}, which "
                "is not supported",
                "use a model with epsilon or v_prediction",
            )

    @property
    def prediction(self) -> str:
        """Return what the model predicts: epsilon or v_prediction."""
        return str(self.scheduler.config.prediction_type)

    def draw(self, latents: torch.Tensor, generators: Sequence[torch.Generator]) -> NoiseDraw:
        """Draw a timestep and noise for each sample.

        Args:
            latents: Clean latents `(B, C, h, w)`; only the shape is used.
            generators: One per sample, on the CPU.
        """
        steps = self.scheduler.config.num_train_timesteps
        drawn, noises = [], []
        for generator in generators:
            drawn.append(torch.randint(steps, (), generator=generator))
            noises.append(torch.randn(latents.shape[1:], generator=generator))
        return NoiseDraw(torch.stack(drawn), torch.stack(noises))

    def add_noise(self, latents: torch.Tensor, drawn: NoiseDraw) -> NoisySample:
        """Return noisy latents, the timesteps as the level, and the noise or v as the target."""
        timesteps, noise = drawn
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        target = noise
        if self.prediction == "v_prediction":
            target = self.scheduler.get_velocity(latents, noise, timesteps)
        return NoisySample(
            noisy, timesteps, target, self._weight(timesteps), self._thresholds(timesteps)
        )

    def level_at(self, quantile: float, latents: torch.Tensor) -> int:
        """Return the timestep at a quantile in (0, 1) of the uniform distribution of draws."""
        return int(quantile * self.scheduler.config.num_train_timesteps)

    def _thresholds(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        if self.huber is None:
            return None
        alphas = self.scheduler.alphas_cumprod.to(timesteps.device)[timesteps].float()
        data, noise = alphas.sqrt(), (1 - alphas).sqrt()
        steps = self.scheduler.config.num_train_timesteps
        return self.huber.thresholds(timesteps / steps, data / (data + noise))

    def _weight(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return min-SNR weights `(B,)`: min(SNR, gamma) / SNR for epsilon, / (SNR + 1) for v."""
        if self.snr_gamma is None:
            return None
        alphas = self.scheduler.alphas_cumprod.to(timesteps.device)[timesteps].float()
        ratio = alphas / (1 - alphas)
        divisor = ratio + 1 if self.prediction == "v_prediction" else ratio
        # A schedule may end with SNR 0, where epsilon's weight is 1 in the limit.
        capped = ratio.clamp(max=self.snr_gamma)
        return torch.where(divisor > 0, capped / divisor.clamp(min=1e-12), torch.ones_like(ratio))
