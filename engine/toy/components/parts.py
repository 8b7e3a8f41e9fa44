"""Parts that the toys of all families share."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from diffusers import AutoencoderKL

from engine.toy.components.vae import as_tensor, build_vae
from engine.toy.components.weights import fill_random, one_thread
from engine.toy.images import toy_captions, toy_pictures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from PIL import Image


# -- four channel vae -----------------------------------------------------------------------
# Build a small random AutoencoderKL like Stable Diffusion's, with four channels and a known scale.
#
# SDXL, PixArt-Sigma and AuraFlow use the same one.


VAE_CHANNELS = 4
WIDTHS = (8, 16, 16, 16)


@torch.no_grad()
def build_four_channel_vae(seed: int) -> AutoencoderKL:
    """Build the VAE, with latents of mean zero and `scaling_factor` measured over toy images."""
    vae = random_model(
        AutoencoderKL,
        seed=seed,
        down_block_types=("DownEncoderBlock2D",) * len(WIDTHS),
        up_block_types=("UpDecoderBlock2D",) * len(WIDTHS),
        block_out_channels=WIDTHS,
        layers_per_block=1,
        latent_channels=VAE_CHANNELS,
        norm_num_groups=8,
        sample_size=1024,
        force_upcast=True,
    )
    with one_thread():
        latents = vae.encode(sample_pixels(seed)).latent_dist.mode()
    means = latents.mean((0, 2, 3))
    # Its config has no field for a mean, so the layers next to the latents subtract and add it.
    vae.quant_conv.bias[:VAE_CHANNELS] -= means
    vae.post_quant_conv.bias += vae.post_quant_conv.weight.flatten(1) @ means
    deviation = (latents - means.view(1, -1, 1, 1)).std().item()
    vae.register_to_config(scaling_factor=round(1 / deviation, 5))
    return vae


# -- parts ----------------------------------------------------------------------------------


# Number of captions to build vocabularies from: the same for every seed, and covering every word.
CAPTIONS: Final = 512
# Number and size of images to fit an autoencoder to.
PICTURES: Final = 160
PICTURE_SIZE: Final = 64

Model = TypeVar("Model", bound=torch.nn.Module)


@cache
def captions() -> tuple[str, ...]:
    """Return the texts that vocabularies are built from."""
    return tuple(toy_captions(CAPTIONS, seed=0))


@cache
def sample_images(seed: int) -> tuple[Image.Image, ...]:
    """Return square toy images at the resolution that toy jobs train at."""
    pictures = toy_pictures(PICTURES, size=PICTURE_SIZE, seed=seed)
    return tuple(picture for picture in pictures if picture.width == picture.height)


def sample_pixels(seed: int, count: int = 16) -> torch.Tensor:
    """Return `count` toy images as pixels, `(count, 3, H, W)` in [-1, 1]."""
    return as_tensor(sample_images(seed)[:count])


def picture_vae(seed: int) -> AutoencoderKL:
    """Return a copy of the autoencoder of most families' toys, which the caller may change."""
    return deepcopy(fitted_vae(seed))


@cache  # fitting takes two seconds, and tests write toys of many families
def fitted_vae(seed: int) -> AutoencoderKL:
    """Return the autoencoder of most families' toys, shared by all callers: read-only."""
    return build_vae(as_tensor(sample_images(seed)), seed=seed)


def video_latents(vae: Any, seed: int) -> torch.Tensor:
    """Return a video autoencoder's latents of toy images, (16, C, 1, h, w)."""
    with torch.no_grad(), one_thread():
        pixels = sample_pixels(seed)
        opaque = torch.ones_like(pixels[:, :1])
        pixels = torch.cat([pixels, opaque], 1)[:, : vae.config.get("input_channels", 3)]
        latents: torch.Tensor = vae.encode(pixels[:, :, None]).latent_dist.mode()
    return latents


def register_statistics(vae: Any, seed: int) -> None:
    """Write the statistics of an autoencoder's latents of toy images into its config."""
    with one_thread():
        latents = video_latents(vae, seed)
        means, deviations = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(
        latents_mean=[round(mean, 4) for mean in means.tolist()],
        latents_std=[round(deviation, 4) for deviation in deviations.tolist()],
    )


@torch.no_grad()
def standardize(vae: Any, bias: torch.Tensor, seed: int) -> None:
    """Give a video autoencoder's latents of toy images mean 0, and measure their scaling factor.

    Args:
        vae: The autoencoder.
        bias: Bias of the layer that makes its latents.
        seed: Seed of the images.
    """
    latents = video_latents(vae, seed)
    with one_thread():
        bias[: latents.shape[1]] -= latents.mean((0, 2, 3, 4))
    latents = video_latents(vae, seed)
    vae.register_to_config(scaling_factor=round(1 / float(latents.std()), 6))


def random_model(
    model_class: Callable[..., Model],
    *,
    seed: int,
    gain: Callable[[str], float] = lambda name: 1.0,
    bias: float = 0.05,
    **config: Any,
) -> Model:
    """Return a diffusers model with random weights that preserve the size of activations.

    Args:
        model_class: Its class.
        seed: The same seed gives the same bytes.
        gain: Maps a parameter's name to a factor on its scale.
        bias: Standard deviation of biases.
        config: Its settings.
    """
    model = model_class(**config)
    fill_random(model, seed, gain=gain, bias=bias)
    return model.eval()


def cast(module: Model, dtype: torch.dtype) -> Model:
    """Change the parameters' dtype in place; diffusers' own `.to` warns about doing so."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def save(pipeline: Any, model_dir: Path, dtype: str, **options: Any) -> None:
    """Write a pipeline like published ones, in a dtype (`float32`, `bfloat16`, …)."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            cast(part, getattr(torch, dtype))
    pipeline.save_pretrained(str(model_dir), safe_serialization=True, **options)


# -- streams --------------------------------------------------------------------------------
# Shape a toy's residual stream, so that the effect of a few training steps is visible.


@torch.no_grad()
def open_gates(values: torch.Tensor, *, chunks: int, gates: Sequence[int], dim: int = 0) -> None:
    """Shift the gates of adaptive norms by 1, so that the blocks take part from the start.

    Args:
        values: A bias, or a table of shifts, scales and gates; changed in place.
        chunks: Number of shifts, scales and gates.
        gates: Indices of the gates.
        dim: Dimension along which they are chunked.
    """
    parts = values.chunk(chunks, dim=dim)
    for gate in gates:
        parts[gate].add_(1.0)


@torch.no_grad()
def quieten(readout: torch.Tensor, embedding: torch.Tensor) -> None:
    """Let the last layer see only a fifth of the output of the first layer.

    The output of blocks in other directions then stands out from the embedded latents.

    Args:
        readout: Weight of the last layer, (out, width); changed in place.
        embedding: Weight of the first layer, (width, …), with fewer inputs than width.
    """
    basis = torch.linalg.qr(embedding.flatten(1).float()).Q  # (width, in)
    weight = readout.float()
    readout.copy_(weight - 0.8 * (weight @ basis) @ basis.T)


@torch.no_grad()
def mislead(bias: torch.Tensor, seed: int) -> None:
    """Give the last layer a constant error, which training quickly removes.

    Args:
        bias: Bias of the last layer; changed in place.
        seed: The same seed gives the same error, of size 1.
    """
    generator = torch.Generator().manual_seed(seed)
    bias.add_(torch.randn(bias.shape, generator=generator))
