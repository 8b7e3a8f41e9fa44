"""Padding of texts that no sample sees, and masks that mask nothing: left out on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.families.shared.collate import mask_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def without_padding(condition: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut texts to what some sample sees of them, and drop masks that then mask nothing.

    A mask rules out flash attention, whatever is in it. To be called while texts are in host
    memory (`Family.arrange`): a mask on a GPU can only be read by waiting for it. For models whose
    text tokens have no positions, to which fewer masked tokens are the same.

    Args:
        condition: Collated prompts, each `(B, …)`; masks `(B, L)`.
    """
    kept = dict(condition)
    for name, mask in condition.items():
        if "mask" in name:
            kept |= _cut(condition, name, mask.bool())
            if kept[name].bool().all():
                del kept[name]
    return kept


def _cut(
    condition: Mapping[str, torch.Tensor], name: str, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """A mask and what it is the mask of, `(B, L, …)`, without the tokens that nobody sees."""
    own = {
        other: text
        for other, text in condition.items()
        if mask_of(other, condition) == name and _has_tokens(text, mask, other == name)
    }
    if mask.all():
        return own
    seen = mask.any(dim=0)
    return {other: text[:, seen] for other, text in own.items()}


def _has_tokens(text: torch.Tensor, mask: torch.Tensor, itself: bool) -> bool:
    """Whether a tensor has one row for each token; what is of a text as a whole has none."""
    return itself or (text.dim() > 2 and text.shape[1] == mask.shape[1])


def mask_or_ones(mask: torch.Tensor | None, text: torch.Tensor) -> torch.Tensor:
    """The mask of a text `(B, L, D)`; where it was left out, one that masks nothing.

    For models that count tokens by it. It is made on the device, to which nothing is copied.
    """
    if mask is None:
        return torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    return mask
