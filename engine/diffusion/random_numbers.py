"""Random draws that depend only on their key, not on the rank or the time of the draw."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

# Purposes of draws. Their keys are distinct, so that adding one kind does not change another.
CAPTION: Final = 1
TOKENS: Final = 2
FIRST_FRAME: Final = 3
SOUND: Final = 4
LAST_FRAME: Final = 5
CONDITION: Final = 6


def keyed_generator(*key: int) -> torch.Generator:
    """Return a CPU generator whose draws depend only on the key, the same on every device."""
    text = ":".join(map(str, key)).encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return torch.Generator().manual_seed(number)


def sample_generators(seed: int, step: int, positions: Iterable[int]) -> list[torch.Generator]:
    """Return one generator per sample of a micro-batch.

    N ranks draw exactly the same values as one rank, and a resumed run the same as an uninterrupted
    one.

    Args:
        seed: The job's seed.
        step: Optimizer step, counted from 0.
        positions: Each sample's position in the global batch.
    """
    return [keyed_generator(seed, step, position) for position in positions]


def drops_caption(seed: int, step: int, position: int, probability: float) -> bool:
    """Return whether a sample is trained with an empty caption in this step."""
    return _happens(probability, seed, step, position, CAPTION)


def gives_first_frame(seed: int, step: int, position: int, probability: float) -> bool:
    """Return whether the model gets a video's first frame in this step."""
    return _happens(probability, seed, step, position, FIRST_FRAME)


def frames_given(seed: int, step: int, position: int, shares: tuple[float, float]) -> int:
    """Return how many frames of a video the model gets in this step: 1 the first, 2 the last too.

    Args:
        seed: The job's seed.
        step: Optimizer step, counted from 0.
        position: The sample's position in the global batch.
        shares: How often the first frame is given, and how often the last one with it.
    """
    if not gives_first_frame(seed, step, position, shares[0]):
        return 0
    return 1 + _happens(shares[1], seed, step, position, LAST_FRAME)


def _happens(probability: float, *key: int) -> bool:
    if probability == 0:
        return False
    return float(torch.rand((), generator=keyed_generator(*key))) < probability
