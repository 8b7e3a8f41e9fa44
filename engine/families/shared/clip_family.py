"""Families that encode captions only with CLIP, on which a LoRA can be trained."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from engine.families.shared.base import Family

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class ClipFamily(Family):
    """A family with `text_lora` in its facts."""

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        encoded = self.encode_together(pipeline, [prompt], [negative])
        return {name: tensor[0].contiguous() for name, tensor in encoded.items()}

    @abstractmethod
    def encode_together(
        self, pipeline: Any, prompts: Sequence[str], negative: Sequence[bool]
    ) -> dict[str, torch.Tensor]:
        """Encode several prompts like `encode`, but with gradients, each tensor `(B, …)`.

        Args:
            pipeline: From `load_text_pipeline`, on the device.
            prompts: The texts.
            negative: For each, as in `encode`.
        """
