"""A small Stable Diffusion 3: every class, every file and every setting of the published ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from engine.toy.components import parts, tokenizers
from engine.toy.components.clip_and_t5 import build_clip_with_projection, build_t5
from engine.toy.components.parts import open_gates, quieten
from engine.toy.components.vae import LATENT_CHANNELS
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

CLIP_DIM = 32
T5_DIM = 96  # wider than both CLIPs together, as published: theirs are filled up with zeros
HEADS, HEAD_DIM = 4, 16
LAYERS = 3

# What tells the flavours' transformers apart.
SWITCHES: Final[dict[str, dict[str, Any]]] = {
    "3-medium": {},
    "3.5-medium": {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
    "3.5-large": {"qk_norm": "rms_norm"},
    "3.5-large-turbo": {"qk_norm": "rms_norm"},
}

# Factors on the scale that keeps sizes, by parameter.
GAIN: Final = gains(
    (0.1, "pos_embed.proj.weight"),
    (0.03, "*to_out.0.weight", "*to_add_out.weight", "*net.2.weight"),
    (0.1, "norm_out.linear.weight"),
    (4.0, "proj_out.weight"),
    (0.3, "*norm1.linear.weight", "*norm1_context.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `StableDiffusion3Pipeline.save_pretrained`."""
    captions = parts.captions()
    clip, other = (
        tokenizers.build_clip_tokenizer(captions),
        tokenizers.build_other_clip_tokenizer(captions),
    )
    t5 = tokenizers.build_t5_tokenizer(captions)
    pipeline = StableDiffusion3Pipeline(
        transformer=_build_transformer(seed, HEADS * hidden_scale, **SWITCHES[flavour]),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        vae=parts.picture_vae(seed),
        text_encoder=build_clip_with_projection(clip, CLIP_DIM, seed=seed),
        tokenizer=clip,
        text_encoder_2=build_clip_with_projection(
            other, CLIP_DIM, seed=seed + 1, hidden_act="gelu"
        ),
        tokenizer_2=other,
        text_encoder_3=build_t5(t5, T5_DIM, seed=seed),
        tokenizer_3=t5,
    )
    parts.save(pipeline, model_dir, dtype)
    tokenizers.save_clip_vocabulary(clip, model_dir / "tokenizer")
    tokenizers.save_clip_vocabulary(other, model_dir / "tokenizer_2")


def _build_transformer(seed: int, heads: int, **switches: Any) -> SD3Transformer2DModel:
    transformer = parts.random_model(
        SD3Transformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        sample_size=128,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=T5_DIM,
        caption_projection_dim=heads * HEAD_DIM,
        pooled_projection_dim=2 * CLIP_DIM,
        pos_embed_max_size=32,
        **switches,
    )
    for block in transformer.transformer_blocks:
        chunks, gates = (9, (2, 5, 8)) if block.use_dual_attention else (6, (2, 5))
        open_gates(block.norm1.linear.bias, chunks=chunks, gates=gates)
        if not block.context_pre_only:
            open_gates(block.norm1_context.linear.bias, chunks=6, gates=(2, 5))
    with torch.no_grad(), one_thread():
        # The table of positions, of size 1 as published, would drown the embedded latents.
        transformer.pos_embed.pos_embed.mul_(0.1)
        quieten(transformer.proj_out.weight, transformer.pos_embed.proj.weight)
    return transformer
