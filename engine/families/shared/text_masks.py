"""Drop padding that no sample sees, and masks without effect, on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.families.shared.collate import mask_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def without_padding(condition: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut texts to the tokens that some sample sees, and drop masks that then have no effect.

    Any mask rules out flash attention, even without effect. Call this while texts are in host
    memory (`Family.arrange`), since reading a mask on a GPU would synchronize. It is for models
    whose text tokens have no positions, where removing masked tokens changes nothing.

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


def without_masked(text: dict[str, torch.Tensor], mask: str) -> dict[str, torch.Tensor]:
    """Return one prompt, `(L, …)`, without what its mask leaves out, and without the mask."""
    if mask not in text:
        return text
    return {"prompt_embeds": text["prompt_embeds"][text[mask].bool()]}


def _cut(
    condition: Mapping[str, torch.Tensor], name: str, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a mask and the tensors it masks, `(B, L, …)`, without tokens that no sample sees."""
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
    """Return whether a tensor has one row per token; pooled tensors do not."""
    return itself or (text.dim() > 2 and text.shape[1] == mask.shape[1])


def fill_masks(names: dict[str, Any], texts: Mapping[str, str], *, guided: bool) -> bool:
    """Add the masks that a pipeline requires, for encoded prompts that have none.

    Args:
        names: Keyword arguments of the pipeline; masks are added.
        texts: Tensor name by mask name; negative prompts prefix both with `negative_`.
        guided: Whether the pipeline encodes a negative prompt if it gets none.

    Returns:
        Whether no prompt is padded: the pipeline encodes nothing, and no prompt came with a mask.
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
    """Return the mask of a text `(B, L, D)`, or one without effect if it was dropped.

    It is for models that count tokens by their mask. It is created on the device, without a copy.
    """
    if mask is None:
        return torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
    return mask
