"""Compute the distribution of noise levels for `timestep_sampling`, without training."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

_QUANTILES: Final = 2000
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
SHIFTED: Final = ("shift", "uniform_shift", "stretched")
"""The values of `timestep_sampling` that a shift is for."""
SHIFTED_IN_WORDS: Final = "timestep_sampling: shift, uniform_shift or stretched"

LEAST_STRETCHED: Final = 1e-3
"""The lowest sigma that `stretched` draws."""

_ENDS: Final = (0.005, 0.999)  # quantiles that `stretched` maps to 0 and 1
# minimum width of the stretched interval; fp32 has too few numbers in a smaller one
_NARROWEST: Final = 1e-4
_HIGH: Final = 0.9  # sigmas above this determine the composition of an image


def sigma_at(
    share: float,
    how: str,
    *,
    shift: float = 1.0,
    mean: float = 0.0,
    deviation: float = 1.0,
    scale: float = 1.29,
) -> float:
    """Return a quantile of the sigmas that `engine.diffusion.rectified_flow` draws.

    Args:
        share: The quantile, from 0 to 1.
        how: The job's `timestep_sampling`.
        shift: The shift, for the values in `SHIFTED`.
        mean: `logit_mean`.
        deviation: `logit_std`.
        scale: `mode_scale`.
    """
    if not 0 < share < 1:
        least = LEAST_STRETCHED if how == "stretched" else 0.0
        return least if share <= 0 else 1.0
    if how == "mode":  # training draws from the other end, where 1 is no noise
        bend = math.cos(math.pi / 2 * (1 - share)) ** 2 - share
        return share - scale * bend
    sigma = share
    if how in ("logit_normal", "shift", "stretched"):
        sigma = _logit_normal(share, mean, deviation)
    if how in SHIFTED:
        sigma = shift * sigma / (1 + (shift - 1) * sigma)
    if how == "stretched":
        low, high = stretched_ends(shift, mean, deviation)
        sigma = min(max((sigma - low) / (high - low), LEAST_STRETCHED), 1.0)
    return sigma


def stretched_ends(shift: float, mean: float, deviation: float) -> tuple[float, float]:
    """Return the shifted sigmas that `stretched` maps to 0 and to 1.

    They are quantiles of the `shift` distribution; or 0 and 1, which changes nothing, if those are
    too close to be stretched apart.
    """
    low, high = (
        sigma_at(end, "shift", shift=shift, mean=mean, deviation=deviation) for end in _ENDS
    )
    return (low, high) if high - low > _NARROWEST else (0.0, 1.0)


def _logit_normal(share: float, mean: float, deviation: float) -> float:
    logit = mean + deviation * NormalDist().inv_cdf(share)
    # Avoid the exponential of a large number, which overflows a float.
    rest = math.exp(-abs(logit))
    return (1 if logit > 0 else rest) / (1 + rest)


def plot(sigmas: list[float], columns: int) -> str:
    """Return a line of bars from sigma 0 to 1, a histogram of the sigmas."""
    counts = [0] * columns
    for sigma in sigmas:
        counts[min(columns - 1, max(0, int(sigma * columns)))] += 1
    most = max(counts)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[math.ceil(count / most * steps)] for count in counts)


def preview(columns: int) -> list[str]:
    """Return a line for each distribution: its name, its histogram, and the share of high noise.

    Args:
        columns: Width of a line in characters.
    """
    ways = [
        ("uniform", "uniform", 1.0),
        ("logit_normal", "logit_normal", 1.0),
        ("shift, s = 3", "shift", 3.0),
        ("shift, s = 6", "shift", 6.0),
        ("uniform_shift, s = 3", "uniform_shift", 3.0),
        ("stretched, s = 6", "stretched", 6.0),
        ("mode", "mode", 1.0),
    ]
    width = max(len(title) for title, *_ in ways)
    bars = max(10, min(40, columns - width - 9))
    lines = [f"{'sigma':{width}}  {'0 (data)':{bars - 9}}1 (noise)  > {_HIGH:g}"]
    for title, how, shift in ways:
        shares = ((number + 0.5) / _QUANTILES for number in range(_QUANTILES))
        sigmas = [sigma_at(share, how, shift=shift) for share in shares]
        share = sum(sigma > _HIGH for sigma in sigmas) / len(sigmas)
        lines.append(f"{title:{width}}  {plot(sigmas, bars)}  {share:.0%}")
    return lines
