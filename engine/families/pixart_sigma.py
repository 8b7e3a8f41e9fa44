"""PixArt-Sigma: T5 through cross-attention, epsilon with a variance that is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from peft import PeftModel

from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.lora_names import ComfyUI, Layout
from engine.families.shared.text_masks import without_padding

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from jobs.spec.keys.prompts import SampleRequest


_LAYOUT: Final = Layout(
    {
        "transformer_blocks.#.attn1.to_out.0": "blocks.#.attn.proj",
        "transformer_blocks.#.attn2.to_q": "blocks.#.cross_attn.q_linear",
        "transformer_blocks.#.attn2.to_out.0": "blocks.#.cross_attn.proj",
        "transformer_blocks.#.ff.net.0.proj": "blocks.#.mlp.fc1",
        "transformer_blocks.#.ff.net.2": "blocks.#.mlp.fc2",
    },
    {
        "blocks.#.attn.qkv": {
            f"transformer_blocks.#.attn1.to_{part}": 1 for part in ("q", "k", "v")
        },
        "blocks.#.cross_attn.kv_linear": {
            f"transformer_blocks.#.attn2.to_{part}": 1 for part in ("k", "v")
        },
    },
)


class PixArtSigma(Family):
    """PixArt-Sigma."""

    # Every linear layer of the blocks: both attentions, and the feed-forward.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout()
    COMFYUI = ComfyUI(_LAYOUT.rename, lokr="transformer.")
    GUIDED_FORWARDS = 1

    def load_lora(self, pipeline: Any, directory: Path) -> None:
        """As a user would: this pipeline has no functions for LoRAs, but peft does."""
        PeftModel.from_pretrained(pipeline.transformer, directory)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of T5 and `prompt_attention_mask (L,)`, all of one length.

        Captions are not cleaned, as in the pipeline without beautifulsoup4 and ftfy.
        """
        embeds, mask, _, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return {
            "prompt_embeds": embeds[0].contiguous(),
            "prompt_attention_mask": mask[0].contiguous(),
        }

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without the padding that no sample sees; without a mask where none is left to mask."""
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        prediction = transformer(
            noisy,
            encoder_hidden_states=condition["prompt_embeds"],
            encoder_attention_mask=condition.get("prompt_attention_mask"),
            timestep=level,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        # The other half is the variance, which samplers do not use.
        epsilon: torch.Tensor = prediction[:, : noisy.shape[1]]
        return epsilon

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Keep the requested size of images, and texts unchanged."""
        arguments = super().sample_arguments(request, condition, negative)
        arguments |= {"use_resolution_binning": False, "clean_caption": False}
        if negative:
            arguments["negative_prompt"] = None  # "" is its default, beside the encoded one
        return arguments


FAMILY = PixArtSigma
