"""Which part of an image is trained on: the size it is fitted to, its crop and its flip."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from PIL import Image, ImageOps

from jobs.spec.rules.buckets import enlargement

if TYPE_CHECKING:
    from engine.data.index.data_index import Sample
    from jobs.spec.keys.data import DataKeys

FITTING: Final = 1
"""Goes into cache keys: raise it when `fit` makes other pixels."""


@dataclass(frozen=True)
class View:
    """One crop of a sample, mirrored or not.

    Attributes:
        size: `(width, height)` it is fitted to.
        centre: Where it is cut, along the side that is too long: 0 keeps its beginning, 1 its end.
        flip: Whether it is mirrored.
    """

    size: tuple[int, int]
    centre: float = 0.5
    flip: bool = False

    def facts(self) -> dict[str, Any]:
        """Return the values that determine the pixels, as JSON values."""
        return {"size": list(self.size), "centre": self.centre, "flip": self.flip}


def count_views(spec: DataKeys) -> int:
    """How many views of every sample there are."""
    return _count_cuts(spec) * (2 if spec.random_flip else 1)


def view_of(sample: Sample, number: int, spec: DataKeys) -> View:
    """Return the view with this number, one of `count_views`.

    Crops are spread evenly over the image, shifted by a random offset from its content, so that
    they are the same in every job.
    """
    width, height = sample.bucket[:2]
    cuts = _count_cuts(spec)
    cut, flip = number % cuts, number >= cuts
    centre = 0.5
    if cuts > 1 and _excess(sample, width, height):
        digest = hashlib.blake2b(sample.digest.encode(), digest_size=4).digest()
        shift = int.from_bytes(digest, "big") / 2**32
        centre = round((cut + shift) / cuts, 4)
    return View((width, height), centre, flip)


class Shown(NamedTuple):
    """The part of an image that a view shows.

    Attributes:
        original: `(width, height)` of the image, as displayed.
        left: Pixels that are cut off there, of the image scaled to cover the view and mirrored
            as it is.
        top: Pixels that are cut off there.
        size: `(width, height)` it is fitted to.
    """

    original: tuple[int, int]
    left: int
    top: int
    size: tuple[int, int]


def shown(sample: Sample, view: View) -> Shown:
    """Return the part of a sample that a view shows."""
    factor = enlargement(sample.width, sample.height, view.size)
    beyond = (sample.width * factor - view.size[0], sample.height * factor - view.size[1])
    across = 1 - view.centre if view.flip else view.centre
    return Shown(
        (sample.width, sample.height),
        round(beyond[0] * across),
        round(beyond[1] * view.centre),
        view.size,
    )


def fit(picture: Image.Image, view: View) -> Image.Image:
    """Scale to cover the size, cut, mirror."""
    centring = (view.centre, view.centre)
    fitted = ImageOps.fit(picture, view.size, Image.Resampling.LANCZOS, centering=centring)
    return ImageOps.mirror(fitted) if view.flip else fitted


def cut_share(width: int, height: int, size: tuple[int, int]) -> float:
    """Return the share of an image's area that is cut off."""
    factor = enlargement(width, height, size)
    return 1 - size[0] * size[1] / (width * height * factor * factor)


def _count_cuts(spec: DataKeys) -> int:
    return spec.crop_variants if spec.crop == "random" else 1


def _excess(sample: Sample, width: int, height: int) -> bool:
    """Whether at least a pixel is cut off."""
    factor = enlargement(sample.width, sample.height, (width, height))
    return sample.width * factor >= width + 1 or sample.height * factor >= height + 1
