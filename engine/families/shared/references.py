"""Conditioning images in a batch: latents beside the encoded prompts, under their own names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.diffusion.objective import Problem

REFERENCE: Final = "reference_"
"""Followed by a number, the name of a conditioning image's latents in a condition."""

FIRST_FRAME: Final = "first_frame"
"""The name of the latents of a video's first frame, `(B, C, 1, h, w)`, that the model is given."""


BEGINNING: Final = "beginning"
"""The name of the latents `(B, C, f, h, w)` of a video's first frame followed by gray ones."""


def references_in(condition: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the latents of conditioning images, each `(B, C, h, w)`, in their order."""
    references: list[torch.Tensor] = []
    while (name := f"{REFERENCE}{len(references)}") in condition:
        references.append(condition[name])
    return references


def first_frame_of(latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the condition of videos `(B, C, f, h, w)` whose first frame the model is given.

    The autoencoders are causal: what they make of a first frame does not depend on the others.
    """
    return {FIRST_FRAME: latents[:, :, :1].contiguous()}


def held_first(
    noisy: torch.Tensor, condition: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Put the first frame that a model is given in its place.

    Args:
        noisy: `(B, C, f, h, w)`.
        condition: Encoded prompts, and the first frame, if it is given.

    Returns:
        The latents, and what timesteps are multiplied with, `(f, h, w)`: 0 where they are given.
    """
    first = condition.get(FIRST_FRAME)
    if first is None:
        return noisy, None
    mask = torch.ones(noisy.shape[2:], device=noisy.device)
    mask[0].zero_()
    return torch.cat([first.to(noisy.dtype), noisy[:, :, 1:]], dim=2), mask


def judged(
    prediction: torch.Tensor, problem: Problem, condition: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, Problem]:
    """Return what of a prediction the loss is of: not the first frame, where it was given."""
    if FIRST_FRAME not in condition:
        return prediction, problem
    return prediction[:, :, 1:], replace(problem, target=problem.target[:, :, 1:])
