"""Several encoded texts as one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def collate(
    texts: Sequence[Mapping[str, torch.Tensor]], *, multiple: int = 1
) -> dict[str, torch.Tensor]:
    """Stack each tensor of several texts.

    Where texts have masks, every tensor as long as its mask is padded with zeros to the length of
    the longest; the mask shows what is padding. Without a mask, lengths must be equal.

    Args:
        texts: What a family's `encode` gives, one for each sample.
        multiple: Lengths become a multiple of this where there is a mask: ranks that share a
            sample's tokens need equal numbers of them.

    Returns:
        Name → `(B, …)`.
    """
    lengths = [_length(text) for text in texts]
    if None in lengths:
        return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
    given = [length for length in lengths if length is not None]
    longest = -(-max(given) // multiple) * multiple
    return {
        name: torch.stack(
            [
                _filled(name, text[name], length, longest)
                for text, length in zip(texts, given, strict=True)
            ]
        )
        for name in texts[0]
    }


def _length(text: Mapping[str, torch.Tensor]) -> int | None:
    """How long the text's mask is."""
    return next((mask.shape[0] for name, mask in text.items() if "mask" in name), None)


def _filled(name: str, tensor: torch.Tensor, length: int, longest: int) -> torch.Tensor:
    if tensor.dim() < 2 and "mask" not in name:  # of the text as a whole, however wide
        return tensor
    if tensor.shape[0] != length or length == longest:
        return tensor
    return functional.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, longest - length])
