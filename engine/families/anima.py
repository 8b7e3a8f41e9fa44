"""Anima: the transformer of Cosmos-Predict2 with Qwen3's text, without a stock pipeline.

A part between text encoder and transformer, `text_conditioner`, makes the transformer's text of
Qwen3's and of the ids of T5's tokens. Trainers leave it as it is by default (`train_llm_adapter` of
sd-scripts), so its output is what the cache keeps.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import AnimaModularPipeline, CosmosTransformer3DModel
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

from engine.families.shared.base import TokenLayout
from engine.families.shared.lora_names import ComfyUI, Kohya, Layout
from engine.families.shared.modular import BlocksPipeline
from engine.families.shared.packing import OneFrameFamily
from jobs.errors import UserError

if TYPE_CHECKING:
    from jobs.spec.keys.prompts import SampleRequest

# Names of Cosmos-Predict2's authors, which diffusers reads too
# (`_convert_non_diffusers_anima_lora_to_diffusers`).
_LAYOUT: Final = Layout(
    {
        **{
            f"transformer_blocks.#.{attention}.{module}": f"blocks.#.{theirs}.{part}"
            for attention, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
            for module, part in (
                ("to_q", "q_proj"),
                ("to_k", "k_proj"),
                ("to_v", "v_proj"),
                ("to_out.0", "output_proj"),
            )
        },
        "transformer_blocks.#.ff.net.0.proj": "blocks.#.mlp.layer1",
        "transformer_blocks.#.ff.net.2": "blocks.#.mlp.layer2",
        **{
            f"transformer_blocks.#.norm{number}.linear_{part}": (
                f"blocks.#.adaln_modulation_{theirs}.{part}"
            )
            for number, theirs in ((1, "self_attn"), (2, "cross_attn"), (3, "mlp"))
            for part in (1, 2)
        },
    }
)


class AnimaTransformer(CosmosTransformer3DModel):
    """The stock class, without torchvision, with which that resizes a mask of padding.

    Images have no padding, so the mask's channel is zero, and is added here. Parameters and their
    names are the same (diffusers 0.42).
    """

    # `from_config` reads the names of the settings from the signature.
    @wraps(CosmosTransformer3DModel.__init__)  # type: ignore[misc]
    def __init__(
        self, *, in_channels: int = 16, concat_padding_mask: bool = True, **config: Any
    ) -> None:
        super().__init__(in_channels=in_channels + 1, concat_padding_mask=False, **config)
        # Pipelines ask for the latents' channels.
        self.register_to_config(in_channels=in_channels)

    def forward(
        self, hidden_states: torch.Tensor, *, padding_mask: torch.Tensor | None = None, **names: Any
    ) -> Any:
        return super().forward(
            hidden_states, condition_mask=torch.zeros_like(hidden_states[:, :1]), **names
        )


class AnimaPipeline(BlocksPipeline, AnimaModularPipeline):
    """Anima's blocks, called as a stock pipeline."""

    ENCODERS = ("text_encoder", "denoise.text_conditioning")
    DECODERS = ("decode.decode", "decode.postprocess")
    CLASSES = {"transformer": AnimaTransformer}  # noqa: RUF012


class Anima(OneFrameFamily):
    """Anima."""

    # Every linear layer of the blocks but the modulation, as sd-scripts (`networks/lora_anima.py`).
    LORA_TARGETS = (
        r"transformer_blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    )
    TOKENS = TokenLayout({"image_rotary_emb": (2, 0)})
    KOHYA = Kohya(_LAYOUT.rename, {"ss_network_module": "networks.lora_anima"})
    COMFYUI = ComfyUI(_LAYOUT.rename)

    def pipeline_class(self) -> Any:
        return AnimaPipeline

    def transformer_class(self) -> Any:
        return AnimaTransformer

    def encode(
        self, pipeline: Any, prompt: str, max_sequence_length: int, *, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds (512, D)`, zeros after the text.

        The zeros are not masked: the model was trained with them.

        Raises:
            UserError: Texts may be longer than that.
        """
        longest = pipeline.text_conditioner.config.min_sequence_length
        if max_sequence_length > longest:
            raise UserError(
                f"max_sequence_length {max_sequence_length} is more than the {longest} tokens that "
                "the model was trained with",
                f"set max_sequence_length: {longest}",
            )
        texts = AnimaTextEncoderStep.encode_prompt(
            pipeline,
            prompt,
            prepare_unconditional_embeds=False,
            max_sequence_length=max_sequence_length,
        )
        conditioner = pipeline.text_conditioner
        embeds = conditioner(
            source_hidden_states=texts["qwen_prompt_embeds"].to(conditioner.dtype),
            source_attention_mask=texts["qwen_attention_mask"],
            target_input_ids=texts["t5_input_ids"],
            target_attention_mask=texts["t5_attention_mask"],
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
        velocity: torch.Tensor = transformer(
            hidden_states=noisy.unsqueeze(2),
            timestep=level,
            encoder_hidden_states=condition["prompt_embeds"],
            return_dict=False,
        )[0]
        return velocity.squeeze(2)

    def sample_arguments(
        self,
        request: SampleRequest,
        condition: dict[str, torch.Tensor],
        negative: dict[str, torch.Tensor] | None,
    ) -> dict[str, Any]:
        """Set the scale to 1 without a negative prompt: the guider needs one at any other."""
        arguments = super().sample_arguments(request, condition, negative)
        return arguments if negative is not None else arguments | {"guidance_scale": 1.0}

    def unpack(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> torch.Tensor:
        return latents.squeeze(2)


FAMILY = Anima
