"""Construct a small AutoencoderKL that reconstructs images, in closed form instead of by training.

A random encoder and decoder would turn every image into noise, and nothing trained on such latents
would be visible. Here, a few channels, the *carriers*, pass the image through the network
unchanged, and the other channels are random features of it:

- encoder: each latent cell (8x8 pixels) holds the mean red, green, blue and gray of its four
  quarters: 16 channels.
- decoder: every convolution after an upsampling, and the last one, is fitted by least squares to
  the image at that resolution, from carriers and random features together.

Three tricks keep a carrier linear: residual branches add nothing to it; SiLU(x) - SiLU(-x) = x
undoes the activation before the encoder's last layer; and two constant channels, +ANCHOR and
-ANCHOR, dominate the group norm's statistics, so that a norm does not remove an image's own mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch.nn import functional

from engine.toy.components.weights import fill_random, one_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL import Image

CHANNELS = (16, 16, 48, 48)
TONES = 4
"""Red, green, blue and gray."""
RGB = 3
LATENT_CHANNELS = 4 * TONES
"""Channel TONES * quarter + tone; quarters in row-major order."""

ANCHOR = 16.0
LOG_VARIANCE = -9.0
"""Log variance of the posterior: a standard deviation of 0.01, compared to 0.3 of the latents."""

FITTED = 36
RIDGE = 1e-4

# Layers of an untyped library.
Layer = Any
Taps = dict[tuple[int, int], float]
CENTRE: Taps = {(1, 1): 1.0}
QUARTERS = [(row, column) for row in (0, 1) for column in (0, 1)]
"""The taps of a 3x3 kernel that see the four cells which a downsampling combines."""


@one_thread()
@torch.no_grad()
def build_vae(pictures: torch.Tensor, *, seed: int) -> AutoencoderKL:
    """Return the autoencoder, with `shift_factor` and `scaling_factor` measured over `pictures`.

    Args:
        pictures: (N, 3, H, W) in [-1, 1], H and W multiples of 8. The first `FITTED` of them are
            enough to fit the decoder; measuring the factors needs more.
        seed: Seed of the random features.
    """
    vae = new_vae()
    fill_random(vae, seed, bias=0.3)
    wire_encoder(vae.encoder)
    latents = vae.encode(pictures).latent_dist.mode()  # (N, 16, H / 8, W / 8)
    _fit_decoder(vae.decoder, latents[:FITTED], pictures[:FITTED])
    # Readers compute (latents - shift_factor) * scaling_factor.
    vae.register_to_config(
        shift_factor=round(latents.mean().item(), 4),
        scaling_factor=round(1 / latents.std().item(), 4),
    )
    return vae.eval()


def new_vae() -> AutoencoderKL:
    """Build the autoencoder, untrained."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(CHANNELS),
        up_block_types=("UpDecoderBlock2D",) * len(CHANNELS),
        block_out_channels=CHANNELS,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=1,  # One group, so that the anchors reach every channel.
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def as_tensor(pictures: Sequence[Image.Image]) -> torch.Tensor:
    """Return images of one size as (N, 3, H, W) in [-1, 1], cropped to multiples of 16 pixels."""
    pixels = torch.from_numpy(np.stack([np.asarray(p.convert("RGB")) for p in pictures]))
    height, width = (side // 16 * 16 for side in pixels.shape[1:3])
    return pixels[:, :height, :width].permute(0, 3, 1, 2).float() / 127.5 - 1.0


def wire_encoder(encoder: Layer, anchor: float = ANCHOR) -> None:
    """Route the four tones from the image to the latent channels.

    Args:
        encoder: With random weights; changed in place.
        anchor: A larger value reduces the influence of other channels and of the image's own scale.
    """
    tones, latents = range(TONES), range(LATENT_CHANNELS)
    twins = range(LATENT_CHANNELS, 2 * LATENT_CHANNELS)  # Negated latents, for the last SiLU.
    _take_over(encoder.conv_in, tones, anchor)
    _lead(encoder.conv_in, range(RGB), range(RGB), CENTRE)
    _lead(encoder.conv_in, [RGB] * RGB, range(RGB), {(1, 1): 1 / RGB})
    *halvings, last_halving = (block.downsamplers[0].conv for block in encoder.down_blocks[:-1])
    for conv in halvings:
        _take_over(conv, tones, anchor)
        _lead(conv, tones, tones, dict.fromkeys(QUARTERS, 0.25))
    _take_over(last_halving, (*latents, *twins), anchor)
    for quarter, tap in enumerate(QUARTERS):
        rows = latents[quarter * TONES :][:TONES]
        _lead(last_halving, rows, tones, {tap: 1.0})
        _lead(last_halving, [twins[row] for row in rows], tones, {tap: -1.0})
    for block in encoder.down_blocks[:-1]:
        _protect(block, tones)
    for block in (encoder.down_blocks[-1], encoder.mid_block):
        _protect(block, (*latents, *twins))
    encoder.conv_norm_out.bias.zero_()
    encoder.conv_out.weight.zero_()
    divisor = anchor * (2 / CHANNELS[-1]) ** 0.5  # Approximate divisor of the norm.
    _lead(encoder.conv_out, latents, latents, {(1, 1): divisor})
    _lead(encoder.conv_out, latents, twins, {(1, 1): -divisor})
    encoder.conv_out.bias[:LATENT_CHANNELS] = 0.0
    encoder.conv_out.bias[LATENT_CHANNELS:] = LOG_VARIANCE


def _fit_decoder(decoder: Layer, latents: torch.Tensor, pictures: torch.Tensor) -> None:
    """Fit the decoder from its deepest layer to its last.

    Args:
        decoder: With random weights; changed in place.
        latents: (N, 16, H / 8, W / 8), from the encoder.
        pictures: (N, 3, H, W) in [-1, 1].
    """
    carriers = range(LATENT_CHANNELS)
    _take_over(decoder.conv_in, carriers)
    _lead(decoder.conv_in, carriers, carriers, CENTRE)
    _protect(decoder.mid_block, carriers)
    hidden = decoder.mid_block(decoder.conv_in(latents))  # (N, C, h, w), h and w grow below.
    for block in decoder.up_blocks:
        _protect(block, carriers)
        for resnet in block.resnets:
            hidden = resnet(hidden, None)
        for upsampler in block.upsamplers or ():
            hidden = functional.interpolate(hidden, scale_factor=2.0, mode="nearest")
            carriers = range(RGB)
            _take_over(upsampler.conv, carriers)
            times_smaller = pictures.shape[-1] // hidden.shape[-1]
            _fit(upsampler.conv, hidden, functional.avg_pool2d(pictures, times_smaller))
            hidden = upsampler.conv(hidden)
    hidden = decoder.conv_act(decoder.conv_norm_out(hidden))
    _fit(decoder.conv_out, hidden, pictures)


def _take_over(conv: Layer, rows: Sequence[int], anchor: float = ANCHOR) -> None:
    """Clear the output channels `rows` and make the last two channels the anchors."""
    for row in (*rows, -1, -2):
        conv.weight[row] = 0.0
        conv.bias[row] = 0.0
    conv.bias[-2], conv.bias[-1] = anchor, -anchor


def _lead(conv: Layer, rows: Sequence[int], columns: Sequence[int], taps: Taps) -> None:
    """Route input channel `columns[i]` to output channel `rows[i]` through the kernel's `taps`."""
    for row, column in zip(rows, columns, strict=True):
        for (down, right), weight in taps.items():
            conv.weight[row, column, down, right] = weight


def _protect(block: Layer, carriers: Sequence[int]) -> None:
    """Make the residual branches of `block` add nothing to the carriers and the anchors."""
    for name, layer in block.named_modules():
        if name.endswith(("conv2", "to_out.0", "conv_shortcut")):
            for row in (*carriers, -1, -2):
                layer.weight[row] = 0.0
                layer.bias[row] = 0.0
                if name.endswith("conv_shortcut"):
                    layer.weight[row, row] = 1.0


def _fit(conv: Layer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Set the first 3 output channels of a 3x3 convolution by ridge regression.

    Args:
        conv: With C input channels; changed in place.
        inputs: (N, C, H, W).
        targets: (N, 3, H, W).
    """
    patches = functional.unfold(inputs, 3, padding=1).transpose(1, 2).flatten(0, 1)
    patches = torch.cat([patches, torch.ones(len(patches), 1)], dim=1)  # (N H W, 9 C + 1)
    pixels = targets.permute(0, 2, 3, 1).reshape(-1, RGB)
    gram = (patches.T @ patches).double()
    gram += RIDGE * torch.diag(gram.diagonal()) + 1e-9 * gram.trace() * torch.eye(len(gram))
    solution = torch.linalg.solve(gram, (patches.T @ pixels).double()).float()  # (9 C + 1, 3)
    conv.weight[:RGB] = solution[:-1].T.reshape(RGB, -1, 3, 3)
    conv.bias[:RGB] = solution[-1]
