"""A small PixArt-Sigma: every class, every file and every setting of the published ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from diffusers import (
    DPMSolverMultistepScheduler,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_t5
from engine.toy.components.parts import VAE_CHANNELS, build_four_channel_vae, open_gates
from engine.toy.components.tokenizers import build_t5_tokenizer
from engine.toy.components.weights import gains

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
HEADS, HEAD_DIM = 4, 24
LAYERS = 3

# The class that published models were saved as, and the settings that only it has.
CLASS = "Transformer2DModel"
SETTINGS = {
    "double_self_attention": False,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "use_linear_projection": False,
}

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.5, "proj_out.weight"),
    (0.3, "adaln_single.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model in the layout of `PixArtSigmaPipeline.save_pretrained`."""
    tokenizer = build_t5_tokenizer(parts.captions())
    pipeline = PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=build_t5(tokenizer, TEXT_DIM, seed=seed),
        vae=build_four_channel_vae(seed),
        transformer=_build_transformer(seed, HEADS * hidden_scale, int(flavour)),
        scheduler=DPMSolverMultistepScheduler(
            num_train_timesteps=1000,
            beta_start=0.0001,
            beta_end=0.02,
            beta_schedule="linear",
            prediction_type="epsilon",
        ),
    )
    parts.save(pipeline, model_dir, dtype)
    _rename_class(model_dir)


def _build_transformer(seed: int, heads: int, pixels: int) -> PixArtTransformer2DModel:
    width = heads * HEAD_DIM
    transformer = parts.random_model(
        PixArtTransformer2DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        in_channels=VAE_CHANNELS,
        out_channels=2 * VAE_CHANNELS,
        num_layers=LAYERS,
        cross_attention_dim=width,
        caption_channels=TEXT_DIM,
        sample_size=pixels // 8,
        interpolation_scale=pixels // 512,
        use_additional_conditions=False,
    )
    for block in transformer.transformer_blocks:
        open_gates(block.scale_shift_table, chunks=6, gates=(2, 5))
    return transformer


def _rename_class(model_dir: Path) -> None:
    """Call the transformer what published models call it."""
    for path, change in (
        (model_dir / "model_index.json", {"transformer": ["diffusers", CLASS]}),
        (model_dir / "transformer" / "config.json", {"_class_name": CLASS} | SETTINGS),
    ):
        values = json.loads(path.read_text(encoding="utf-8")) | change
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
