"""A small FLUX.2: every class, every file and every setting of the published ones, tiny sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from diffusers import (
    AutoencoderKLFlux2,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)

from engine.toy.components import language_models, parts
from engine.toy.components.tokenizers import build_mistral_tokenizer, build_qwen_tokenizer
from engine.toy.components.weights import gains, one_thread
from engine.toy.families.flux import build_scheduler

if TYPE_CHECKING:
    from pathlib import Path

TEXT_DIM = 64
TEXT_LAYERS = 3
"""The transformer reads this many layers of the text encoder, side by side."""
HEADS, HEAD_DIM = 4, 32
LAYERS, SINGLE_LAYERS = 2, 3
LATENT_CHANNELS = 32

# Factors on the scale that keeps sizes, by parameter.
GAIN = gains(
    (0.1, "x_embedder.weight"),
    (0.5, "proj_out.weight"),
    (0.03, "*_out.weight", "*to_out.0.weight"),  # what blocks add to the stream
    (0.3, "*modulation*"),
    # Training and sampling at different guidance should not be far apart.
    (0.3, "time_guidance_embed.guidance*"),
    (0.1, "norm_out.linear.weight"),
)


def write(model_dir: Path, *, flavour: str, seed: int, dtype: str, hidden_scale: int) -> None:
    """Write the model: `dev` with Mistral and guidance, `klein` with Qwen3 and without."""
    dev = flavour == "dev"
    made = {
        "scheduler": build_scheduler(),
        "vae": build_flux2_vae(seed),
        "transformer": _build_transformer(seed, HEADS * hidden_scale, guidance=dev),
    }
    if dev:
        mistral = build_mistral_tokenizer(parts.captions())
        encoder = language_models.build_mistral3(mistral, TEXT_DIM, seed=seed)
        pipeline = Flux2Pipeline(**made, text_encoder=encoder, tokenizer=mistral)
        parts.save(pipeline, model_dir, dtype)
        language_models.save_pixtral_processor(model_dir)
        return
    qwen = build_qwen_tokenizer(parts.captions())
    klein = Flux2KleinPipeline(
        **made,
        text_encoder=language_models.build_qwen3_lm(qwen, TEXT_DIM, seed=seed),
        tokenizer=qwen,
        is_distilled="base" not in flavour,
    )
    parts.save(klein, model_dir, dtype)


def _build_transformer(seed: int, heads: int, *, guidance: bool) -> Flux2Transformer2DModel:
    transformer = parts.random_model(
        Flux2Transformer2DModel,
        seed=seed,
        gain=GAIN,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=LAYERS,
        num_single_layers=SINGLE_LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_LAYERS * TEXT_DIM,
        axes_dims_rope=(HEAD_DIM // 4,) * 4,
        guidance_embeds=guidance,
    )
    for modulation, sets in (
        (transformer.double_stream_modulation_img, 2),
        (transformer.double_stream_modulation_txt, 2),
        (transformer.single_stream_modulation, 1),
    ):
        open_modulated_gates(modulation.linear.weight, sets)
    return transformer


@torch.no_grad()
def open_modulated_gates(weight: torch.Tensor, sets: int) -> None:
    """Move the gates to about 1: modulations have no bias, but what they see is 0.2 on average.

    Args:
        weight: Of shifts, scales and gates, `sets` of them, (3 · sets · width, width); changed.
        sets: Of a modulation.
    """
    for gate in weight.chunk(3 * sets)[2::3]:
        gate.add_(5 / weight.shape[1])


def build_flux2_vae(seed: int) -> AutoencoderKLFlux2:
    """Random; its batch norm knows the latents that it makes of toy images."""
    vae = parts.random_model(
        AutoencoderKLFlux2,
        seed=seed,
        block_out_channels=(16, 16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
    )
    with torch.no_grad(), one_thread():
        latents = vae.encode(parts.sample_pixels(seed)).latent_dist.mode()
        cells = Flux2Pipeline._patchify_latents(latents)
        vae.bn.running_mean.copy_(cells.mean((0, 2, 3)))
        vae.bn.running_var.copy_(cells.var((0, 2, 3)))
    return vae
