"""HunyuanVideo: Llama and CLIP text in two streams and then one, guidance as an input."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import PreTrainedTokenizerFast

from engine.families.shared import flux_kohya
from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.hunyuanvideo_forward import WholeTextPipeline, without_masks
from engine.families.shared.lora_names import ComfyUI, Kohya
from engine.families.shared.text_masks import mask_or_ones, without_padding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.families.shared.lora_names import Adapter
    from jobs.spec.keys.prompts import SampleRequest

_MASK: Final = "prompt_attention_mask"

# Layers of which ComfyUI has the name that they have in FLUX.1, and musubi-tuner Tencent's.
_TENCENT: Final = {
    "_mlp.0": "_mlp.fc1",
    "_mlp.2": "_mlp.fc2",
    "_mod.lin": "_mod.linear",
    "modulation.lin": "modulation.linear",
}


def _as_tencent(adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Return module of Tencent's model → adapter.

    What is fused there is what is fused in FLUX.1.
    """
    renamed: dict[str, Adapter] = {}
    for module, adapter in flux_kohya.LAYOUT.rename(adapters).items():
        end = next((end for end in _TENCENT if module.endswith(end)), None)
        renamed[module.removesuffix(end) + _TENCENT[end] if end else module] = adapter
    return renamed


class HunyuanVideo(Family):
    """HunyuanVideo as text-to-video."""

    # Every linear layer of the blocks: attention of both streams, and the feed-forwards.
    LORA_TARGETS = (
        r"(transformer_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out)"
    )
    TOKENS = TokenLayout(
        {"freqs_cis": (2, 0), "image_rotary_emb": (2, 0), "attention_mask": (4, 3)},
        output=0,
        text_first=False,
    )
    KOHYA = Kohya(_as_tencent, {"ss_network_module": "networks.lora"})
    COMFYUI = ComfyUI(flux_kohya.LAYOUT.rename, lokr=None)
    COMFYUI_READS_KOHYA = False

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
            _MASK: mask[0, :length].contiguous(),
        }

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
        strength = None
        if transformer.config.guidance_embeds:
            strength = torch.full_like(level, guidance) * 1000
        text, mask = condition["prompt_embeds"], condition.get(_MASK)
        with without_masks(transformer) if mask is None else nullcontext():
            return transformer(
                hidden_states=noisy,
                timestep=level * 1000,
                encoder_hidden_states=text,
                encoder_attention_mask=mask_or_ones(mask, text),
                pooled_projections=condition["pooled_prompt_embeds"],
                guidance=strength,
                return_dict=False,
            )[0]

    def sampling_pipeline(
        self, root: Path, transformer: Any, vae: Any, /, **components: Any
    ) -> Any:
        """One that takes texts without masks."""
        stock = super().sampling_pipeline(root, transformer, vae, **components)
        return WholeTextPipeline(**stock.components)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """`guidance_scale` is the strength that the model takes as an input; texts have no masks.

        They are encoded without padding.
        """
        arguments = super().sample_arguments(request, condition, negative)
        for kind in ("", "negative_"):
            arguments.pop(f"{kind}{_MASK}", None)
        if negative is not None:
            arguments["true_cfg_scale"] = request.true_cfg_scale
        return arguments


FAMILY = HunyuanVideo
