"""Whether an objective's levels are quantiles of what it draws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from engine.diffusion.objective import Objective

_LEVELS: Final = 40
_ROUNDING: Final = 1e-6  # draws are in fp32


def assert_levels_are_quantiles(objective: Objective, latents: torch.Tensor, draws: int) -> None:
    """Assert that each level has as large a share of many training draws below it as it says.

    A level that many draws share, as where they are clipped, stands for all of their shares.
    """
    chance = torch.Generator().manual_seed(1)
    drawn = objective.draw(latents.expand(draws, *latents.shape[1:]), [chance] * draws).level
    # The bound of Dvoretzky, Kiefer, Wolfowitz and Massart: exceeded once in 10^9 times.
    margin = math.sqrt(math.log(2e9) / (2 * draws))
    quantiles = [(number + 0.5) / _LEVELS for number in range(_LEVELS)]
    levels = [objective.level_at(quantile, latents) for quantile in quantiles]
    assert levels == sorted(levels)
    for quantile, level in zip(quantiles, levels, strict=True):
        below = (drawn < level - _ROUNDING).double().mean().item()
        up_to = (drawn <= level + _ROUNDING).double().mean().item()
        assert below - margin <= quantile <= up_to + margin, (quantile, level)
