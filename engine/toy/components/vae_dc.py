"""A small AutoencoderDC that gives images back as mosaics, made in closed form.

Each latent cell (32x32 pixels) holds the mean red, green, blue and grey of its four quarters, and
minus those: 32 channels around zero. The shortcuts beside the convolutions do that, where the
number of channels stays the same they take means of 2x2; the convolutions and blocks add a little
noise of their own.
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
"""Of the two constant channels that rule the decoder's last norm."""

Layer = Any  # of a library without types


@one_thread()
@torch.no_grad()
def build_vae_dc(pictures: torch.Tensor, *, seed: int) -> AutoencoderDC:
    """Return the autoencoder of Sana, with `scaling_factor` measured over `pictures`.

    Args:
        pictures: (N, 3, H, W) in [-1, 1], H and W multiples of 32.
        seed: Of what the convolutions add.
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
            parameter.fill_(0.02)  # what a block adds, whatever its convolutions make
    _read_tones(vae.encoder.conv_in)
    _write_tones(vae.decoder)
    latents = vae.encode(pictures).latent
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 4))
    return vae.eval()


def _read_tones(conv: Layer) -> None:
    """Channels: red, green, blue, grey, and minus those."""
    conv.weight.zero_()
    for tone in range(RGB):
        for sign, first in ((1.0, 0), (-1.0, TONES)):
            conv.weight[first + tone, tone, 1, 1] = sign
            conv.weight[first + RGB, tone, 1, 1] = sign / RGB


def _write_tones(decoder: Layer) -> None:
    """From the tones at full size to pixels, through a norm and an activation.

    The norm divides by the size of all channels: two constant ones, which take the place of grey,
    are nearly all of it. The activation lets pass what is positive, of a tone or of minus it.
    """
    last = decoder.up_blocks[0][-1].norm
    last.bias[TONES - 1], last.bias[-1] = ANCHOR, -ANCHOR
    decoder.norm_out.weight.fill_(1.0)
    decoder.conv_out.weight.zero_()
    divisor = ANCHOR * (2 / CHANNELS[0]) ** 0.5
    for tone in range(RGB):
        decoder.conv_out.weight[tone, tone, 1, 1] = divisor
        decoder.conv_out.weight[tone, TONES + tone, 1, 1] = -divisor
