"""Lumina-Image 2.0: one stream of Gemma's text and the picture, and time that runs backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.families.shared.base import Family
from engine.families.shared.equal_length import equal_length
from jobs.errors import UserError
from jobs.run.rundir import read_json

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from jobs.spec.keys.prompts import SampleRequest


class Lumina2(Family):
    """Lumina-Image 2.0."""

    # Every linear layer of the blocks, also of those that refine noise and text by themselves.
    LORA_TARGETS = (
        r"(layers|noise_refiner|context_refiner)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0)|feed_forward\.linear_[123])"
    )
    NEGATIVES_APART = True  # they get no system prompt

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        super().__init__(name, flavour, root, fps)
        config = read_json(root / self.component / "config.json") if root is not None else None
        # A picture's position on the first axis is the number of its text tokens.
        self._positions: int = (config or {}).get("axes_lens", [300])[0]

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of Gemma's last layer but one and `prompt_attention_mask (L,)`.

        L is the prompt's own length: what the pipeline adds behind it is masked everywhere.

        Raises:
            UserError: The model has fewer text positions.
        """
        if max_sequence_length >= self._positions:
            raise UserError(
                f"max_sequence_length {max_sequence_length} is more than the model's "
                f"{self._positions - 1} text positions",
                "set max_sequence_length: 256",
            )
        if negative:
            embeds, mask = pipeline._get_gemma_prompt_embeds(
                prompt, max_sequence_length=max_sequence_length
            )
        else:
            embeds, mask, _, _ = pipeline.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
        length = int(mask.sum())
        return {
            "prompt_embeds": embeds[0, :length].clone(),
            "prompt_attention_mask": mask[0, :length].clone(),
        }

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        # Its time is 0 for noise and 1 for pictures, and its velocity points from one to the other.
        return -transformer(
            hidden_states=noisy,
            timestep=1 - level,
            encoder_hidden_states=condition["prompt_embeds"],
            encoder_attention_mask=condition["prompt_attention_mask"],
            return_dict=False,
        )[0]

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """The pipeline refuses prompts of two lengths, though it predicts for one at a time."""
        if negative is not None:
            condition, negative = equal_length(condition, negative)
        return super().sample_arguments(request, condition, negative)


FAMILY = Lumina2
