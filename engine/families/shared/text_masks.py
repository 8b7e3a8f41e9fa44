"""Padding of texts that no sample sees, and masks that mask nothing: dropped on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def fill_masks(names: dict[str, Any], texts: Mapping[str, str], *, guided: bool) -> bool:
    """Give a pipeline the masks that it insists on, for encoded prompts that came without.

    Args:
        names: What the pipeline is called with; masks are added.
        texts: Name of a mask → name of what it is the mask of; of negative prompts both begin with
            `negative_` besides.
        guided: Whether the pipeline encodes a negative prompt if it is given none.

    Returns:
        Whether the pipeline encodes nothing, and no prompt came with a mask: none is padded.
    """
    given = {
        kind + mask: names[kind + text]
        for kind in ("", "negative_")
        for mask, text in texts.items()
        if names.get(kind + text) is not None
    }
    whole = (
        len(given) >= len(texts) * (1 + guided)
        and all(names.get(mask) is None for mask in given)
        and all(names.get(words) is None for words in ("prompt", "negative_prompt"))
    )
    names.update({mask: mask_or_ones(names.get(mask), text) for mask, text in given.items()})
    return whole


def mask_or_ones(mask: torch.Tensor | None, text: torch.Tensor) -> torch.Tensor:
    """Return the mask of a text `(B, L, D)`; where it was dropped, one that masks nothing.

    For models that count tokens by it. It is made on the device, to which nothing is copied.
    """
    if mask is None:
        return torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    return mask
