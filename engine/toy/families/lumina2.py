"""A small Lumina-Image 2.0: every class, every file and every setting, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)

from engine.toy.components.language_models import build_gemma2
from engine.toy.components.parts import captions, open_gates, picture_vae, random_model, save
from engine.toy.components.tokenizers import build_gemma_tokenizer
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

HEADS: Final = 4
HEAD_DIM: Final = 24
GEMMA_DIM: Final = 64

# Factors on the scale that keeps sizes: the stream is small, so that blocks count in it.
GAIN: Final = gains(
    (0.1, "x_embedder*", "time_caption_embed.caption_embedder*"),
    (0.3, "*norm1.linear.weight", "norm_out.linear_1.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `Lumina2Pipeline.save_pretrained`."""
    tokenizer = build_gemma_tokenizer(captions())
    pipeline = Lumina2Pipeline(
        transformer=build_transformer(HEADS * hidden_scale, seed=seed),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=6.0),
        vae=picture_vae(seed),
        text_encoder=build_gemma2(tokenizer, GEMMA_DIM, seed=seed),
        tokenizer=tokenizer,
    )
    save(pipeline, model_dir, dtype)


@torch.no_grad()
def build_transformer(heads: int, *, seed: int) -> Lumina2Transformer2DModel:
    """Random, with open gates; published: 24 heads of 96, 26 layers, 2 refiners of each kind."""
    transformer = random_model(
        Lumina2Transformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        sample_size=128,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        hidden_size=heads * HEAD_DIM,
        num_layers=2,
        num_refiner_layers=2,
        num_attention_heads=heads,
        num_kv_heads=heads // 2,
        multiple_of=32,
        norm_eps=1e-5,
        scaling_factor=1.0,
        axes_dim_rope=(HEAD_DIM // 3,) * 3,
        axes_lens=(300, 512, 512),
        cap_feat_dim=GEMMA_DIM,
    )
    for name, parameter in transformer.named_parameters():
        if name.endswith(("norm2.weight", "ffn_norm2.weight")):
            # What a block adds is of this size, whatever its linear layers make.
            parameter.fill_(0.1)
        if name.endswith("norm1.linear.bias"):
            open_gates(parameter, chunks=4, gates=(1, 3))
    return transformer
