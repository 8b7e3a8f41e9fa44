"""A small Krea 2: every class, file and setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel

from engine.toy.components import parts
from engine.toy.components.language_models import build_qwen3_vl
from engine.toy.components.parts import open_gates, quieten
from engine.toy.components.tokenizers import build_qwen_tokenizer
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import gains, one_thread
from engine.toy.families.qwen_image import build_video_vae

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM: Final = 32
TEXT_LAYERS: Final = (1, 2, 3)  # published: twelve of 36
HEADS: Final = 4
KEY_HEADS: Final = 2
HEAD_DIM: Final = 32

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "img_in.weight", "txt_in.linear_2.weight"),
    (0.3, "time_mod_proj.weight", "*scale_shift_table"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model; the flavors differ in how the pipeline shifts."""
    tokenizer = build_qwen_tokenizer(parts.captions())
    pipeline = Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=1000,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=6400,
        ),
        vae=build_video_vae(seed),
        text_encoder=build_qwen3_vl(
            tokenizer, TEXT_DIM, seed=seed, layers=len(TEXT_LAYERS) + 1
        ).model,
        tokenizer=tokenizer,
        transformer=_build_transformer(seed, hidden_scale),
        text_encoder_select_layers=TEXT_LAYERS,
        is_distilled=flavour == "turbo",
    )
    parts.save(pipeline, model_dir, dtype)


@torch.no_grad()
def _build_transformer(seed: int, scale: int) -> Krea2Transformer2DModel:
    """Random; published: 48 heads of 128, 12 of keys, 28 layers, twice two blocks of text."""
    transformer = parts.random_model(
        Krea2Transformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS * scale,
        num_key_value_heads=KEY_HEADS * scale,
        intermediate_size=2 * HEADS * HEAD_DIM * scale,
        timestep_embed_dim=32,
        text_hidden_dim=TEXT_DIM,
        num_text_layers=len(TEXT_LAYERS),
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=2 * TEXT_DIM,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(8, 12, 12),
    )
    for name, parameter in transformer.named_parameters():
        if "norm" in name:
            parameter.zero_()  # its norms multiply by 1 + weight
    for block in transformer.transformer_blocks:
        open_gates(block.scale_shift_table, chunks=6, gates=(2, 5))
    with one_thread():
        quieten(transformer.final_layer.linear.weight, transformer.img_in.weight)
    return transformer
