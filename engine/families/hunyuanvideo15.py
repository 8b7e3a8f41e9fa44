"""HunyuanVideo 1.5: text of Qwen2.5-VL, and what stands in quotes of ByT5, each with a mask.

Image-to-video has the first frame in extra channels, followed by zeros, and as tokens of SigLIP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from peft import PeftModel
from transformers import SiglipImageProcessor, SiglipVisionModel

from engine.families.shared import flux_kohya
from engine.families.shared.base import Family, TokenLayout
from engine.families.shared.hunyuanvideo15_forward import without_waiting
from engine.families.shared.hunyuanvideo15_pipeline import (
    GuidedImagePipeline,
    GuidedPipeline,
)
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.references import BEGINNING
from engine.families.shared.text_masks import mask_or_ones, without_padding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from PIL import Image

    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.prompts import SampleRequest

_TEXT: Final = "prompt_embeds"
_TEXT_MASK: Final = "prompt_embeds_mask"
_GLYPHS: Final = "prompt_embeds_2"
_GLYPHS_MASK: Final = "prompt_embeds_mask_2"
_IMAGE: Final = "image_embeds"

# Tencent's names, which musubi-tuner has; ComfyUI has query, key and value in one layer, and calls
# the layers as those of FLUX.1.
_TENCENT: Final = Layout(
    {
        f"transformer_blocks.#.{module}": f"double_blocks.#.{side}_{part}"
        for side, attention, forward, norm in (
            ("img", ("to_q", "to_k", "to_v", "to_out.0"), "ff", "norm1"),
            (
                "txt",
                ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
                "ff_context",
                "norm1_context",
            ),
        )
        for module, part in (
            *zip(
                (f"attn.{name}" for name in attention),
                ("attn_q", "attn_k", "attn_v", "attn_proj"),
                strict=True,
            ),
            (f"{forward}.net.0.proj", "mlp.fc1"),
            (f"{forward}.net.2", "mlp.fc2"),
            (f"{norm}.linear", "mod.linear"),
        )
    }
)


class HunyuanVideo15(Family):
    """HunyuanVideo 1.5, from text, or from text and a first frame."""

    # Every linear layer of the blocks: attention of both streams, and both feed-forwards.
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
        r"|ff(_context)?\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout({"freqs_cis": (2, 0)}, output=0)
    KOHYA = Kohya(_TENCENT.rename, {"ss_network_module": "networks.lora_hv_1_5"})
    COMFYUI = ComfyUI(flux_kohya.LAYOUT.rename, lokr=None)
    COMFYUI_READS_KOHYA = False

    def pipeline_class(self) -> Any:
        return GuidedImagePipeline if self._from_image else GuidedPipeline

    @property
    def _from_image(self) -> bool:
        return self._index.get("_class_name") == self.facts.pipelines[1]

    @property
    def image_encoder_class(self) -> Any:
        return SiglipVisionModel if self._from_image else None

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts, and first frames in fp32."""
        if self._from_image:
            components["feature_extractor"] = SiglipImageProcessor.from_pretrained(
                root / "feature_extractor"
            )
            if "image_encoder" not in components:
                components["image_encoder"] = SiglipVisionModel.from_pretrained(
                    root / "image_encoder", dtype=torch.float32
                )
        return super().load_text_pipeline(root, dtype, **components)

    def load_lora(self, pipeline: Any, directory: Path) -> None:
        """As a user would: this pipeline has no functions for LoRAs, but peft does."""
        PeftModel.from_pretrained(pipeline.transformer, directory)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, D)` of Qwen2.5-VL and `prompt_embeds_2 (G, E)` of ByT5, with masks.

        Without the template before a prompt and without what fills texts up, which is masked in
        the model. ByT5 encodes what the prompt has in quotes; without any, one masked token is
        left, since the pipeline takes no less.
        """
        pipeline.tokenizer_max_length = max_sequence_length  # an attribute without an argument
        text, mask, glyphs, glyphs_mask = pipeline.encode_prompt(prompt)
        return _cut(_TEXT, _TEXT_MASK, text, mask) | _cut(
            _GLYPHS, _GLYPHS_MASK, glyphs, glyphs_mask
        )

    def encode_with_images(
        self, pipeline: Any, prompt: str, max_sequence_length: int, images: Sequence[Image.Image]
    ) -> dict[str, torch.Tensor]:
        """Return the text, and `image_embeds (729, E)` of SigLIP."""
        seen = pipeline.encode_image(images[0], 1, pipeline.image_encoder.device, torch.float32)
        text = self.encode(pipeline, prompt, max_sequence_length)
        return text | {_IMAGE: seen[0].contiguous()}

    def load_vae(self, root: Path, dtype: torch.dtype) -> Any:
        """One that encodes and decodes videos one by one: its attention takes no more at a time.

        The mask has no dimension for heads (diffusers 0.42).
        """
        vae = super().load_vae(root, dtype)
        vae.enable_slicing()
        return vae

    def without_gradient(self, model: Any, spec: DataKeys) -> str:
        """Name what makes the last block's text, which nothing reads.

        From text alone there are no tokens of an image to embed either.
        """
        last = len(model.transformer_blocks) - 1
        text = rf"^transformer_blocks\.{last}\.(attn\.to_add_out|ff_context)\."
        return text if self.facts.needs_first_frame(self._flavour) else rf"{text}|^image_embedder\."

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without ByT5's tokens where no prompt of the batch has any.

        And without the masks of texts of which none is filled up.
        """
        return without_padding(condition)

    def predict(
        self,
        transformer: Any,
        noisy: torch.Tensor,
        level: torch.Tensor,
        condition: dict[str, torch.Tensor],
        guidance: float,
    ) -> torch.Tensor:
        """From text alone, the model gets zeros for a first frame, its mask and its embedding.

        All tokens of the embedding are masked then, and so there are none here.

        Step-distilled models (MeanFlow) predict the mean velocity from one time to another, which
        samples are given as the next step's. Where both are one, it is the velocity that the loss
        is of.
        """
        batch, channels, *size = noisy.shape
        text, glyphs = condition[_TEXT], condition[_GLYPHS]
        mask, glyphs_mask = condition.get(_TEXT_MASK), condition.get(_GLYPHS_MASK)
        first_frame = noisy.new_zeros(batch, transformer.config.in_channels - channels, *size)
        image = text.new_zeros(batch, 0, transformer.config.image_embed_dim)
        if BEGINNING in condition:
            first_frame[:, :-1, :1] = condition[BEGINNING]
            first_frame[:, -1, 0] = 1  # which frame is given
            image = condition[_IMAGE].to(text.dtype)
        masked = mask is not None or glyphs_mask is not None
        times = level * 1000
        with without_waiting(
            transformer, refined=mask is not None, masked=masked, image=BEGINNING in condition
        ):
            return transformer(
                hidden_states=torch.cat([noisy, first_frame], dim=1),
                timestep=times,
                timestep_r=times if transformer.config.use_meanflow else None,
                encoder_hidden_states=text,
                encoder_attention_mask=mask_or_ones(mask, text),
                encoder_hidden_states_2=glyphs,
                encoder_attention_mask_2=mask_or_ones(glyphs_mask, glyphs),
                image_embeds=image,
                return_dict=False,
            )[0]

    def tokens_of(self, height: int, width: int, frames: int = 1) -> int:
        return height * width * frames

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """At a scale of 1, the guider makes one prediction; at any other, below 1 too, two.

        Texts have no masks: they are encoded without padding, but for the single token of a prompt
        that has nothing in quotes.
        """
        arguments = super().sample_arguments(request, condition, negative)
        for kind in ("", "negative_"):
            for mask in (_TEXT_MASK, _GLYPHS_MASK):
                arguments.pop(f"{kind}{mask}", None)
            arguments.pop(f"{kind}{_IMAGE}", None)
        return arguments if request.guided else arguments | {"guidance_scale": 1.0}

    def pipeline_with_image(
        self, pipeline: Any, condition: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        """Return the same, with the image encoder's output, computed already, in its place."""
        pipeline.seen = (condition or {}).get(_IMAGE)
        return pipeline


def _cut(
    name: str, mask_name: str, text: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a text's unmasked tokens, at least one, of `(1, L, D)` and `(1, L)`."""
    # The pipeline casts masks to the precision of the text, and bf16 cannot count beyond 256.
    length = max(1, int(mask[0].bool().sum()))
    return {name: text[0, :length].contiguous(), mask_name: mask[0, :length].bool()}


FAMILY = HunyuanVideo15
