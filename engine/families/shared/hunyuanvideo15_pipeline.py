"""HunyuanVideo 1.5's stock pipeline, bent in two places (diffusers 0.42)."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel, Qwen2Tokenizer, T5EncoderModel


class _NoVae:
    """What the stock pipeline reads from a VAE, without asking whether it has one."""

    temporal_compression_ratio = 4
    spatial_compression_ratio = 16
    config = SimpleNamespace(latent_channels=32)


class GuidedPipeline(HunyuanVideo15Pipeline):
    """Take the guidance scale as an argument, and do without a VAE where only texts are encoded.

    The stock pipeline has the scale in its guider, a component, and cannot be built without a VAE.
    """

    def __init__(
        self,
        text_encoder: Qwen2_5_VLTextModel,
        tokenizer: Qwen2Tokenizer,
        transformer: HunyuanVideo15Transformer3DModel,
        vae: AutoencoderKLHunyuanVideo15,
        scheduler: FlowMatchEulerDiscreteScheduler,
        text_encoder_2: T5EncoderModel,
        tokenizer_2: ByT5Tokenizer,
        guider: ClassifierFreeGuidance,
    ) -> None:
        super().__init__(
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            transformer=transformer,
            vae=_NoVae() if vae is None else vae,
            scheduler=scheduler,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            guider=guider,
        )
        self.register_modules(vae=vae)

    @wraps(HunyuanVideo15Pipeline.__call__)
    def __call__(self, *words: Any, guidance_scale: float | None = None, **names: Any) -> Any:
        if guidance_scale is not None:
            self.guider.guidance_scale = guidance_scale
        return super().__call__(*words, **names)
