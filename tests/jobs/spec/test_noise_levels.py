"""How noise levels are spread and shifted, by formulas."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.spec.families.base import FLUX_LINE, ShiftLine
from jobs.spec.noise_levels import LEAST_STRETCHED, SHIFTED, sigma_at, stretched_ends
from jobs.spec.values.value_types import TimestepSampling


def test_a_line_goes_through_its_points_and_is_flat_beyond() -> None:
    assert ShiftLine(few=256, low=0.5, many=4096, high=1.15) == FLUX_LINE
    assert FLUX_LINE.at(256) == pytest.approx(math.exp(0.5))
    assert FLUX_LINE.at(4096) == pytest.approx(math.exp(1.15))
    assert FLUX_LINE.at(16) == FLUX_LINE.at(256)
    assert FLUX_LINE.at(10**6) == FLUX_LINE.at(4096)
    between = ShiftLine(few=10, low=1.0, many=20, high=2.0, linear=True)
    assert [between.at(tokens) for tokens in (5, 15, 25)] == [1.0, 1.5, 2.0]
    assert between.at(25, extrapolate=True) == pytest.approx(2.5)
    assert between.at(5, extrapolate=True) == pytest.approx(0.5)


def test_stretching_pulls_two_quantiles_to_the_ends() -> None:
    low, high = stretched_ends(3.0, 0.5, 0.8)
    for share, end in ((0.005, low), (0.999, high)):
        logit = 0.5 + 0.8 * NormalDist().inv_cdf(share) + math.log(3)
        assert end == pytest.approx(1 / (1 + math.exp(-logit)))
        assert sigma_at(share, "shift", shift=3.0, mean=0.5, deviation=0.8) == pytest.approx(end)
    middle = sigma_at(0.5, "shift", shift=3.0)
    low, high = stretched_ends(3.0, 0.0, 1.0)
    assert sigma_at(0.5, "stretched", shift=3.0) == pytest.approx((middle - low) / (high - low))
    assert sigma_at(0.004, "stretched", shift=3.0) == LEAST_STRETCHED
    assert sigma_at(0.9995, "stretched", shift=3.0) == 1
    assert sigma_at(0.0, "stretched") == LEAST_STRETCHED


@pytest.mark.parametrize("mean", [-800.0, 800.0])
def test_what_is_all_alike_is_not_stretched(mean: float) -> None:
    assert stretched_ends(1.0, mean, 1.0) == (0.0, 1.0)


@given(
    how=st.sampled_from(get_args(TimestepSampling)),
    shift=st.floats(0.05, 300),
    mean=st.floats(-900, 900),
    deviation=st.floats(1e-3, 10),
)
def test_levels_rise_with_their_share_and_stay_between_data_and_noise(
    how: str, shift: float, mean: float, deviation: float
) -> None:
    levels = [
        sigma_at(number / 50, how, shift=shift, mean=mean, deviation=deviation)
        for number in range(51)
    ]
    assert all(0 <= level <= 1 for level in levels)
    # To rounding; near 1, a shift's has fewer digits.
    assert all(after >= before - 1e-12 for before, after in pairwise(levels))


def test_a_shift_moves_what_is_drawn_towards_noise() -> None:
    for how in SHIFTED:
        assert sigma_at(0.4, how, shift=3.0) > sigma_at(0.4, how, shift=1.0)
