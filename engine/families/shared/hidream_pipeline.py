"""Adjust HiDream's stock pipeline in three places (diffusers 0.42)."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any, Final

import torch
from diffusers import HiDreamImagePipeline

from engine.families.shared.hidream_experts import call_every_expert, sizes_on_host

_ABOVE: Final = 1 + 1e-9  # so that rounding does not lose a step of a side


class AnySizePipeline(HiDreamImagePipeline):
    """Generates images of the requested size, with all random numbers derived from the seed.

    The stock pipeline scales every size to the area of 1024x1024, by an attribute that is not an
    argument. It also does not pass its generator to the scheduler, which draws noise in every step
    for Dev and Fast, from the global generator; that one is set to the same seed here.

    Llama is not part of the published models, so it may be missing.
    """

    _optional_components = ["text_encoder_4", "tokenizer_4"]  # noqa: RUF012

    @wraps(HiDreamImagePipeline.__call__)
    def __call__(
        self,
        *words: Any,
        height: int = 1024,
        width: int = 1024,
        generator: torch.Generator | None = None,
        **names: Any,
    ) -> Any:
        self.default_sample_size = math.sqrt(width * height) * _ABOVE / self.vae_scale_factor
        call_every_expert(self.transformer)
        device = self._execution_device
        drawn = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with drawn, sizes_on_host(self.transformer):
            if generator is not None:
                torch.manual_seed(generator.initial_seed())
            return super().__call__(
                *words, height=height, width=width, generator=generator, **names
            )
