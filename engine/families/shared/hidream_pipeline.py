"""HiDream's stock pipeline, bent in three places (diffusers 0.42)."""

from __future__ import annotations

import math
from functools import wraps
from typing import Any, Final

import torch
from diffusers import HiDreamImagePipeline

from engine.families.shared.hidream_experts import call_every_expert, sizes_on_host

_ABOVE: Final = 1 + 1e-9  # rounding must not take a step away from a side


class AnySizePipeline(HiDreamImagePipeline):
    """Make images of the requested size, which depend on no random numbers but the seed's.

    The stock pipeline scales every size to the area of 1024x1024, by an attribute that has no
    argument. And it does not give its generator to the scheduler, which with Dev and Fast draws
    noise in every step: from the generator of the process, which is set to the same seed here.

    Llama is not in the published models, so it may be missing.
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
