"""A small AutoencoderKL of Stable Diffusion's kind: four channels, random, known by its scale.

SDXL, PixArt-Sigma and AuraFlow have the same one.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL

from engine.toy.components import parts
from engine.toy.components.weights import one_thread

CHANNELS = 4
WIDTHS = (8, 16, 16, 16)


@torch.no_grad()
def build_four_channel_vae(seed: int) -> AutoencoderKL:
    """With `scaling_factor` measured over toy images, of which it makes latents of mean zero."""
    vae = parts.random_model(
        AutoencoderKL,
        seed=seed,
        down_block_types=("DownEncoderBlock2D",) * len(WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(WIDTHS),
        block_out_channels=WIDTHS,
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=8,
        sample_size=1024,
        force_upcast=True,
    )
    with one_thread():
        latents = vae.encode(parts.sample_pixels(seed)).latent_dist.mode()
    means = latents.mean((0, 2, 3))
    # Its config has no place for a mean: the layers next to the latents take it away and add it.
    vae.quant_conv.bias[:CHANNELS] -= means
    vae.post_quant_conv.bias += vae.post_quant_conv.weight.flatten(1) @ means
    deviation = (latents - means.view(1, -1, 1, 1)).std().item()
    vae.register_to_config(scaling_factor=round(1 / deviation, 5))
    return vae
