"""Aspect-ratio buckets: sizes of about the same area that differ in shape, and what fits none.

Pure.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.spec.families import latent_step_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.spec.job_spec import JobSpec

_WIDEST: Final = 2.0  # ratio of the long side to the short one


def bucket_sizes(resolution: int, step: int) -> list[tuple[int, int]]:
    """`(width, height)` of every bucket.

    Args:
        resolution: The area is at most `resolution²` pixels (and as close to it as steps allow).
        step: Sides are multiples of this many pixels.
    """
    area = max(resolution, step) ** 2
    sizes = set()
    width = step
    while width <= math.sqrt(area * _WIDEST):
        height = max(step, int(area / width) // step * step)
        if max(width, height) / min(width, height) <= _WIDEST:
            sizes |= {(width, height), (height, width)}
        width += step
    return sorted(sizes)


def divisible(sizes: Sequence[tuple[int, int]], step: int, parts: int) -> list[tuple[int, int]]:
    """The sizes whose tokens, one for each square of `step` pixels, divide into `parts` parts.

    Under context parallelism a sample's tokens are shared evenly by the ranks of a group.
    """
    return [size for size in sizes if size[0] // step * (size[1] // step) % parts == 0]


def nearest_bucket(width: int, height: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The bucket that crops least: nearest in log aspect ratio, then the largest."""
    wanted = math.log(width / height)
    return min(sizes, key=lambda s: (round(abs(math.log(s[0] / s[1]) - wanted), 9), -s[0] * s[1]))


def enlargement(width: int, height: int, size: tuple[int, int]) -> float:
    """By how much a picture is enlarged to cover a size; below 1 it is made smaller."""
    return max(size[0] / width, size[1] / height)


def sizes_of(spec: JobSpec) -> list[tuple[int, int]]:
    """The sizes that pictures are fitted to.

    Raises:
        UserError: None can be shared out over a context-parallel group.
    """
    step, ranks = latent_step_of(spec), spec.context_parallel_size
    sizes = divisible(bucket_sizes(spec.resolution, step), step, ranks)
    if not sizes:
        raise UserError(
            f"context_parallel_size {ranks} divides no bucket size of resolution {spec.resolution}",
            "change one of them",
        )
    return sizes


def why_unfit(width: int, height: int, size: tuple[int, int], spec: JobSpec) -> str:
    """Why a picture is left out for its size or shape; "" if it is not.

    Args:
        width: In pixels, as displayed.
        height: In pixels, as displayed.
        size: Of its bucket.
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
