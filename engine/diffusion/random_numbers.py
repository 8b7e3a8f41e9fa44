"""Random draws that depend on what they are for, not on who makes them or when."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# What a draw is for. Distinct keys, so that adding one kind changes no other.
CAPTION: Final = 1


def keyed_generator(*key: int) -> torch.Generator:
    """Return a CPU generator whose draws depend on the key alone, the same on every device."""
    text = ":".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return torch.Generator().manual_seed(number)


def sample_generators(seed: int, step: int, positions: Iterable[int]) -> list[torch.Generator]:
    """One generator for each sample of a micro-batch.

    N ranks draw exactly what one rank would, and a resumed run what an uninterrupted one would.

    Args:
        seed: The job's.
        step: Optimizer step, counted from 0.
        positions: Each sample's place in the global batch.
    """
    return [keyed_generator(seed, step, position) for position in positions]


def drops_caption(seed: int, step: int, position: int, probability: float) -> bool:
    """Whether a sample is trained with an empty caption in this step."""
    if probability == 0:
        return False
    generator = keyed_generator(seed, step, position, CAPTION)
    return float(torch.rand((), generator=generator)) < probability
