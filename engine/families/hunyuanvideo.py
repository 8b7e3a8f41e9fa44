"""HunyuanVideo: Llama and CLIP text in two streams and then one, guidance as an input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast

from engine.families.shared.base import Family

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.keys.prompts import SampleRequest


class HunyuanVideo(Family):
    """HunyuanVideo as text-to-video."""

    # Every linear layer of the blocks: attention of both streams, and the feed-forwards.
    LORA_TARGETS = (
        r"(transformer_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """With the tokenizer as it was published.

        Transformers 5 would read it as the class that the model names, `LlamaTokenizerFast`, which
        it takes for Llama 2's: all spaces would be lost.
        """
        own = {"tokenizer": PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")}
        return super().load_text_pipeline(root, dtype, **own | components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of Llama with its mask, `pooled_prompt_embeds (P,)` of CLIP.

        Without the template and without what fills the text up, which is masked in the model.
        """
        embeds, pooled, mask = pipeline.encode_prompt(
            prompt, max_sequence_length=max_sequence_length
        )
        length = max(1, int(mask[0].sum()))
        return {
            "prompt_embeds": embeds[0, :length].contiguous(),
            "pooled_prompt_embeds": pooled[0].contiguous(),
            "prompt_attention_mask": mask[0, :length].contiguous(),
        }

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        strength = None
        if transformer.config.guidance_embeds:
            strength = torch.full_like(level, guidance) * 1000
        return transformer(
            hidden_states=noisy,
            timestep=level * 1000,
            encoder_hidden_states=condition["prompt_embeds"],
            encoder_attention_mask=condition["prompt_attention_mask"],
            pooled_projections=condition["pooled_prompt_embeds"],
            guidance=strength,
            return_dict=False,
        )[0]

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """`guidance_scale` is the strength that the model takes as an input."""
        arguments = super().sample_arguments(request, condition, negative)
        if negative is not None:
            arguments["true_cfg_scale"] = request.true_cfg_scale
        return arguments


FAMILY = HunyuanVideo
