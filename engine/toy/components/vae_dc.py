"""Construct a small AutoencoderDC that reconstructs images as mosaics, in closed form.

Each latent cell (32x32 pixels) holds the mean red, green, blue and gray of its four quarters, and
their negatives: 32 channels around zero. The shortcuts around the convolutions compute these; where
the number of channels stays the same, they take means of 2x2. The convolutions and blocks add a
little noise.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from diffusers import AutoencoderDC

from engine.toy.components.weights import fill_random, one_thread

CHANNELS: Final = (8, 8, 8, 8, 8, 32)
BLOCKS: Final = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
MULTISCALES: Final = ((), (), (), (5,), (5,), (5,))
TONES: Final = 4
RGB: Final = 3
ANCHOR: Final = 16.0
"""Value of the two constant channels that dominate the decoder's last norm."""

Layer = Any  # layers of an untyped library


@one_thread()
@torch.no_grad()
def build_vae_dc(pictures: torch.Tensor, *, seed: int) -> AutoencoderDC:
    """Return the autoencoder of Sana, with `scaling_factor` measured over `pictures`.

    Args:
        pictures: (N, 3, H, W) in [-1, 1], H and W multiples of 32.
        seed: Seed of the noise that the convolutions add.
    """
    vae = AutoencoderDC(
        latent_channels=CHANNELS[-1],
        attention_head_dim=CHANNELS[0],
        encoder_block_types=BLOCKS,
        decoder_block_types=BLOCKS,
        encoder_block_out_channels=CHANNELS,
        decoder_block_out_channels=CHANNELS,
        encoder_layers_per_block=(1,) * len(CHANNELS),
        decoder_layers_per_block=(1,) * len(CHANNELS),
        encoder_qkv_multiscales=MULTISCALES,
        decoder_qkv_multiscales=MULTISCALES,
        upsample_block_type="interpolate",
        downsample_block_type="conv",
        decoder_act_fns="silu",
    )
    fill_random(vae, seed, gain=lambda name: 0.02 if "conv" in name else 1.0, bias=0.0)
    for name, parameter in vae.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.fill_(0.02)  # limits a block's contribution to the residual
    _read_tones(vae.encoder.conv_in)
    _write_tones(vae.decoder)
    latents = vae.encode(pictures).latent
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 4))
    return vae.eval()


def _read_tones(conv: Layer) -> None:
    """Set the channels to red, green, blue, gray, and their negatives."""
    conv.weight.zero_()
    for tone in range(RGB):
        for sign, first in ((1.0, 0), (-1.0, TONES)):
            conv.weight[first + tone, tone, 1, 1] = sign
            conv.weight[first + RGB, tone, 1, 1] = sign / RGB


def _write_tones(decoder: Layer) -> None:
    """Map tones at full resolution to pixels, through a norm and an activation.

    The norm divides by the RMS of all channels, which is dominated by two constant ones in place of
    gray. The activation passes positive values, either of a tone or of its negative.
    """
    last = decoder.up_blocks[0][-1].norm
    last.bias[TONES - 1], last.bias[-1] = ANCHOR, -ANCHOR
    decoder.norm_out.weight.fill_(1.0)
    decoder.conv_out.weight.zero_()
    divisor = ANCHOR * (2 / CHANNELS[0]) ** 0.5
    for tone in range(RGB):
        decoder.conv_out.weight[tone, tone, 1, 1] = divisor
        decoder.conv_out.weight[tone, TONES + tone, 1, 1] = -divisor
