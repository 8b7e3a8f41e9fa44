"""Encoded texts of one length, for pipelines that want prompt and negative prompt alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.families.shared.collate import collate

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def equal_length(*texts: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the texts, shorter ones filled up as in a batch; their masks leave that out."""
    batch = collate(texts)
    return [
        {name: tensor[number] for name, tensor in batch.items()} for number in range(len(texts))
    ]
