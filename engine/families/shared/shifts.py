"""The shift of sigma by a model's scheduler_config.json, while training and while sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.spec.families.base import ShiftLine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs.spec.families.base import Family as Facts


def trained_shift(facts: Facts, schedule: Mapping[str, Any], tokens: int) -> float:
    """Return the shift that training draws with.

    The family's own, where its models were trained with another than they sample with, else the
    scheduler's. One that follows the number of tokens stays where it was fitted: beyond, it is the
    nearest that was.

    Args:
        facts: Of the family.
        schedule: The scheduler's settings.
        tokens: Of the denoiser, for one sample.
    """
    if isinstance(facts.trained_shift, float):
        return facts.trained_shift
    line = facts.trained_shift or _line(schedule)
    return line.at(tokens) if line else _fixed(schedule)


def sampler_shift(schedule: Mapping[str, Any], tokens: int) -> float:
    """Return the shift that a pipeline samples with, as diffusers' `calculate_shift`.

    It follows its line to any number of tokens. Jobs have it that drew by it before training had
    another, and before draws had a `terminal`.

    Args:
        schedule: The scheduler's settings.
        tokens: Of the denoiser, for one sample.
    """
    line = _line(schedule)
    return line.at(tokens, extrapolate=True) if line else _fixed(schedule)


def terminal(facts: Facts, schedule: Mapping[str, Any]) -> float:
    """Return the lowest sigma of the scheduler's infinitely many steps, by its `shift_terminal`.

    It belongs to the scheduler's shift: 0 for families that train with another.
    """
    if facts.trained_shift is not None:
        return 0.0
    return float(schedule.get("shift_terminal") or 0.0)


def _line(schedule: Mapping[str, Any]) -> ShiftLine | None:
    """Return the scheduler's line; None where it has the same shift for all sizes."""
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
