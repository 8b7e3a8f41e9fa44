"""Compute the part of an image that is trained on: its size, crop and flip."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from PIL import Image, ImageDraw, ImageOps

from jobs.spec.families import references_of, takes_keyframes
from jobs.spec.families.references import NOUNS
from jobs.spec.rules.buckets import enlargement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.data.index.data_index import Sample
    from engine.families.shared.references import Conditioning
    from jobs.spec.families import References
    from jobs.spec.families.references import Fit
    from jobs.spec.job_spec import InputKeys
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.keys.job import JobKeys
    from jobs.spec.keys.prompts import SampleRequest


FITTING: Final = 1
"""Part of the cache keys: raise it when `fit` or `fit_reference` produces other pixels."""


@dataclass(frozen=True)
class View:
    """One crop of a sample, mirrored or not.

    Attributes:
        size: `(width, height)` to fit the image to.
        centre: Position of the crop along the excess side, from 0 (start) to 1 (end).
        flip: Whether to mirror horizontally.
        mask: Number of its random mask.
    """

    size: tuple[int, int]
    centre: float = 0.5
    flip: bool = False
    mask: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the values that determine the image's pixels, as JSON values."""
        return {"size": list(self.size), "centre": self.centre, "flip": self.flip}


def fills(spec: JobKeys) -> bool:
    """Return whether a job's model fills in the masked part of an image."""
    takes = references_of(spec)
    return takes is not None and takes.masks


def count_views(spec: InputKeys) -> int:
    """Return the number of views of every sample: crops, sides and random masks."""
    masks = spec.mask_variants if fills(spec) else 1
    return _count_sides(spec) * masks


def view_of(sample: Sample, number: int, spec: DataKeys) -> View:
    """Return a view of a sample by its number, below `count_views`.

    Crops are spread evenly over the image, with an offset derived from its content hash, so that
    they are the same in every job.
    """
    width, height = sample.bucket[:2]
    cuts = _count_cuts(spec)
    cut, flip = number % cuts, number % _count_sides(spec) >= cuts
    centre = 0.5
    if cuts > 1 and _excess(sample, width, height):
        digest = hashlib.blake2b(sample.digest.encode(), digest_size=4).digest()
        shift = int.from_bytes(digest, "big") / 2**32
        centre = round((cut + shift) / cuts, 4)
    return View((width, height), centre, flip, number // _count_sides(spec))


class Shown(NamedTuple):
    """The part of an image that a view shows.

    Attributes:
        original: `(width, height)` of the image, as displayed.
        left: Pixels cropped from the left, in the image scaled to cover the view and mirrored like
            it.
        top: Pixels cropped from the top, likewise.
        size: `(width, height)` to which the image is fitted.
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
    """Scale an image to cover the view's size, crop, and mirror if the view is flipped."""
    centring = (view.centre, view.centre)
    fitted = ImageOps.fit(picture, view.size, Image.Resampling.LANCZOS, centering=centring)
    return ImageOps.mirror(fitted) if view.flip else fitted


def cut_share(width: int, height: int, size: tuple[int, int]) -> float:
    """Return the fraction of an image's area that is cropped away."""
    factor = enlargement(width, height, size)
    return 1 - size[0] * size[1] / (width * height * factor * factor)


def _count_cuts(spec: DataKeys) -> int:
    return spec.crop_variants if spec.crop == "random" else 1


def _count_sides(spec: DataKeys) -> int:
    return _count_cuts(spec) * (2 if spec.random_flip else 1)


def _excess(sample: Sample, width: int, height: int) -> bool:
    """Return whether at least one pixel is cropped away."""
    factor = enlargement(sample.width, sample.height, (width, height))
    return sample.width * factor >= width + 1 or sample.height * factor >= height + 1


# -- references -----------------------------------------------------------------------------
# Crop and size of a sample's conditioning images. Pure.
#
# A conditioning image with the aspect ratio of its sample is aligned to it pixel by pixel, so it
# gets the same crop and flip. Any other is shown uncropped. Either is then resized the way the
# model's pipeline would resize it.


_SAME_SHAPE: Final = 0.02  # tolerated difference between the logarithms of two aspect ratios
_ANY_SCALE: Final = 4096  # pixels, larger than any rule's usual size


class Place(NamedTuple):
    """Location of a conditioning image: a file, or a table's directory and column."""

    path: str
    column: str | None = None


@dataclass(frozen=True)
class Reference:
    """A conditioning image.

    Attributes:
        path: Its file, or the directory of its table; "" if it is a random mask.
        column: Its column, in the sample's row.
        width: Pixels, as displayed.
        height: Pixels, as displayed.
        digest: SHA-256 of the file.
        aligned: Whether it has the aspect ratio of its sample.
        scaled: `(width, height)` to which the shown part is resized.
        size: `(width, height)` of the center crop taken after resizing.
        seen: `(width, height)` at which the text encoder sees it; (0, 0) if it does not.
        role: What it is beside a control video; "" if it is the control video, or if the model
            takes no videos.
    """

    path: str
    column: str | None
    width: int
    height: int
    digest: str
    aligned: bool = False
    scaled: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)
    seen: tuple[int, int] = (0, 0)
    role: str = ""


