"""Compute the shift of sigma from a model's scheduler_config.json, for training and sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobs.spec.families.base import ShiftLine

if TYPE_CHECKING:
    from collections.abc import Mapping

# Shifts below this draw the same levels already if they are `stretched`; far above it, fp32 has too
# few sigmas to stretch them apart.
_LARGEST: Final = 1000.0


def trained_shift(own: ShiftLine | float | None, schedule: Mapping[str, Any], tokens: int) -> float:
    """Return the shift of training.

    It is the model's own, if it was trained with another shift than it samples with, else the
    scheduler's. A shift that depends on the number of tokens is not extrapolated, unless the family
    says so: outside of the fitted range, use its nearest end.

    Args:
        own: The model's own, by its facts; None if it is the scheduler's.
        schedule: The scheduler's settings.
        tokens: The denoiser's tokens per sample.
    """
    if isinstance(own, float):
        return own
    line = own or _line(schedule)
    if line is None:
        return _fixed(schedule)
    return min(line.at(tokens, extrapolate=line.endless), _LARGEST)


def sampler_shift(schedule: Mapping[str, Any], tokens: int) -> float:
    """Return the shift that a pipeline samples with, like diffusers' `calculate_shift`.

    It is extrapolated to any number of tokens. Jobs keep it that were created before training had a
    different shift, and before draws had a `terminal`.

    Args:
        schedule: The scheduler's settings.
        tokens: The denoiser's tokens per sample.
    """
    line = _line(schedule)
    return line.at(tokens, extrapolate=True) if line else _fixed(schedule)


def terminal(own: ShiftLine | float | None, schedule: Mapping[str, Any]) -> float:
    """Return the limit of the scheduler's lowest sigma for many steps, by its `shift_terminal`.

    It belongs to the scheduler's shift, so it is 0 for models that train with their own.
    """
    if own is not None:
        return 0.0
    return float(schedule.get("shift_terminal") or 0.0)


def _line(schedule: Mapping[str, Any]) -> ShiftLine | None:
    """Return the scheduler's line; None if the shift is the same for all sizes."""
    if not schedule.get("use_dynamic_shifting"):
        return None
    return ShiftLine(
        schedule["base_image_seq_len"],
        schedule["base_shift"],
        schedule["max_image_seq_len"],
        schedule["max_shift"],
        linear=schedule.get("time_shift_type", "exponential") == "linear",
    )


def _fixed(schedule: Mapping[str, Any]) -> float:
    return float(schedule.get("shift") or schedule.get("flow_shift") or 1.0)
