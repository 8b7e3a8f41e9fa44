"""A small SDXL: every class, every file and every setting of the published one, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_clip, build_clip_with_projection
from engine.toy.components.parts import VAE_CHANNELS, build_four_channel_vae
from engine.toy.components.tokenizers import (
    build_clip_tokenizer,
    build_other_clip_tokenizer,
    save_clip_vocabulary,
)
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

CLIP_DIM, OTHER_CLIP_DIM = 32, 64
WIDTHS = (32, 32, 64)
HEADS = (2, 2, 4)  # the setting is called `attention_head_dim`, and is their number
TRANSFORMER_LAYERS = (1, 1, 2)
TIME_DIM = 32

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (1.5, "conv_out.weight"),
    (0.3, "*conv1.weight", "*conv2.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `StableDiffusionXLPipeline.save_pretrained`."""
    captions = parts.captions()
    clip, other = build_clip_tokenizer(captions), build_other_clip_tokenizer(captions)
    pipeline = StableDiffusionXLPipeline(
        vae=build_four_channel_vae(seed),
        text_encoder=build_clip(clip, CLIP_DIM, seed=seed),
        text_encoder_2=build_clip_with_projection(
            other, OTHER_CLIP_DIM, seed=seed + 1, hidden_act="gelu"
        ),
        tokenizer=clip,
        tokenizer_2=other,
        unet=_build_unet(seed, hidden_scale),
        scheduler=build_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    parts.save(pipeline, model_dir, dtype)
    save_clip_vocabulary(clip, model_dir / "tokenizer")
    save_clip_vocabulary(other, model_dir / "tokenizer_2")


def build_scheduler() -> EulerDiscreteScheduler:
    """Build the published scheduler."""
    return EulerDiscreteScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon",
        timestep_spacing="leading",
        steps_offset=1,
    )


def _build_unet(seed: int, scale: int) -> UNet2DConditionModel:
    return parts.random_model(
        UNet2DConditionModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        sample_size=128,
        in_channels=VAE_CHANNELS,
        out_channels=VAE_CHANNELS,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=tuple(scale * width for width in WIDTHS),
        layers_per_block=2,
        transformer_layers_per_block=TRANSFORMER_LAYERS,
        attention_head_dim=tuple(scale * heads for heads in HEADS),
        cross_attention_dim=CLIP_DIM + OTHER_CLIP_DIM,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_DIM,
        projection_class_embeddings_input_dim=6 * TIME_DIM + OTHER_CLIP_DIM,
    )