@dataclass(frozen=True)
class ReferenceView:
    """The part of a conditioning image that matches a view of its sample.

    Attributes:
        box: Left, top, right, bottom in pixels of the image, before mirroring.
        scaled: See `Reference`.
        size: See `Reference`.
        flip: Whether to mirror horizontally.
    """

    box: tuple[int, int, int, int]
    scaled: tuple[int, int]
    size: tuple[int, int]
    flip: bool

    def facts(self) -> dict[str, Any]:
        """Return the values that determine the pixels, as JSON values."""
        return {
            "box": list(self.box),
            "scaled": list(self.scaled),
            "size": list(self.size),
            "flip": self.flip,
            "conditioning": FITTING,
        }


def role_of(sample: Sample, role: str) -> int | None:
    """Return the number of a sample's first conditioning image in a role; None if none is."""
    return next((n for n, each in enumerate(sample.references) if each.role == role), None)


def in_frames(sample: Sample) -> list[int]:
    """Return the numbers of a sample's reference images that are frames before its own."""
    return [n for n, each in enumerate(sample.references) if each.role == "reference"]


def placed(
    place: Place,
    facts: tuple[int, int, str],
    sample: tuple[int, int],
    bucket: tuple[int, ...],
    takes: References,
    side: int | None,
) -> Reference:
    """Return a conditioning image with its target sizes.

    Args:
        place: Its location.
        facts: Its width, height and digest.
        sample: Width and height of its sample.
        bucket: Its sample's bucket, whose shape an aligned image gets.
        takes: The model's rule for conditioning images.
        side: `conditioning_resolution`.
    """
    width, height, digest = facts
    apart = math.log(width / height) - math.log(sample[0] / sample[1])
    aligned = abs(apart) < _SAME_SHAPE
    if takes.fit is None:
        size = (bucket[0], bucket[1])
        return Reference(place.path, place.column, width, height, digest, aligned, size, size)
    shape = (width, height)
    if aligned:
        # Use the bucket's shape at this image's scale, or at any larger scale if the rule would
        # shrink both to the same size. That way, all conditioning images of a bucket have one size.
        factor = 1 / enlargement(width, height, (bucket[0], bucket[1]))
        shape = (round(bucket[0] * factor), round(bucket[1] * factor))
        large = (bucket[0] * _ANY_SCALE, bucket[1] * _ANY_SCALE)
        if takes.fit(*large, side).size[0] <= takes.fit(*shape, side).size[0]:
            shape = large
    fitted = takes.fit(*shape, side)
    seen = takes.seen(*shape, side).size if takes.seen else (0, 0)
    return Reference(
        place.path, place.column, width, height, digest, aligned, fitted.scaled, fitted.size, seen
    )


def reference_view(reference: Reference, sample: Sample, view: View) -> ReferenceView:
    """Return the part of a conditioning image that matches a view of its sample."""
    box = (0, 0, reference.width, reference.height)
    if reference.aligned:
        seen = shown(sample, replace(view, flip=False))
        factor = enlargement(sample.width, sample.height, view.size)
        across = reference.width / (sample.width * factor)
        down = reference.height / (sample.height * factor)
        box = (
            round(seen.left * across),
            round(seen.top * down),
            min(reference.width, round((seen.left + view.size[0]) * across)),
            min(reference.height, round((seen.top + view.size[1]) * down)),
        )
    return ReferenceView(box, reference.scaled, reference.size, view.flip)


