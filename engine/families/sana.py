"""Sana: latents of a 32nd of the side, linear attention, Gemma told to imagine details."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from diffusers import SanaPipeline

from engine.families.shared.base import Family
from engine.families.shared.equal_length import equal_length
from engine.families.shared.text_masks import without_padding

if TYPE_CHECKING:
    import torch

    from jobs.spec.keys.prompts import SampleRequest

# The instruction that the pipeline puts before a prompt: a default argument of its call.
_INSTRUCTION: Final = (
    signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
)


class Sana(Family):
    """Sana and Sana 1.5."""

    # Every linear layer of both attentions, and the feed-forward's, which are convolutions of one
    # pixel; the one between them mixes neighbours, each channel by itself.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\."
        r"(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.(conv_inverted|conv_point))"
    )
    GUIDED_FORWARDS = 1
    NEGATIVES_APART = True  # they get no instruction

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of Gemma and `prompt_attention_mask (L,)`.

        L is the prompt's own length: what the pipeline adds behind it is masked everywhere.
        """
        embeds, mask, _, _ = pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
            complex_human_instruction=None if negative else _INSTRUCTION,
        )
        length = int(mask.sum())
        return {
            "prompt_embeds": embeds[0, :length].clone(),
            "prompt_attention_mask": mask[0, :length].clone(),
        }

    def encode_pictures(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Its VAE knows one encoding, and no distribution of them."""
        return self.normalise(vae, vae.encode(pixels).latent)

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without a mask where no text of the batch is filled up."""
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        return transformer(
            noisy,
            encoder_hidden_states=condition["prompt_embeds"],
            timestep=level * 1000 * transformer.config.timestep_scale,
            encoder_attention_mask=condition.get("prompt_attention_mask"),
            return_dict=False,
        )[0]

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        return height * width

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Both prompts are one batch, and the size is as asked, not the nearest usual one."""
        if negative is not None:
            condition, negative = equal_length(condition, negative)
        arguments = super().sample_arguments(request, condition, negative)
        if negative:
            arguments["negative_prompt"] = None  # "" is its default, beside the encoded one
        return arguments | {"use_resolution_binning": False}


FAMILY = Sana
