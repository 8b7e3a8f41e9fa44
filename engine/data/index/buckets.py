"""Aspect-ratio buckets: sizes of about the same area that differ in shape. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

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
