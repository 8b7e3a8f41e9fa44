"""How many parameters an adapter has, by the shapes of the weights that it is for. Pure."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.job_spec import JobSpec

_LARGEST_FACTOR: Final = 1 << 16  # none is that large; what a damaged header says may be


def count_adapter(spec: JobSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """About how many parameters a job's adapter has.

    As if every linear layer of the model's blocks had one, which is what most families adapt, and
    all of them the rank of the job.

    Args:
        spec: The job.
        shapes: Name → shape of the model's tensors.
    """
    return sum(
        _of_lokr(spec, *shape) if spec.lora_variant == "lokr" else spec.lora_rank * sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and _is_adapted(spec, name.split("."))
    )


def _is_adapted(spec: JobSpec, parts: list[str]) -> bool:
    """Whether a tensor is the weight of a layer in a block; blocks have numbers."""
    routed = "experts" in parts and not spec.lora_experts
    return parts[-1] == "weight" and any(map(str.isdigit, parts)) and not routed


def _of_lokr(spec: JobSpec, rows: int, columns: int) -> int:
    """Elements of the Kronecker factors of a `(rows, columns)` matrix; the second may be parted."""
    (a, c), (b, d) = _divide(rows, spec.lokr_factor), _divide(columns, spec.lokr_factor)
    whole = spec.lokr_full_matrix or 2 * spec.lora_rank >= max(c, d)
    return a * b + (c * d if whole else spec.lora_rank * (c + d))


@cache
def _divide(side: int, factor: int) -> tuple[int, int]:
    """A side as a product, as LyCORIS and peft divide it.

    The first is the factor where that divides the side; else the largest divisor up to it and to
    the root of the side.
    """
    if factor > 0 and side % factor == 0:
        return factor, side // factor
    largest = min(math.isqrt(side), _LARGEST_FACTOR, factor if factor > 0 else side)
    first = next((number for number in range(largest, 0, -1) if side % number == 0), 1)
    return first, side // first
