"""A small Sana: every class, every file and every setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from engine.toy.components.language_models import build_gemma2
from engine.toy.components.parts import captions, open_gates, random_model, sample_pixels, save
from engine.toy.components.tokenizers import build_gemma_tokenizer
from engine.toy.components.vae_dc import CHANNELS, build_vae_dc
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

HEADS: Final = 2
HEAD_DIM: Final = 32
GEMMA_DIM: Final = 64

# Factors on the scale that keeps sizes: the stream is small, so that blocks count in it.
GAIN: Final = gains(
    (0.1, "patch_embed*"),
    (0.1, "*to_out.0.weight", "*conv_point.weight"),
    (0.3, "time_embed.linear*", "*scale_shift_table"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `SanaPipeline.save_pretrained`."""
    tokenizer = build_gemma_tokenizer(captions())
    pipeline = SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_gemma2(tokenizer, GEMMA_DIM, seed=seed),
        vae=build_vae_dc(sample_pixels(seed), seed=seed),
        transformer=build_transformer(HEADS * hidden_scale, flavour, seed=seed),
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )
    save(pipeline, model_dir, dtype)


@torch.no_grad()
def build_transformer(heads: int, flavour: str, *, seed: int) -> SanaTransformer2DModel:
    """Random, with open gates; published: 70 heads of 32 and 20 layers, or 36 and 28."""
    normed: dict[str, Any] = (
        {"qk_norm": "rms_norm_across_heads"} if flavour.startswith("1.5") else {}
    )
    transformer = random_model(
        SanaTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=CHANNELS[-1],
        out_channels=CHANNELS[-1],
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        num_layers=3,
        num_cross_attention_heads=heads,
        cross_attention_head_dim=HEAD_DIM,
        cross_attention_dim=heads * HEAD_DIM,
        caption_channels=GEMMA_DIM,
        mlp_ratio=2.5,
        attention_bias=False,
        sample_size=32,
        patch_size=1,
        **normed,
    )
    for block in transformer.transformer_blocks:
        open_gates(block.scale_shift_table, chunks=6, gates=(2, 5))
    return transformer
