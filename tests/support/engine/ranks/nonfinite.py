"""Ranks one of whose losses is not finite: what `tests/engine/train/test_nonfinite.py` starts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine import run_job
from engine.data.prepare import Prepared
from engine.families.flux import Flux
from engine.ranks.failure import record_failure
from engine.ranks.telemetry import Telemetry
from engine.train.optimizer_step import Stepper
from jobs.run.rundir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from engine.data.index.batch_plan import Draw


def train(rank: int, ranks: int, root: Path, spoils: str | None, late: bool) -> None:
    """Run a job; a rank that fails leaves its record and goes at once, as real ones do.

    Args:
        spoils: The sample whose latents are NaN when training reads them; None for a prediction of
            the last rank in the second step.
        late: Whether a step is judged when the next one has been given to the device.
    """
    torch.set_num_threads(1)
    run_dir = RunDir(root)
    predict, latents_of, calls = Flux.predict, Prepared.latents_of, []

    def spoilt_prediction(*words: Any) -> torch.Tensor:
        calls.append(1)
        bad = len(calls) == 2 and rank == ranks - 1
        return predict(*words) * (torch.nan if bad else 1.0)

    def spoilt_latents(self: Prepared, draw: Draw) -> torch.Tensor:
        bad = self.index.samples[draw.sample].name == spoils
        return latents_of(self, draw) * (torch.nan if bad else 1.0)

    if spoils is None:
        Flux.predict = spoilt_prediction  # type: ignore[method-assign]
    else:
        Prepared.latents_of = spoilt_latents  # type: ignore[method-assign]
    run_job.Stepper = partial(Stepper, late=late)  # type: ignore[misc, assignment]
    telemetry = Telemetry(run_dir, rank)
    try:
        run_job.run_rank(run_dir, telemetry)
    except Exception as error:
        record_failure(run_dir, rank, error, telemetry)
    else:
        telemetry.close()
