"""Draws are a promise: a run that is resumed after an update must go on with those it began with.

The numbers here were written down once. If one of them changes, resumed runs train on other noise.
"""

from __future__ import annotations

import pytest
import torch

from engine.diffusion.random_numbers import (
    drops_caption,
    frames_given,
    gives_first_frame,
    keyed_generator,
    sample_generators,
)


@pytest.mark.parametrize(
    ("key", "seed", "first"),
    [
        ((42,), 39850029055283138, 0.192031994),
        ((42, 7, 3), 21960003529062064, -1.888250470),
        ((42, 7, -1), 17299464374598433, 1.070287942),
        ((42, 7, 3, 1), 29186182243227111, 0.496777087),
        ((0, 0, 0), 16861434289482084, 0.084397160),
    ],
)
def test_a_key_draws_what_it_has_always_drawn(
    key: tuple[int, ...], seed: int, first: float
) -> None:
    generator = keyed_generator(*key)
    assert generator.initial_seed() == seed
    assert torch.randn(3, generator=generator)[0].item() == pytest.approx(first, abs=1e-6)


def test_a_samples_draws_are_keyed_by_seed_step_and_place() -> None:
    seeds = [generator.initial_seed() for generator in sample_generators(42, 7, range(2, 5))]
    assert seeds == [keyed_generator(42, 7, place).initial_seed() for place in (2, 3, 4)]


def test_captions_that_were_dropped_are_dropped_again() -> None:
    dropped = [place for place in range(40) if drops_caption(42, 7, place, 0.2)]
    assert dropped == [7, 12, 23, 25, 31]
    assert drops_caption(42, 7, 7, 0.0) is False


def test_first_frames_that_were_given_are_given_again() -> None:
    given = [place for place in range(40) if gives_first_frame(42, 7, place, 0.2)]
    assert given == [3, 21, 24, 25, 27, 29]
    counts = {place: frames_given(42, 7, place, (0.2, 0.5)) for place in range(40)}
    assert [place for place, count in counts.items() if count] == given
    assert {counts[place] for place in given} == {1, 2}, "the last one in half of these"
