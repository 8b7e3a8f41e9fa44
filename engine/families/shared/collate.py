"""Combine several encoded texts into a batch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUMBER: Final = re.compile(r"(?:_\d+)?$")


def collate(
    texts: Sequence[Mapping[str, torch.Tensor]], *, multiple: int = 1
) -> dict[str, torch.Tensor]:
    """Stack each tensor of several texts.

    If texts have masks, every tensor as long as its mask is zero-padded to the longest; the mask
    marks the padding. Without a mask, lengths must be equal. A second text has its own length and
    mask, whose names end with the same number as its tensors (`_2`).

    Args:
        texts: Outputs of a family's `encode`, one per sample.
        multiple: Lengths of masked texts are rounded up to a multiple of this, since ranks that
            share a sample's tokens need equal numbers of them.

    Returns:
        `(B, …)` by name.
    """
    lengths = [{name: _length(name, text) for name in text} for text in texts]
    longest = {
        name: -(-max(own[name] or 0 for own in lengths) // multiple) * multiple for name in texts[0]
    }
    return {
        name: torch.stack(
            [
                _filled(name, text[name], own[name], size)
                for text, own in zip(texts, lengths, strict=True)
            ]
        )
        for name, size in longest.items()
    }


def mask_of(name: str, text: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the mask that belongs to a text's tensor; None for images' and if none is.

    If there are several, it is the one whose name ends with the same number.
    """
    masks = [other for other in text if "mask" in other and not name.startswith("image")]
    if len(masks) > 1:
        masks = [mask for mask in masks if _NUMBER.findall(mask)[0] == _NUMBER.findall(name)[0]]
    return masks[0] if masks else None


def _length(name: str, text: Mapping[str, torch.Tensor]) -> int | None:
    """Return the length of the mask that belongs to a text's tensor."""
    mask = mask_of(name, text)
    return None if mask is None else text[mask].shape[0]


def _filled(name: str, tensor: torch.Tensor, length: int | None, longest: int) -> torch.Tensor:
    if tensor.dim() < 2 and "mask" not in name:  # pooled: describes the text as a whole
        return tensor
    if length is None or tensor.shape[0] != length or length == longest:
        return tensor
    return functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, longest - length])
