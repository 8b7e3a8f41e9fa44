"""FLUX.3: FLUX.2's latents, eight layers of Qwen3-VL as text, rectified flow.

The transformer has blocks for the image alone, for the text alone, and for both. It also has some
for conditioning images, which text to image leaves out; they stay as published. The authors publish
no trainer of it, but one of FLUX.3 Action, which has the same trunk, text and target
(`JointSingleSeq` of black-forest-labs/flux-action). The rest is that of diffusers' blocks.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import Flux3ModularPipeline, Flux3Transformer2DModel
from diffusers.models.transformers.transformer_flux3 import Flux3Attention, Flux3AttnProcessor
from diffusers.modular_pipelines.flux3.before_denoise import (
    Flux3PrepareLatentsStep,
    Flux3SetTimestepsStep,
)
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from torch.nn import functional
from transformers import Qwen2Tokenizer

from engine.families.shared.base import TokenLayout
from engine.families.shared.flux2_latents import Flux2LatentsFamily, grid
from engine.families.shared.lora_names import ComfyUI, Layout
from engine.families.shared.modular import BlocksPipeline
from engine.families.shared.text_masks import without_padding

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.prompts import SampleRequest

_MASK: Final = "prompt_embeds_mask"
_CONDITIONING: Final = "image_cond"
_PREPARED: Final = Flux3PrepareLatentsStep()  # has the distance between tokens of an image

# Names of the authors' model, which diffusers reads too
# (`_convert_non_diffusers_flux3_lora_to_diffusers`).
_LAYOUT: Final = Layout(
    {
        f"{block}.#.{layer}": f"{their_block}.#.{their_layer}"
        for block, their_block in (
            ("mode_blocks.image", "content_mode_blocks.image"),
            (f"mode_blocks.{_CONDITIONING}", f"content_mode_blocks.{_CONDITIONING}"),
            ("txt_mode_blocks", "txt_mode_blocks"),
            ("single_transformer_blocks", "single_blocks"),
        )
        for layer, their_layer in (
            ("attn.to_q", "q_proj"),
            ("attn.to_k", "k_proj"),
            ("attn.to_v", "v_proj"),
            ("attn.to_out.0", "attn_out"),
            ("ff.linear_in", "mlp_in"),
            ("ff.linear_out", "mlp_out"),
        )
    }
)


class TextMaskAttention(Flux3AttnProcessor):
    """Attention to the tokens of a sample's own text.

    Attributes:
        seen: Tokens of texts that are not padding of the batch, `(B, L)`; None for all. Kept until
            the next forward, since blocks may be recomputed.
    """

    seen: torch.Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Call the processor for `hidden_states (B, tokens, D)`, text first."""
        if self.seen is not None:
            after = hidden_states.shape[1] - self.seen.shape[1]  # tokens of the image
            attention_mask = functional.pad(self.seen, (0, after), value=True)[:, None, None]
        return super().__call__(attn, hidden_states, attention_mask, image_rotary_emb)


