"""Aspect-ratio buckets: sizes of about the same area in different shapes. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.spec.families import latent_step_of, token_parts
from jobs.spec.values.resolutions import all_resolutions, resolutions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import InputKeys, JobSpec
    from jobs.spec.keys.data import DataKeys
    from jobs.spec.values.datasets import Dataset

_WIDEST: Final = 2.0  # ratio of the long side to the short one, by default
_STEPS: Final = 16  # maximum number of steps in a side, by default
_LARGEST_STEP: Final = 128  # pixels
# a resolution is used for images that it enlarges by at most this factor
_LARGE_ENOUGH: Final = 1.1


def bucket_sizes(resolution: int, step: int, widest: float = _WIDEST) -> list[tuple[int, int]]:
    """Return `(width, height)` of every bucket.

    Args:
        resolution: The area is at most `resolution²` pixels, and as close to it as steps allow.
        step: Sides are multiples of this many pixels.
        widest: The largest ratio of the long side to the short one.
    """
    area = max(resolution, step) ** 2
    sizes = set()
    width = step
    while width <= math.sqrt(area * widest):
        height = max(step, int(area / width) // step * step)
        if max(width, height) / min(width, height) <= widest:
            sizes |= {(width, height), (height, width)}
        width += step
    side = max(step, resolution // step * step)
    return sorted(sizes or {(side, side)})


def bucket_step(resolution: int, spec: InputKeys) -> int:
    """Return the pixels between the sides of buckets at one resolution.

    How much is cropped depends on the ratio of step and side: `docs/data.md` has the measurement.
    """
    least, asked = latent_step_of(spec), spec.bucket_step
    if spec.crop == "square" or asked == 0:
        return least
    if asked is not None:
        return asked
    return min(_LARGEST_STEP, max(least, resolution // _STEPS // least * least))


def widest_bucket(spec: DataKeys) -> float:
    """Return the highest ratio of a bucket's long side to its short side."""
    return 1.0 if spec.crop == "square" else spec.max_bucket_aspect_ratio


def divisible(sizes: Sequence[tuple[int, int]], step: int, parts: int) -> list[tuple[int, int]]:
    """Keep the sizes whose tokens, one per square of `step` pixels, divide into `parts` parts.

    Under context parallelism the ranks of a group share a sample's tokens evenly.
    """
    return [size for size in sizes if size[0] // step * (size[1] // step) % parts == 0]


def nearest_bucket(width: int, height: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the bucket that crops least: nearest in log aspect ratio, then the largest."""
    log_ratio = math.log(width / height)
    return min(
        sizes, key=lambda s: (round(abs(math.log(s[0] / s[1]) - log_ratio), 9), -s[0] * s[1])
    )


def enlargement(width: int, height: int, size: tuple[int, int]) -> float:
    """Return the factor by which an image is enlarged to cover a size; below 1 it is reduced."""
    return max(size[0] / width, size[1] / height)


def sizes_of(spec: JobSpec) -> list[tuple[int, int]]:
    """Return the sizes that images are cropped to, for all resolutions.

    Raises:
        UserError: No bucket of a resolution can be divided among a context-parallel group.
    """
    return sorted({size for side in all_resolutions(spec) for size in sizes_at(side, spec)})


def sizes_at(resolution: int, spec: JobSpec) -> list[tuple[int, int]]:
    """Return the sizes that images are cropped to at one resolution; raises like `sizes_of`."""
    sizes = bucket_sizes(resolution, bucket_step(resolution, spec), widest_bucket(spec))
    ranks = token_parts(spec)
    sizes = divisible(sizes, latent_step_of(spec), ranks)
    if not sizes:
        raise UserError(
            f"context_parallel_size {ranks} divides no bucket size of resolution {resolution}",
            "change one of them",
        )
    return sizes


class Buckets:
    """Find the buckets of an image, one for each resolution that it is trained at.

    Args:
        spec: The job.
        dataset: The images' dataset; None to use the job's own resolutions.
    """

    def __init__(self, spec: JobSpec, dataset: Dataset | None = None) -> None:
        self._spec = spec
        self.sizes = {side: sizes_at(side, spec) for side in resolutions_of(spec, dataset)}
        # few distinct shapes occur
        self._by_shape: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}

    def find(self, width: int, height: int) -> dict[int, tuple[int, int]]:
        """Return resolution → bucket, in ascending order; at least one, see `why_unfit`.

        An image is trained at the smallest resolution and at every other one that it is large
        enough for; with `resolution_mode: largest`, only at the largest of these.
        """
        shape = (width, height)
        if shape not in self._by_shape:
            near = {side: nearest_bucket(*shape, sizes) for side, sizes in self.sizes.items()}
            least, most = min(near), min(_LARGE_ENOUGH, self._spec.max_upscale)
            reached = [
                side
                for side, size in near.items()
                if side == least or enlargement(*shape, size) <= most
            ]
            if self._spec.resolution_mode == "largest":
                reached = [max(reached)]
            # two resolutions may have the same bucket
            unlike = {near[side]: side for side in reversed(reached)}
            self._by_shape[shape] = {side: size for size, side in reversed(unlike.items())}
        return self._by_shape[shape]

    def why_unfit(self, width: int, height: int) -> str:
        """Return why an image is trained at none of the resolutions; "" if it is trained."""
        return why_unfit(width, height, next(iter(self.find(width, height).values())), self._spec)


def why_unfit(width: int, height: int, size: tuple[int, int], spec: DataKeys) -> str:
    """Return why an image is skipped for its size or shape; "" if it is not.

    Args:
        width: In pixels, as displayed.
        height: In pixels, as displayed.
        size: Size of its bucket.
        spec: The job.
    """
    factor = enlargement(width, height, size)
    if factor > spec.max_upscale:
        return (
            f"too small: {width}x{height} would be upscaled {factor:.1f} times "
            f"(max_upscale {spec.max_upscale:g})"
        )
    ratio = max(width, height) / min(width, height)
    if spec.max_aspect_ratio and ratio > spec.max_aspect_ratio:
        return (
            f"too long or too wide: {width}x{height} is {ratio:.1f}:1 "
            f"(max_aspect_ratio {spec.max_aspect_ratio:g})"
        )
    return ""
