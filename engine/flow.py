"""Rectified flow: what is drawn, what the model sees, what it should say.

Lipman et al. 2022 and Liu et al. 2022; logit-normal sampling of sigma after Esser et al. 2024.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobs.spec import TimestepSampling


@dataclass(frozen=True)
class FlowTargets:
    """One micro-batch of the training problem.

    Attributes:
        noisy: `(1 - sigma) · latents + sigma · noise`, `(B, C, h, w)`.
        sigma: `(B,)` in (0, 1).
        velocity: What the model should predict, `noise - latents`, `(B, C, h, w)`.
    """

    noisy: torch.Tensor
    sigma: torch.Tensor
    velocity: torch.Tensor


def draw(
    latents: torch.Tensor,
    positions: Iterable[int],
    *,
    seed: int,
    step: int,
    sampling: TimestepSampling,
    shift: float,
) -> FlowTargets:
    """Draw noise and sigma for each sample, from a generator keyed by (seed, step, position).

    N ranks draw exactly what one rank would, and a resumed run what an uninterrupted one would.

    Args:
        latents: Clean latents `(B, C, h, w)`.
        positions: Each sample's place in the global batch.
        seed: The job's.
        step: Optimizer step, counted from 0.
        sampling: Distribution of sigma.
        shift: The family's shift at this size; used by `shift` sampling.
    """
    sigmas, noises = [], []
    for position in positions:
        generator = keyed_generator(seed, step, position)
        sigmas.append(_draw_sigma(sampling, shift, generator))
        noises.append(torch.randn(latents.shape[1:], generator=generator))
    sigma = torch.stack(sigmas).to(latents.device)
    noise = torch.stack(noises).to(latents.device)
    mix = sigma.view(-1, *[1] * (latents.dim() - 1))
    return FlowTargets((1 - mix) * latents + mix * noise, sigma, noise - latents)


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator whose draws depend on the key alone, the same on every device."""
    text = ":".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return torch.Generator().manual_seed(number)


def _draw_sigma(
    sampling: TimestepSampling, shift: float, generator: torch.Generator
) -> torch.Tensor:
    if sampling == "uniform":
        return torch.rand((), generator=generator)
    sigma = torch.sigmoid(torch.randn((), generator=generator))
    if sampling == "shift":
        sigma = shift * sigma / (1 + (shift - 1) * sigma)
    return sigma
