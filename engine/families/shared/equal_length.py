"""Pad prompt and negative prompt to equal length, for pipelines that require it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.families.shared.collate import collate

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def equal_length(*texts: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the texts, padded as in a batch; their masks mark the padding."""
    batch = collate(texts)
    return [
        {name: tensor[number] for name, tensor in batch.items()} for number in range(len(texts))
    ]
