"""A small LTX-Video: every class, file and setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)

from engine.toy.components import parts
from engine.toy.components.clip_and_t5 import build_t5
from engine.toy.components.parts import mislead, open_gates, quieten
from engine.toy.components.tokenizers import build_t5_tokenizer
from engine.toy.components.weights import gains, one_thread

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM: Final = 64
HEADS, HEAD_DIM = 8, 24
LATENT_CHANNELS: Final = 128

# The autoencoders of 0.9 and of 0.9.7, which removes the last noise itself.
FIRST_VAE: Final[dict[str, Any]] = {
    "block_out_channels": (8, 16, 16, 16),
    "decoder_block_out_channels": (8, 16, 16, 16),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "timestep_conditioning": False,
}
LATER_VAE: Final[dict[str, Any]] = {
    "block_out_channels": (8, 16, 16, 16, 16),
    "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "decoder_block_out_channels": (8, 16, 32),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "spatio_temporal_scaling": (True, True, True, True),
    "decoder_spatio_temporal_scaling": (True, True, True),
    "decoder_inject_noise": (False, False, False, False),
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "upsample_residual": (True, True, True),
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}

# Factors on the scale that keeps sizes, by parameter.
GAIN: Final = gains(
    (0.3, "proj_in.weight"),
    (0.1, "*to_out.0.weight", "*net.2.weight"),
    (0.3, "time_embed.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: that of 0.9, or that of 0.9.7 and later."""
    first = flavour == "2b-0.9"
    tokenizer = build_t5_tokenizer(parts.captions())
    tokenizer.model_max_length = 128
    pipeline_class = LTXPipeline if first else LTXConditionPipeline
    pipeline = pipeline_class(
        scheduler=_build_scheduler() if first else FlowMatchEulerDiscreteScheduler(),
        vae=_build_vae(seed, **(FIRST_VAE if first else LATER_VAE)),
        text_encoder=build_t5(tokenizer, TEXT_DIM, seed=seed),
        tokenizer=tokenizer,
        transformer=_build_transformer(seed, HEADS * hidden_scale),
    )
    parts.save(pipeline, model_dir, dtype)


def _build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of 0.9."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def _build_transformer(seed: int, heads: int) -> LTXVideoTransformer3DModel:
    transformer = parts.random_model(
        LTXVideoTransformer3DModel,
        seed=seed,
        gain=GAIN,
        bias=0.005,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=heads,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=heads * HEAD_DIM,
        num_layers=2,
        caption_channels=TEXT_DIM,
    )
    for block in transformer.transformer_blocks:
        open_gates(block.scale_shift_table, chunks=6, gates=(2, 5))
    with one_thread():
        quieten(transformer.proj_out.weight, transformer.proj_in.weight)
    mislead(transformer.proj_out.bias, seed)
    return transformer


def _build_vae(seed: int, **config: Any) -> AutoencoderKLLTXVideo:
    """Random, with the statistics of the latents that it makes of toy images."""
    vae = parts.random_model(
        AutoencoderKLLTXVideo, seed=seed, latent_channels=LATENT_CHANNELS, **config
    )
    if vae.config.timestep_conditioning:
        vae.decoder.timestep_scale_multiplier.data.fill_(1000.0)
    with torch.no_grad(), one_thread():
        latents = parts.video_latents(vae, seed)
        vae.latents_mean.copy_(latents.mean((0, 2, 3, 4)))
        vae.latents_std.copy_(latents.std((0, 2, 3, 4)))
    return vae