class Flux3Transformer(Flux3Transformer2DModel):
    """The stock class, which can also take texts of several lengths, and embeds exact times.

    Parameters and their names are the same.
    """

    # `from_config` reads the names of the settings from the signature.
    @wraps(Flux3Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        for module in self.modules():
            if isinstance(module, Flux3Attention):
                module.set_processor(TextMaskAttention())

    # The blocks of the pipeline read the names of its inputs from the signature.
    @wraps(Flux3Transformer2DModel.forward)
    def forward(
        self, *, timestep: torch.Tensor, text_mask: torch.Tensor | None = None, **names: Any
    ) -> Any:
        """Call the model.

        Args:
            timestep: Noise level of each sample, `(B,)`. The stock class rounds it to the precision
                of the latents, in which 0.962 to 0.966 are one; the authors' trainers do not.
            text_mask: Tokens of texts that are not padding of the batch, `(B, L)`; None for all.
            names: The stock class's inputs.
        """
        for block in (*self.txt_mode_blocks, *self.single_transformer_blocks):
            block.attn.processor.seen = text_mask
        exact = iter((timestep.float() * 1000,))  # first the image's time, then that of text: 0
        hook = self.time_proj.register_forward_pre_hook(
            lambda _, args: (next(exact, args[0]), *args[1:])
        )
        try:
            return super().forward(timestep=timestep, **names)
        finally:
            hook.remove()


class Flux3Pipeline(BlocksPipeline, Flux3ModularPipeline):
    """FLUX.3's blocks, called as a stock pipeline; texts are encoded as they are given."""

    LEFT_OUT = ("prompt_upsampler",)
    ENCODERS = ("text_encoder",)
    DECODERS = ("decode",)
    CLASSES = {"transformer": Flux3Transformer}  # noqa: RUF012


class TextProcessor:
    """Qwen3-VL's processor of texts alone; that of images and videos needs torchvision.

    Args:
        tokenizer: Its tokenizer.
    """

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = tokenizer.apply_chat_template


class Flux3(Flux2LatentsFamily):
    """FLUX.3 as text to image."""

    # Every linear layer of the blocks, without those for conditioning images.
    LORA_TARGETS = (
        r"(mode_blocks\.image|txt_mode_blocks|single_transformer_blocks)\.\d+\."
        r"(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.linear_(in|out))"
    )
    TOKENS = TokenLayout({"image_rotary_emb": (2, 0), "temb_mod": (3, 1)})
    COMFYUI = ComfyUI(_LAYOUT.rename)

    def __init__(
        self,
        name: str,
        flavour: str | None = None,
        root: Path | None = None,
        fps: float | None = None,
    ) -> None:
        super().__init__(name, flavour, root, fps)
        # Its scheduler is a setting of the blocks, which need no file of it.
        self._schedule = self._schedule or {"shift": Flux3SetTimestepsStep().shift}

    def pipeline_class(self) -> Any:
        return Flux3Pipeline

    def transformer_class(self) -> Any:
        return Flux3Transformer

    def without_gradient(self, model: Any, spec: DataKeys) -> str:
        """Name what is for conditioning images.

        The authors' trainer of FLUX.3 Action freezes what gets no loss, too (`freeze_streams`).
        """
        return rf"\.{_CONDITIONING}\."

    # -- text ------------------------------------------------------------------------------

    def load_text_pipeline(self, root: Path, dtype: torch.dtype, **components: Any) -> Any:
        """Return a pipeline with only what encodes prompts, without torchvision."""
        processor = TextProcessor(Qwen2Tokenizer.from_pretrained(root / "tokenizer"))
        return super().load_text_pipeline(root, dtype, tokenizer=processor, **components)

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (L, 8·D)` of eight layers, and `prompt_embeds_mask (L,)`.

        L is a multiple of 80, or `max_sequence_length`. The text encoder does not see what fills a
        text up to it, and the transformer does.
        """
        embeds = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            pipeline.text_encoder,
            pipeline.tokenizer,
            prompt,
            max_sequence_length=max_sequence_length,
            pad_multiple=pipeline.blocks.sub_blocks["text_encoder"].pad_multiple,
        )[0]
        mask = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds.contiguous(), _MASK: mask}

    # -- training --------------------------------------------------------------------------

    def arrange(self, condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without a mask where all texts of the batch are of one length."""
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
            hidden_states=noisy.flatten(2).transpose(1, 2),
            encoder_hidden_states=text,
            timestep=level,
            img_ids=_image_positions(height, width, noisy.device),
            txt_ids=_text_positions(text.shape[1], noisy.device),
            text_mask=condition.get(_MASK),
            return_dict=False,
        )[0]
        return grid(velocity, height, width)

    # -- sampling --------------------------------------------------------------------------

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Without masks, since a prompt and a negative prompt have forwards of their own.

        The guider needs a negative prompt at any scale but 1.
        """
        arguments = super().sample_arguments(request, condition, negative)
        arguments = {name: value for name, value in arguments.items() if _MASK not in name}
        return arguments if negative is not None else arguments | {"guidance_scale": 1.0}


def _image_positions(height: int, width: int, device: torch.device) -> torch.Tensor:
    """Return `(h·w, 4)`: time, row, column and place in a text of an image's tokens.

    They are made on the device, since a copy would wait.
    """
    with device:
        rows = torch.arange(height).repeat_interleave(width)
        columns = torch.arange(width).repeat(height)
        places = torch.stack([rows, columns], dim=1).float() * _PREPARED.image_rope_scale
        return functional.pad(places, (1, 1))


def _text_positions(length: int, device: torch.device) -> torch.Tensor:
    """Return the same of a text's tokens, `(length, 4)`."""
    with device:
        return functional.pad(torch.arange(length)[:, None].float(), (3, 0))


FAMILY = Flux3