def fit_reference(picture: Image.Image, view: ReferenceView) -> Image.Image:
    """Crop, mirror and resize as the pipelines do, then center-crop to whole tokens."""
    fitted = picture.crop(view.box)
    if view.flip:
        fitted = ImageOps.mirror(fitted)
    fitted = fitted.resize(view.scaled, Image.Resampling.LANCZOS)
    left = (view.scaled[0] - view.size[0]) // 2
    top = (view.scaled[1] - view.size[1]) // 2
    return fitted.crop((left, top, left + view.size[0], top + view.size[1]))


def as_seen(picture: Image.Image, view: ReferenceView, size: tuple[int, int]) -> Image.Image:
    """Return the same part of a conditioning image, resized for a text encoder."""
    return fit_reference(picture, replace(view, scaled=size, size=size))


def fit_whole(
    picture: Image.Image, fit: Callable[[int, int, int | None], Fit], side: int | None
) -> Image.Image:
    """Resize a prompt's conditioning image, uncropped, as a pipeline does."""
    fitted = fit(*picture.size, side)
    box = (0, 0, *picture.size)
    return fit_reference(picture, ReferenceView(box, *fitted, flip=False))


def as_keyframe(picture: Image.Image, size: tuple[int, int], number: int) -> Image.Image:
    """Return a prompt's first frame (0) or last one (1) as `MiniMaxH3ResizeStep` does.

    The first is stretched; the last covers the size, and its middle is taken.
    """
    if picture.size == size:
        return picture
    if number == 0:
        return picture.resize(size, Image.Resampling.LANCZOS)
    scale = max(size[0] / picture.width, size[1] / picture.height)
    across, down = (
        max(side, round(own * scale)) for side, own in zip(size, picture.size, strict=True)
    )
    left, top = (across - size[0]) // 2, (down - size[1]) // 2
    scaled = picture.resize((across, down), Image.Resampling.LANCZOS)
    return scaled.crop((left, top, left + size[0], top + size[1]))


def keyframe_facts(sample: Sample, number: int, spec: DataKeys) -> dict[str, Any]:
    """Return the values that determine which of its frames a keyframe is, as JSON values."""
    return {"frame": sample.bucket[2] - 1, "fps": spec.fps} if number else {"frame": 0}


def keyframe_name(sample: Sample, number: int) -> str:
    """Return the name of a video's first or last frame in messages."""
    return f"the {'last' if number else 'first'} frame of {sample.name}"


def keyframes_of(sample: Sample, spec: JobKeys) -> int:
    """Return how many frames of a sample the model may get beside it: 0, 1 or 2."""
    if not sample.from_first or not takes_keyframes(spec):
        return 0
    return 1 + bool(sample.to_last)


def prompt_conditions(
    request: SampleRequest, pictures: Mapping[str, Conditioning]
) -> list[Conditioning]:
    """Return what a prompt is conditioned on: images, or a control video and its mask before them.

    Videos are as large and as long as the sample.

    Args:
        request: The prompt.
        pictures: Its images and videos by path (`engine.data.prepare.read_pictures`).
    """
    if not request.roles:
        return [pictures[path] for path in request.conditioning]
    view = View((request.width, request.height))
    conditions: list[Conditioning] = []
    places = sorted(
        zip(request.roles, request.conditioning, strict=True),
        key=lambda place: list(NOUNS).index(place[0]),
    )
    for role, path in places:
        picture = pictures[path]
        if role == "reference":
            conditions.append(picture)
            continue
        frames = picture if isinstance(picture, list) else [picture] * request.frames
        if role == "fill_mask":
            frames = [frame.convert("L").convert("RGB") for frame in frames]
        conditions.append([fit(frame, view) for frame in frames[: request.frames]])
    return conditions


def random_mask(sample: Sample, view: View) -> Image.Image:
    """Return a view's random mask, white in a rectangle or an ellipse: the same in every job.

    Shape, size and place are drawn as in diffusers' `train_dreambooth_inpaint.py`.
    """
    rng = random.Random(f"{sample.digest} {view.facts()} {view.mask}")
    mask = Image.new("L", view.size)
    (left, right), (top, bottom) = (_span(side, rng) for side in view.size)
    draw = ImageDraw.Draw(mask)
    (draw.rectangle if rng.random() < 0.5 else draw.ellipse)((left, top, right, bottom), fill=255)
    return mask


def _span(side: int, rng: random.Random) -> tuple[int, int]:
    """Return the ends of an interval of any length in a side, anywhere in it."""
    half = rng.randint(0, side) // 2
    centre = rng.randint(half, side - half)
    return centre - half, centre + half
