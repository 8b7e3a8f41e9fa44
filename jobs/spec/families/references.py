"""How models take conditioning images: how many of them, and at what size. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_USUAL_SIDE: Final = 1024  # of the square whose area all these models were trained with
_STEP: Final = 16  # pixels of a token's side
_QWEN_STEP: Final = 32
_QWEN_SIDE: Final = 1024  # as `_USUAL_SIDE`
_SEEN_SIDE: Final = 384  # of the square whose area Qwen-Image-Edit-Plus shows its text encoder

# Width and height; FLUX.1 Kontext was trained with these.
PREFERRED: Final = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
    (1024, 1024),
    (1104, 944),
    (1184, 880),
    (1248, 832),
    (1328, 800),
    (1392, 752),
    (1456, 720),
    (1504, 688),
    (1568, 672),
)


NOUNS: Final = {
    "control": "control video",
    "fill_mask": "fill mask",
    "reference": "reference image",
}
"""What messages call a conditioning image, by its role, of models that take videos."""


class Fit(NamedTuple):
    """What becomes of a conditioning image, in pixels.

    Attributes:
        scaled: `(width, height)` that it is resized to, whatever its own shape.
        size: `(width, height)` that is cut out of the middle of that.
    """

    scaled: tuple[int, int]
    size: tuple[int, int]


@dataclass(frozen=True)
class References:
    """How a model takes conditioning images.

    Attributes:
        fit: `(width, height, side)` of an image and of the square whose area it gets, None for the
            usual one → what becomes of it. None where it is made as large as the image beside
            it, in channels beside those of its noisy latents.
        most: How many a sample may have.
        required: Whether the model makes nothing without one.
        least: Pixels of a side, below which pipelines refuse an image.
        widest: How many times longer one side may be than the other, in pipelines.
        seen: As `fit`, of what the text encoder sees of an image; None where it sees none.
        fixed: Whether the pipeline resizes images itself, always to the usual area.
        masks: Whether they are masks: white where the model fills in its own image, which it gets
            without that part. Prompts have the image before its mask.
        layers: Whether a sample's are its layers, from the back, with transparency: the model is
            given the image, and makes it again with its layers. Prompts have the image.
        videos: Whether they are a control video as long as the sample (of a single image, an
            image), a mask of what of it the model fills in, and reference images, which are frames
            before it; `conditioning_roles` tells them apart.
    """

    fit: Callable[[int, int, int | None], Fit] | None
    most: int = 1
    required: bool = False
    least: int = 1
    widest: float = math.inf
    seen: Callable[[int, int, int | None], Fit] | None = None
    fixed: bool = False
    masks: bool = False
    layers: bool = False
    videos: bool = False

    @property
    def noun(self) -> str:
        """Return what one of a sample's is called in messages."""
        return "layer" if self.layers else self.noun_of_prompts

    @property
    def noun_of_prompts(self) -> str:
        """Return what one of a prompt's is called in messages."""
        return "control video" if self.videos else "conditioning image"

    def why_unfit(self, size: tuple[int, int]) -> str:
        """Why the pipeline would refuse an image that is given this size; "" if it takes it."""
        if min(size) >= self.least and max(size) <= self.widest * min(size):
            return ""
        sides = f"sides of {self.least} pixels or more, " if self.least > 1 else ""
        return f"it becomes {size[0]}x{size[1]}; the model takes {sides}at most {self.widest:g}:1"


def to_preferred(width: int, height: int, side: int | None) -> Fit:
    """As FLUX.1 Kontext's pipeline: the nearest in shape of the sizes that it was trained with."""
    ratio = width / height
    _, *size = min((abs(ratio - w / h), w, h) for w, h in PREFERRED)
    factor = (side or _USUAL_SIDE) / _USUAL_SIDE
    across, down = (max(_STEP, int(pixels * factor) // _STEP * _STEP) for pixels in size)
    return Fit((across, down), (across, down))


def to_area_at_most(width: int, height: int, side: int | None) -> Fit:
    """As FLUX.2's pipelines: smaller if it is too large, then cut to whole tokens."""
    area = (side or _USUAL_SIDE) ** 2
    if width * height > area:
        scale = math.sqrt(area / (width * height))
        width, height = int(width * scale), int(height * scale)
    size = (max(_STEP, width // _STEP * _STEP), max(_STEP, height // _STEP * _STEP))
    return Fit((max(width, size[0]), max(height, size[1])), size)


def to_area(width: int, height: int, side: int | None) -> Fit:
    """As Qwen-Image-Edit's pipelines: of this area, sides rounded to multiples of 32."""
    ratio = width / height
    across = math.sqrt((side or _QWEN_SIDE) ** 2 * ratio)
    size = (_rounded(across), _rounded(across / ratio))
    return Fit(size, size)


def to_small_area(width: int, height: int, side: int | None) -> Fit:
    """As Qwen-Image-Edit-Plus shows images to its text encoder, whatever their other size."""
    return to_area(width, height, _SEEN_SIDE)


def _rounded(pixels: float) -> int:
    return max(_QWEN_STEP, round(pixels / _QWEN_STEP) * _QWEN_STEP)
