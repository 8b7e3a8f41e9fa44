"""Adjust HunyuanVideo 1.5's stock pipelines in a few places (diffusers 0.42)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from engine.families.shared.hunyuanvideo15_forward import without_waiting
from engine.families.shared.text_masks import fill_masks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# Mask name → name of the tensor that it masks.
_TEXTS: Final = {"prompt_embeds_mask": "prompt_embeds", "prompt_embeds_mask_2": "prompt_embeds_2"}


class _NoVae:
    """Attributes that the stock pipeline reads from a VAE without checking that it has one."""

    temporal_compression_ratio = 4
    spatial_compression_ratio = 16
    config = SimpleNamespace(latent_channels=32)


class GuidedPipeline(HunyuanVideo15Pipeline):
    """Takes the guidance scale as an argument, and needs no VAE if only texts are encoded.

    The stock pipeline keeps the scale in its guider component, and cannot be built without a VAE.
    This one also takes encoded prompts without masks, as having no padding; a single ByT5 token
    counts as none.
    """

    # `from_pretrained` reads the names and classes of a pipeline's components from its signature.
    @wraps(HunyuanVideo15Pipeline.__init__)  # type: ignore[misc]
    def __init__(self, *, vae: Any, **parts: Any) -> None:
        super().__init__(vae=_NoVae() if vae is None else vae, **parts)
        self.register_modules(vae=vae)

    @wraps(HunyuanVideo15Pipeline.__call__)
    def __call__(self, *words: Any, guidance_scale: float | None = None, **names: Any) -> Any:
        with _guided(self, words, names, guidance_scale):
            return super().__call__(*words, **names)


class _Sized(HunyuanVideo15ImageProcessor):
    """Makes videos of a size that is asked for, not of the one nearest to the image's shape."""

    size: tuple[int, int] | None = None

    def calculate_default_height_width(
        self, height: int, width: int, target_size: int
    ) -> tuple[int, int]:
        if self.size is not None:
            return self.size
        return super().calculate_default_height_width(height, width, target_size)


class GuidedImagePipeline(HunyuanVideo15ImageToVideoPipeline):
    """The same for image-to-video, which also takes a size, and what SigLIP sees of the image.

    Attributes:
        seen: SigLIP's output for the next image, `(729, E)`; None to compute it.
    """

    seen: torch.Tensor | None = None

    @wraps(HunyuanVideo15ImageToVideoPipeline.__init__)  # type: ignore[misc]
    def __init__(self, *, vae: Any, **parts: Any) -> None:
        super().__init__(vae=_NoVae() if vae is None else vae, **parts)
        self.register_modules(vae=vae)
        self.video_processor = _Sized(
            vae_scale_factor=self.vae_scale_factor_spatial, do_resize=False, do_convert_rgb=True
        )

    def encode_image(self, image: Any, batch_size: int, device: Any, dtype: Any) -> torch.Tensor:
        """Return `(B, 729, E)`."""
        if self.seen is None:
            embeds: torch.Tensor = super().encode_image(image, batch_size, device, dtype)
            return embeds
        return self.seen.to(device, dtype).expand(batch_size, -1, -1)

    @wraps(HunyuanVideo15ImageToVideoPipeline.__call__)
    def __call__(
        self,
        *words: Any,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        **names: Any,
    ) -> Any:
        self.video_processor.size = (height, width) if height and width else None
        with _guided(self, words, names, guidance_scale):
            return super().__call__(*words, **names)


@contextmanager
def _guided(
    pipeline: Any, words: Any, names: dict[str, Any], scale: float | None
) -> Iterator[None]:
    """Set the guidance scale, if one is given, and add the masks that encoded prompts lack.

    Args:
        pipeline: One of the two.
        words: The positional arguments of its call: with any, masks are left as they are.
        names: The named ones, to which masks are added.
        scale: The scale.
    """
    if scale is not None:
        pipeline.guider.guidance_scale = scale
    if words or not fill_masks(names, _TEXTS, guided=pipeline.guider.num_conditions > 1):
        yield
        return
    with _as_trained(pipeline.transformer, image=isinstance(pipeline, GuidedImagePipeline)):
        yield


@contextmanager
def _as_trained(transformer: Any, *, image: bool) -> Iterator[None]:
    """Pass forwards the same inputs as in training, which is equivalent: no masked tokens.

    The pipeline adds 729 masked tokens for a missing image, and gets one ByT5 token if a prompt has
    nothing in quotes.
    """

    def drop_masked(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        glyphs = kwargs["encoder_hidden_states_2"]
        kept = glyphs.shape[1] if glyphs.shape[1] > 1 else 0
        seen = kwargs["image_embeds"]
        return args, kwargs | {
            "image_embeds": seen if image else seen[:, :0],
            "encoder_hidden_states_2": glyphs[:, :kept],
            "encoder_attention_mask_2": kwargs["encoder_attention_mask_2"][:, :kept],
        }

    hook = transformer.register_forward_pre_hook(drop_masked, with_kwargs=True)
    try:
        with without_waiting(transformer, refined=False, masked=False, image=image):
            yield
    finally:
        hook.remove()
