"""A small AuraFlow: every class, every file and every setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_umt5
from engine.toy.components.parts import VAE_CHANNELS, build_four_channel_vae
from engine.toy.components.tokenizers import build_llama_tokenizer
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
HEADS, HEAD_DIM = 2, 32
JOINT_LAYERS, SINGLE_LAYERS = 2, 2

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.3, "pos_embed.*"),
    (0.3, "*norm1.linear.weight", "*norm1_context.linear.weight"),
    (0.1, "norm_out.linear.weight"),
    (1.4, "proj_out.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `AuraFlowPipeline.save_pretrained`."""
    tokenizer = build_llama_tokenizer(parts.captions())
    pipeline = AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=build_umt5(tokenizer, TEXT_DIM, seed=seed),
        vae=build_four_channel_vae(seed),
        transformer=_build_transformer(seed, HEADS * hidden_scale),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.73),
    )
    parts.save(pipeline, model_dir, dtype)


def _build_transformer(seed: int, heads: int) -> AuraFlowTransformer2DModel:
    transformer = parts.random_model(
        AuraFlowTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        sample_size=64,
        patch_size=2,
        in_channels=VAE_CHANNELS,
        out_channels=VAE_CHANNELS,
        num_mmdit_layers=JOINT_LAYERS,
        num_single_dit_layers=SINGLE_LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=heads * HEAD_DIM,
        pos_embed_max_size=16 * 16,
    )
    with torch.no_grad():
        # No bias opens these gates: the embedded time, which they are made of, is about 1.
        transformer.time_step_proj.linear_2.bias.add_(1.0)
    for block in transformer.joint_transformer_blocks:
        _open_gates(block.norm1.linear)
        _open_gates(block.norm1_context.linear)
    for block in transformer.single_transformer_blocks:
        _open_gates(block.norm1.linear)
    return transformer


@torch.no_grad()
def _open_gates(linear: torch.nn.Linear) -> None:
    """Move the gates of an adaptive norm towards 1, so that its block takes part from the start."""
    chunks = linear.weight.chunk(6)
    for gate in (2, 5):
        chunks[gate].add_(1 / linear.in_features)
