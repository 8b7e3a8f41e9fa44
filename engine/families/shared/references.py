"""Conditioning images in a batch: latents beside the encoded prompts, under names of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

REFERENCE: Final = "reference_"
"""Followed by a number, the name of a conditioning image's latents in a condition."""


def references_in(condition: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The latents of conditioning images, each `(B, C, h, w)`, in their order."""
    found: list[torch.Tensor] = []
    while (name := f"{REFERENCE}{len(found)}") in condition:
        found.append(condition[name])
    return found
