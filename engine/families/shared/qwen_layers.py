"""Adjust Qwen-Image-Layered's stock pipeline in a few places (diffusers 0.42)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers import QwenImageLayeredPipeline
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUCKET: Final = 640  # one of the two sides that the stock pipeline takes


class _Side(int):
    """The side of a square of any area, which the stock pipeline takes for one of its own."""

    area: int

    def __mul__(self, _: Any) -> int:
        return self.area


def _side_of(area: int) -> _Side:
    side = _Side(_BUCKET)
    side.area = area
    return side


class LayeredPipeline(QwenImageLayeredPipeline):
    """Makes layers of any size, returns latents, and needs no text encoder for encoded prompts.

    The stock pipeline makes images of the area of 640x640 or 1024x1024, as wide as the image that
    it is given, and fails if it is asked for latents.
    """

    @wraps(QwenImageLayeredPipeline.__call__)
    def __call__(
        self,
        image: Any = None,
        *words: Any,
        width: int | None = None,
        height: int | None = None,
        **names: Any,
    ) -> Any:
        """Call the stock pipeline; of another shape than asked for, take the image's middle."""
        if width and height:
            image = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
            names["resolution"] = _side_of(width * height)
        last: list[torch.Tensor] = []

        def keep(_: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            last[:] = [tensors["latents"]]
            return {}

        if names.get("output_type") == "latent":
            names["callback_on_step_end"] = keep
        with _with_precision(self):
            try:
                return super().__call__(image, *words, **names)
            except UnboundLocalError:  # it forgets to return latents
                if not last:
                    raise
                return (last[0],)

    def get_image_caption(self, *words: Any, **names: Any) -> Any:
        """Return nothing where the prompt is encoded; else write one, as the stock pipeline."""
        encodes = isinstance(self.text_encoder, torch.nn.Module)
        return super().get_image_caption(*words, **names) if encodes else None


@contextmanager
def _with_precision(pipeline: Any) -> Iterator[None]:
    """Let a pipeline without a text encoder read its precision, which pixels are cast to."""
    if pipeline.text_encoder is not None:
        yield
        return
    pipeline.text_encoder = SimpleNamespace(dtype=torch.float32)
    try:
        yield
    finally:
        pipeline.text_encoder = None
