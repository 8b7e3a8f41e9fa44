"""Rectified flow: what is drawn, what the model sees, what it should say.

Lipman et al. 2022 and Liu et al. 2022; logit-normal sampling of sigma after Esser et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from engine.diffusion.objective import Drawn, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.spec.job_spec import JobSpec

_MOST_DRAWS: Final = 1000  # of a sigma within its range


@dataclass(frozen=True)
class Flow:
    """The objective of flow-matching models.

    Attributes:
        spec: The job; how sigma is drawn.
        shift_of: The family's shift for latents of a height, width and number of frames.
        sigmas: Lowest and highest that the model is for.
    """

    spec: JobSpec
    shift_of: Callable[[int, int, int], float]
    sigmas: tuple[float, float] = (0.0, 1.0)

    def draw(self, latents: torch.Tensor, generators: Sequence[torch.Generator]) -> Drawn:
        """Draw sigma and noise for each sample.

        Args:
            latents: Clean latents `(B, C, h, w)`, or `(B, C, frames, h, w)`; their shape counts.
            generators: One for each sample, on the CPU.
        """
        shift = self.shift_for(latents)
        sigmas, noises = [], []
        for generator in generators:
            sigmas.append(self._draw_sigma(shift, generator))
            noises.append(torch.randn(latents.shape[1:], generator=generator))
        return Drawn(torch.stack(sigmas), torch.stack(noises))

    def problem(self, latents: torch.Tensor, drawn: Drawn) -> Problem:
        """Noisy latents `(1 - sigma) · latents + sigma · noise`, with sigma in (0, 1) as the level
        and the velocity `noise - latents` as the target.
        """
        sigma, noise = drawn
        mix = sigma.view(-1, *[1] * (latents.dim() - 1))
        return Problem((1 - mix) * latents + mix * noise, sigma, noise - latents)

    def shift_for(self, latents: torch.Tensor) -> float:
        """The job's shift, else the family's for latents of this size."""
        frames = latents.shape[2] if latents.dim() == 5 else 1
        height, width = latents.shape[-2:]
        return self.spec.flow_shift or self.shift_of(height, width, frames)

    def sigma_at(self, quantile: float, shift: float) -> float:
        """The sigma at a quantile in (0, 1) of a uniform one that is shifted, within `sigmas`."""
        low, high = (sigma / (shift - (shift - 1) * sigma) for sigma in self.sigmas)
        uniform = low + quantile * (high - low)
        return shift * uniform / (1 + (shift - 1) * uniform)

    def _draw_sigma(self, shift: float, generator: torch.Generator) -> torch.Tensor:
        low, high = self.sigmas
        for _ in range(_MOST_DRAWS):
            sigma = self._draw_any(shift, generator)
            if low <= sigma <= high:
                return sigma
        return sigma.clamp(low, high)  # a distribution that lies elsewhere

    def _draw_any(self, shift: float, generator: torch.Generator) -> torch.Tensor:
        if self.spec.timestep_sampling == "uniform":
            return torch.rand((), generator=generator)
        normal = torch.randn((), generator=generator)
        sigma = torch.sigmoid(self.spec.logit_mean + self.spec.logit_std * normal)
        if self.spec.timestep_sampling == "shift":
            sigma = shift * sigma / (1 + (shift - 1) * sigma)
        return sigma
