"""What the toys of all families are made from."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from engine.toy.components.vae import as_tensor, build_vae
from engine.toy.components.weights import fill_random
from engine.toy.images import toy_captions, toy_pictures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from diffusers import AutoencoderKL
    from PIL import Image

# What the vocabularies are made from: the same for every seed, and enough to hold every word.
CAPTIONS: Final = 512
# What an autoencoder is made for.
PICTURES: Final = 160
PICTURE_SIZE: Final = 64

Model = TypeVar("Model", bound=torch.nn.Module)


@cache
def captions() -> tuple[str, ...]:
    """Return the texts that vocabularies are made from."""
    return tuple(toy_captions(CAPTIONS, seed=0))


@cache
def sample_images(seed: int) -> tuple[Image.Image, ...]:
    """Square toy images at the resolution that toy jobs train at."""
    pictures = toy_pictures(PICTURES, size=PICTURE_SIZE, seed=seed)
    return tuple(picture for picture in pictures if picture.width == picture.height)


def sample_pixels(seed: int, count: int = 16) -> torch.Tensor:
    """Return `count` toy images as pixels, `(count, 3, H, W)` in [-1, 1]."""
    return as_tensor(sample_images(seed)[:count])


def picture_vae(seed: int) -> AutoencoderKL:
    """Return a copy of the autoencoder of most families' toys, which the caller may change."""
    return deepcopy(fitted_vae(seed))


@cache  # fitting takes two seconds, and tests write the toys of many families in a row
def fitted_vae(seed: int) -> AutoencoderKL:
    """Return the autoencoder of most families' toys, shared by all callers: read-only."""
    return build_vae(as_tensor(sample_images(seed)), seed=seed)


def random_model(
    model_class: Callable[..., Model],
    *,
    seed: int,
    gain: Callable[[str], float] = lambda name: 1.0,
    bias: float = 0.05,
    **config: Any,
) -> Model:
    """Return a model of diffusers with random weights that keep activations at their size.

    Args:
        model_class: Its class.
        seed: Same seed, same bytes.
        gain: From a parameter's name to a factor on its scale.
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
    """Write a pipeline as published ones are, its weights in a dtype (`float32`, `bfloat16`, …)."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            cast(part, getattr(torch, dtype))
    pipeline.save_pretrained(model_dir, safe_serialization=True, **options)
