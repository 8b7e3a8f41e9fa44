"""Chroma: packed latents as FLUX.1, T5 text with its padding masked, rectified flow."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers import ChromaPipeline
from diffusers.models.transformers.transformer_chroma import ChromaSingleTransformerBlock

from engine.families.shared.packing import PackedFamily, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator


class Chroma(PackedFamily):
    """Chroma1."""

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"(transformer_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of T5 and `prompt_attention_mask (L,)`.

        Padding is masked but for its first token. The mask is the pipeline's own, of its dtype:
        diffusers 0.42 gives it as numbers, which attention adds to its scores, so that padding
        weighs less by a factor of e instead of nothing. Samples are made that way, and so it is
        trained.
        """
        embeds, _, mask, *_ = pipeline.encode_prompt(
            prompt=prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
        return {
            "prompt_embeds": embeds[0].contiguous(),
            "prompt_attention_mask": mask[0].contiguous(),
        }

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        batch, _, height, width = noisy.shape
        embeds, tokens = condition["prompt_embeds"], pack(noisy)
        seen = torch.ones(tokens.shape[:2], dtype=torch.bool, device=noisy.device)
        mask = torch.cat([condition["prompt_attention_mask"], seen], dim=1)  # as the pipeline
        # The pipeline's own; it uses no pipeline state. Made on the device: copying them waits.
        with noisy.device:
            image_ids = ChromaPipeline._prepare_latent_image_ids(
                batch, height // 2, width // 2, noisy.device, noisy.dtype
            )
        with _masked_when_checkpointed(transformer, mask):
            velocity = transformer(
                hidden_states=tokens,
                timestep=level,
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3, device=noisy.device, dtype=noisy.dtype),
                img_ids=image_ids,
                attention_mask=mask,
                return_dict=False,
            )[0]
        return unpack(velocity, height, width)


@contextmanager
def _masked_when_checkpointed(transformer: Any, mask: torch.Tensor) -> Iterator[None]:
    """Within this context single-stream blocks get the mask also under gradient checkpointing.

    There, diffusers (0.42) calls them without, and the model would be trained on other attention
    than it samples with. What is recomputed in backward gets what was given here.
    """
    if not transformer.gradient_checkpointing:
        yield
        return
    run = transformer._gradient_checkpointing_func

    def run_masked(block: torch.nn.Module, *inputs: Any) -> Any:
        if isinstance(block, ChromaSingleTransformerBlock) and len(inputs) == 3:
            inputs = (*inputs, mask)
        return run(block, *inputs)

    transformer._gradient_checkpointing_func = run_masked
    try:
        yield
    finally:
        transformer._gradient_checkpointing_func = run


FAMILY = Chroma
