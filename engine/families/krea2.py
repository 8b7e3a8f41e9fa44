"""Krea 2: one stream of image and text, which is twelve layers of Qwen3-VL, rectified flow.

The authors publish no trainer. Inputs, target and sign are those of their inference code
(`sampling.py` of krea-ai/krea-2) and of the trainers that they recommend: diffusers'
(`train_dreambooth_lora_krea2.py`), ai-toolkit and musubi-tuner.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from diffusers import Krea2Pipeline
from torch.nn import functional

from engine.families.shared.base import TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.packing import OneFrameFamily, PackedFamily, pack, unpack
from engine.families.shared.text_masks import fill_masks, without_masked, without_padding

if TYPE_CHECKING:
    import torch

    from jobs.spec.keys.prompts import SampleRequest

_MASK: Final = "prompt_embeds_mask"
_DISTILLED_SHIFT: Final = math.exp(1.15)  # Turbo's at every size, in the pipeline

_BLOCKS: Final = {
    "transformer_blocks.#": "blocks.#",
    "text_fusion.layerwise_blocks.#": "txtfusion.layerwise_blocks.#",
    "text_fusion.refiner_blocks.#": "txtfusion.refiner_blocks.#",
}
_LAYERS: Final = {
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    "ff.gate": "mlp.gate",
    "ff.up": "mlp.up",
    "ff.down": "mlp.down",
}
# Names of the authors' model, which diffusers reads too
# (`_convert_non_diffusers_krea2_lora_to_diffusers`).
_LAYOUT: Final = Layout(
    {
        f"{block}.{layer}": f"{their_block}.{their_layer}"
        for block, their_block in _BLOCKS.items()
        for layer, their_layer in _LAYERS.items()
    }
    | {
        "img_in": "first",
        "final_layer.linear": "last.linear",
        "time_embed.linear_1": "tmlp.0",
        "time_embed.linear_2": "tmlp.2",
        "time_mod_proj": "tproj.1",
        "txt_in.linear_1": "txtmlp.1",
        "txt_in.linear_2": "txtmlp.3",
        "text_fusion.projector": "txtfusion.projector",
    }
)


class WholeTextPipeline(Krea2Pipeline):
    """The stock pipeline, which also takes encoded prompts without masks, as having no padding.

    Diffusers (0.42) insists on a mask, masks attention even where it masks nothing, and takes a
    prompt and a negative prompt of one length only.
    """

    # `from_pretrained` reads the names and classes of a pipeline's components from its signature.
    @wraps(Krea2Pipeline.__init__)  # type: ignore[misc]
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)

    @wraps(Krea2Pipeline.__call__)
    def __call__(self, *words: Any, **names: Any) -> Any:
        guided = names.get("guidance_scale", 1.0) > 0
        if words or not fill_masks(names, {_MASK: "prompt_embeds"}, guided=guided):
            return super().__call__(*words, **names)
        hook = self.transformer.register_forward_pre_hook(_as_trained, with_kwargs=True)
        try:
            return super().__call__(**names)
        finally:
            hook.remove()


def _as_trained(_: Any, args: tuple[Any, ...], names: dict[str, Any]) -> Any:
    """Drop a text's mask, and count positions by its own length, as a forward pre-hook."""
    image, text = names["hidden_states"].shape[1], names["encoder_hidden_states"].shape[1]
    places = functional.pad(names["position_ids"][-image:], (0, 0, text, 0))  # text has zeros
    return args, names | {"position_ids": places, "encoder_attention_mask": None}


class Krea2(PackedFamily, OneFrameFamily):
    """Krea 2, Raw and Turbo."""

    # Every linear layer of the blocks, also of those that fuse the layers of the text. The
    # authors' list has those outside of blocks too, and not the gates of feed-forwards.
    LORA_TARGETS = (
        r"(transformer_blocks|text_fusion\.(layerwise|refiner)_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_gate|to_out\.0)|ff\.(gate|up|down))"
    )
    TOKENS = TokenLayout(
        {"image_rotary_emb": (2, 0), "attention_mask": (4, 3)}, counted_by="img_in"
    )
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_krea2"})
    COMFYUI = ComfyUI(_LAYOUT.rename)

    def pipeline_class(self) -> Any:
        return WholeTextPipeline

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, N, D)` of N layers, and `prompt_embeds_mask (L,)`.

        L is the prompt's own length. The pipeline pads between the prompt and the end of its
        template. The padding is masked everywhere, and all text has the same position in the
        transformer, so that nothing changes without it.
        """
        embeds, mask = pipeline.encode_prompt(prompt, max_sequence_length=max_sequence_length)
        kept = mask[0].bool()
        return {"prompt_embeds": embeds[0, kept].contiguous(), _MASK: kept[kept]}

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without a mask where no text of the batch is padded."""
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        height, width = noisy.shape[2:]
        text = condition["prompt_embeds"]
        velocity = transformer(
            hidden_states=pack(noisy),
            encoder_hidden_states=text,
            timestep=level,
            position_ids=Krea2Pipeline.prepare_position_ids(
                text.shape[1], height // 2, width // 2, noisy.device
            ),
            encoder_attention_mask=condition.get(_MASK),
            return_dict=False,
        )[0]
        return unpack(velocity, height, width)

    def shift_of(self, height: int, width: int, frames: int = 1) -> float:
        return self._shift_of_turbo or super().shift_of(height, width, frames)

    def sampler_shift_of(self, height: int, width: int, frames: int = 1) -> float:
        return self._shift_of_turbo or super().sampler_shift_of(height, width, frames)

    @property
    def _shift_of_turbo(self) -> float | None:
        return _DISTILLED_SHIFT if self._index.get("is_distilled") else None

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Texts without padding and masks."""
        seen = without_masked(condition, _MASK)
        return super().sample_arguments(request, seen, negative and without_masked(negative, _MASK))


FAMILY = Krea2
