"""A small Chroma: every class, every file and every setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_t5
from engine.toy.components.parts import quieten
from engine.toy.components.tokenizers import build_t5_tokenizer
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
HEADS, HEAD_DIM = 4, 32
LAYERS, SINGLE_LAYERS = 2, 3

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "x_embedder.weight"),
    (0.03, "*to_out.0.weight", "*to_add_out.weight", "*net.2.weight"),
    (0.03, "*single_transformer_blocks*proj_out.weight"),
    (0.3, "distilled_guidance_layer.out_proj.weight"),
    (0.7, "proj_out.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model; all flavours have one layout."""
    tokenizer = build_t5_tokenizer(parts.captions())
    pipeline = ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        vae=parts.picture_vae(seed),
        text_encoder=build_t5(tokenizer, TEXT_DIM, seed=seed),
        tokenizer=tokenizer,
        transformer=_build_transformer(seed, HEADS * hidden_scale),
    )
    parts.save(pipeline, model_dir, dtype)


def _build_transformer(seed: int, heads: int) -> ChromaTransformer2DModel:
    transformer = parts.random_model(
        ChromaTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=LAYERS,
        num_single_layers=SINGLE_LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 14, 14),
        approximator_num_channels=64,
        approximator_hidden_dim=HEADS * HEAD_DIM,
        approximator_layers=2,
    )
    with torch.no_grad():
        # One small network makes shifts, scales and gates of all blocks, with one bias for all.
        transformer.distilled_guidance_layer.out_proj.bias.add_(0.5)
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.x_embedder.weight)
    return transformer
