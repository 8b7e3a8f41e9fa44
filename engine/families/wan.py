"""Wan: videos by flow matching, with cross-attention to text; two experts by noise level in 2.2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from diffusers import WanImageToVideoPipeline

from engine.families.shared.base import Family
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.references import held_first

if TYPE_CHECKING:
    import torch

_HIGH: Final = "transformer"
_LOW: Final = "transformer_2"


_LAYOUT: Final = Layout(
    {
        **{
            f"blocks.#.{attention}.{module}": f"blocks.#.{theirs}.{part}"
            for attention, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
            for module, part in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))
        },
        "blocks.#.ffn.net.0.proj": "blocks.#.ffn.0",
        "blocks.#.ffn.net.2": "blocks.#.ffn.2",
    }
)


class Wan(Family):
    """Wan 2.1, Wan 2.2's TI2V-5B, and each expert of Wan 2.2 by itself."""

    # Every linear layer of the blocks: self-attention, cross-attention, feed-forward.
    LORA_TARGETS = r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_wan"})
    COMFYUI = ComfyUI(_LAYOUT.rename)

    def lora_options(self) -> dict[str, Any]:
        """Files of both experts have the same names in them."""
        return {"load_into_transformer_2": True} if self.component == _LOW else {}

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (max_sequence_length, D)` of UMT5, zeros after the text.

        The zeros are not masked: the model was trained with them.
        """
        embeds, _ = pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )
        return {"prompt_embeds": embeds[0].contiguous()}

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        # For TI2V-5B, the pipeline repeats the timestep for each token: it can hold the tokens of a
        # given frame back. Without one this says the same, and takes less memory.
        noisy, mask = held_first(noisy, condition)
        timestep = level * 1000
        if mask is not None:
            timestep = timestep[:, None] * mask[:, ::2, ::2].flatten()
        return transformer(
            hidden_states=noisy,
            timestep=timestep,
            encoder_hidden_states=condition["prompt_embeds"],
            return_dict=False,
        )[0]

    def pipeline_with_image(self, pipeline: Any) -> Any:
        parts = {name: part for name, part in pipeline.components.items() if part is not None}
        return WanImageToVideoPipeline(
            **dict.fromkeys(("tokenizer", "text_encoder")) | parts, expand_timesteps=True
        )

    # -- experts ---------------------------------------------------------------------------

    @property
    def second_denoiser(self) -> str | None:
        """The expert for the other noise levels."""
        if self._boundary is None:
            return None
        return _HIGH if self.component == _LOW else _LOW

    def sigma_range(self) -> tuple[float, float]:
        if self._boundary is None:
            return 0.0, 1.0
        return (0.0, self._boundary) if self.component == _LOW else (self._boundary, 1.0)

    @property
    def _boundary(self) -> float | None:
        """The sigma that parts the experts; None where there is one model for all."""
        ratio = self._index.get("boundary_ratio")
        return None if ratio is None else float(ratio)


FAMILY = Wan
