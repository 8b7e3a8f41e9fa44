"""Rectified flow: what is drawn, what the model sees, what it should say.

Lipman et al. 2022 and Liu et al. 2022; logit-normal sampling of sigma after Esser et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.objective import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.spec import JobSpec


@dataclass(frozen=True)
class Flow:
    """The objective of flow-matching models.

    Attributes:
        spec: The job; how sigma is drawn.
        shift_of: The family's shift for latents of a height and width.
    """

    spec: JobSpec
    shift_of: Callable[[int, int], float]

    def draw(self, latents: torch.Tensor, generators: Sequence[torch.Generator]) -> Problem:
        """Draw sigma and noise for each sample.

        Args:
            latents: Clean latents `(B, C, h, w)`, or `(B, C, frames, h, w)`.
            generators: One for each sample, on the CPU.

        Returns:
            Noisy latents `(1 - sigma) · latents + sigma · noise`, sigma in (0, 1) as the level,
            and the velocity `noise - latents` as the target.
        """
        height, width = latents.shape[-2:]
        shift = self.spec.flow_shift or self.shift_of(height, width)
        sigmas, noises = [], []
        for generator in generators:
            sigmas.append(self._draw_sigma(shift, generator))
            noises.append(torch.randn(latents.shape[1:], generator=generator))
        sigma = torch.stack(sigmas).to(latents.device)
        noise = torch.stack(noises).to(latents.device)
        mix = sigma.view(-1, *[1] * (latents.dim() - 1))
        return Problem((1 - mix) * latents + mix * noise, sigma, noise - latents)

    def _draw_sigma(self, shift: float, generator: torch.Generator) -> torch.Tensor:
        if self.spec.timestep_sampling == "uniform":
            return torch.rand((), generator=generator)
        normal = torch.randn((), generator=generator)
        sigma = torch.sigmoid(self.spec.logit_mean + self.spec.logit_std * normal)
        if self.spec.timestep_sampling == "shift":
            sigma = shift * sigma / (1 + (shift - 1) * sigma)
        return sigma
