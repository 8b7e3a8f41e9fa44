"""Compute the threshold `c` of the losses huber and smooth_l1, if it depends on the noise level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from jobs.spec.keys.noise import NoiseKeys
    from jobs.spec.values.value_types import HuberSchedule


@dataclass(frozen=True)
class Huber:
    """A scheduled threshold, as in sd-scripts (`get_huber_threshold_if_needed`).

    Attributes:
        c: `huber_c`, the threshold in pure noise.
        schedule: Any value except constant, which needs no noise level.
    """

    c: float
    schedule: HuberSchedule

    def thresholds(self, noise: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        """Return the threshold of each sample, `(B,)`; 1 without noise.

        Args:
            noise: `(B,)`, each sample's position on the way to pure noise, from 0 to 1.
            clean: `(B,)`, the fraction of data: the data's scale over the sum of both scales.
        """
        if self.schedule == "exponential":
            return self.c**noise
        # sd-scripts writes (1 - c) / (1 + r)² + c, where r is the noise's scale over the data's.
        return clean.square() * (1 - self.c) + self.c


def scheduled(spec: NoiseKeys) -> Huber | None:
    """Return the threshold's schedule; None if the loss has no threshold or a constant one."""
    if spec.loss_type == "mse" or spec.huber_schedule == "constant":
        return None
    return Huber(spec.huber_c, spec.huber_schedule)
