"""Rectified flow: draws of sigma and noise, noisy samples, and velocity targets.

Lipman et al. 2022 and Liu et al. 2022; sampling and weighting of sigma after Esser et al. 2024.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

from engine.diffusion.huber import scheduled
from engine.diffusion.objective import NoiseDraw, NoisySample
from jobs.spec.noise_levels import LEAST_STRETCHED, SHIFTED, sigma_at, stretched_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.spec.job_spec import JobSpec

_MOST_DRAWS: Final = 1000  # attempts to draw a sigma within the range
_HALVINGS: Final = 60  # more than the bits of a float
_LEAST_SIGMA: Final = 1e-3  # below it, 1 / sigma² outweighs all other samples

# Sigma → weight, as ai-toolkit measured on Flex.1 and uses for most of its models, rounded. The
# mean over all sigmas is 1.
_WEIGHTED: Final = (
    (0.0, 0.45),
    (0.03, 0.5),
    (0.05, 0.59),
    (0.1, 0.715),
    (0.334, 0.75),
    (0.397, 0.8),
    (0.482, 0.9),
    (0.551, 1.0),
    (0.663, 1.2),
    (0.764, 1.4),
    (0.823, 1.5),
    (0.875, 1.52),
    (0.95, 1.38),
    (0.98, 1.18),
    (1.0, 0.91),
)


@dataclass(frozen=True)
class Flow:
    """The objective of flow-matching models.

    Attributes:
        spec: The job, which sets the distribution of sigma.
        shift_of: Returns the shift for latents of a height, width and number of frames; used if the
            job sets none.
        sigmas: Lowest and highest sigma that the model is for.
        terminal: The lowest sigma of draws, like a scheduler's `shift_terminal`.
        uniform: The share of `stretched` draws that are uniform instead.
    """

    spec: JobSpec
    shift_of: Callable[[int, int, int], float]
    sigmas: tuple[float, float] = (0.0, 1.0)
    terminal: float = 0.0
    uniform: float = 0.0

    def draw(self, latents: torch.Tensor, generators: Sequence[torch.Generator]) -> NoiseDraw:
        """Draw sigma and noise for each sample.

        Args:
            latents: Clean latents `(B, C, h, w)`, or `(B, C, frames, h, w)`; only the shape is
                used.
            generators: One per sample, on the CPU.
        """
        shift = self.shift_for(latents)
        sigmas, noises = [], []
        for generator in generators:
            sigmas.append(self._draw_sigma(shift, generator))
            noises.append(torch.randn(latents.shape[1:], generator=generator))
        return NoiseDraw(torch.stack(sigmas), torch.stack(noises))

    def add_noise(self, latents: torch.Tensor, drawn: NoiseDraw) -> NoisySample:
        """Return noisy latents `(1 - sigma) · latents + sigma · noise` and their target.

        The level is sigma in (0, 1), and the target is the velocity `noise - latents`.
        """
        sigma, noise = drawn
        s = sigma.view(-1, *[1] * (latents.dim() - 1))
        weight = _weight(sigma, self.spec.loss_weighting)
        huber = scheduled(self.spec)
        threshold = huber.thresholds(sigma, 1 - sigma) if huber else None
        return NoisySample((1 - s) * latents + s * noise, sigma, noise - latents, weight, threshold)

    def shift_for(self, latents: torch.Tensor) -> float:
        """Return the job's shift, else that of `shift_of` for latents of this size."""
        frames = latents.shape[2] if latents.dim() == 5 else 1
        height, width = latents.shape[-2:]
        own = self.spec.flow_shift
        return own if isinstance(own, float) else self.shift_of(height, width, frames)

    def level_at(self, quantile: float, latents: torch.Tensor) -> float:
        """Return the sigma at this quantile of the distribution that `draw` uses for such latents.

        Args:
            quantile: In (0, 1).
            latents: Clean latents; only the shape is used.
        """
        low, high = self.sigmas
        shift = self.shift_for(latents)
        below, above = self._share_below(low, shift), 1 - self._share_below(high, shift)
        within = 1 - below - above
        # If every attempt misses the range, the draw is clipped, so the ends of the range have a
        # probability.
        clipped = (1 - within) ** _MOST_DRAWS
        at_low = clipped * below / (below + above) if clipped else 0.0
        if quantile < at_low:
            return low
        if quantile >= 1 - (clipped - at_low):
            return high
        share = below + (quantile - at_low) / (1 - clipped) * within
        return min(max(self._sigma_at(share, shift), low), high)

    def _sigma_at(self, share: float, shift: float) -> float:
        """Return the sigma at this quantile, not limited to the range."""
        if not self._uniform or not 0 < share < 1:
            return self._own_sigma_at(share, shift)
        low, high = 0.0, 1.0  # shares of the draws that are not uniform
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            sigma = self._own_sigma_at(middle, shift)
            evenly = max(0.0, sigma - LEAST_STRETCHED) / (1 - LEAST_STRETCHED)
            if (1 - self._uniform) * middle + self._uniform * evenly < share:
                low = middle
            else:
                high = middle
        return self._own_sigma_at(high, shift)

    @property
    def _uniform(self) -> float:
        return self.uniform if self.spec.timestep_sampling == "stretched" else 0.0

    def _own_sigma_at(self, share: float, shift: float) -> float:
        """Return the sigma at this quantile of the draws that are not uniform."""
        spec = self.spec
        sigma = sigma_at(
            share,
            spec.timestep_sampling,
            shift=shift,
            mean=spec.logit_mean,
            deviation=spec.logit_std,
            scale=spec.mode_scale,
        )
        return self.terminal + (1 - self.terminal) * sigma

    def _share_below(self, sigma: float, shift: float) -> float:
        """Return the fraction of draws below a sigma, ignoring the range: `_sigma_at` inverted."""
        if not 0 < sigma < 1:
            return 0.0 if sigma <= 0 else 1.0
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._sigma_at(middle, shift) < sigma:
                low = middle
            else:
                high = middle
        return high

    def _draw_sigma(self, shift: float, generator: torch.Generator) -> torch.Tensor:
        low, high = self.sigmas
        for _ in range(_MOST_DRAWS):
            sigma = self.terminal + (1 - self.terminal) * self._draw_any(shift, generator)
            if low <= sigma <= high:
                return sigma
        return sigma.clamp(low, high)  # the distribution is outside of the range

    def _draw_any(self, shift: float, generator: torch.Generator) -> torch.Tensor:
        how = self.spec.timestep_sampling
        if self._uniform and torch.rand((), generator=generator) < self._uniform:
            sigma = torch.rand((), generator=generator)
            return LEAST_STRETCHED + (1 - LEAST_STRETCHED) * sigma
        if how in ("uniform", "uniform_shift", "mode"):
            sigma = torch.rand((), generator=generator)
        else:
            normal = torch.randn((), generator=generator)
            sigma = torch.sigmoid(self.spec.logit_mean + self.spec.logit_std * normal)
        if how == "mode":
            bend = (math.pi / 2 * sigma).cos().square() - 1 + sigma
            return 1 - sigma - self.spec.mode_scale * bend
        if how in SHIFTED:
            sigma = shift * sigma / (1 + (shift - 1) * sigma)
        if how == "stretched":
            low, high = stretched_ends(shift, self.spec.logit_mean, self.spec.logit_std)
            sigma = ((sigma - low) / (high - low)).clamp(LEAST_STRETCHED, 1)
        return sigma


def _weight(sigma: torch.Tensor, how: str) -> torch.Tensor | None:
    """Return the weight of each sample's loss `(B,)`, on the device; None weights all equally."""
    if how == "none":
        return None
    if how == "sigma_sqrt":
        return sigma.clamp(min=_LEAST_SIGMA) ** -2
    if how == "sigma_squared":
        return sigma**2
    if how == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    places, weights = _curve(sigma.device)
    above = torch.bucketize(sigma, places).clamp(1, len(places) - 1)
    low, high = places[above - 1], places[above]
    return torch.lerp(weights[above - 1], weights[above], (sigma - low) / (high - low))


@lru_cache(maxsize=2)
def _curve(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sigmas and weights of `weighted`, cached per device, since copying synchronizes."""
    places, weights = torch.tensor(_WEIGHTED, dtype=torch.float32, device=device).unbind(1)
    return places.contiguous(), weights.contiguous()
