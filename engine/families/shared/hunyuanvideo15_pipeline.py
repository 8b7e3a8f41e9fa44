"""HunyuanVideo 1.5's stock pipeline, bent in two places (diffusers 0.42)."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

from diffusers import HunyuanVideo15Pipeline


class _NoVae:
    """What the stock pipeline reads from a VAE, without asking whether it has one."""

    temporal_compression_ratio = 4
    spatial_compression_ratio = 16
    config = SimpleNamespace(latent_channels=32)


class GuidedPipeline(HunyuanVideo15Pipeline):
    """Take the guidance scale as an argument, and do without a VAE where only texts are encoded.

    The stock pipeline has the scale in its guider, a component, and cannot be built without a VAE.
    """

    # `from_pretrained` reads the names and classes of a pipeline's parts from its signature.
    @wraps(HunyuanVideo15Pipeline.__init__)  # type: ignore[misc]
    def __init__(self, *, vae: Any, **parts: Any) -> None:
        super().__init__(vae=_NoVae() if vae is None else vae, **parts)
        self.register_modules(vae=vae)

    @wraps(HunyuanVideo15Pipeline.__call__)
    def __call__(self, *words: Any, guidance_scale: float | None = None, **names: Any) -> Any:
        if guidance_scale is not None:
            self.guider.guidance_scale = guidance_scale
        return super().__call__(*words, **names)
