"""What `strategy: auto` goes by where a prediction is known already. It waits for none."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from jobs.memory.calibration import read_calibration
from jobs.memory.fit import Verdict, fit_of, room_of, worst
from jobs.memory.question import recall
from jobs.strategy import Whole, world_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.gpu import Gpu
    from jobs.spec import JobSpec


def predicted_ddp(spec: JobSpec, gpus: Sequence[Gpu]) -> Whole | None:
    """What a whole copy of the model on each rank comes to.

    Args:
        spec: The job.
        gpus: Those it has, at the moment at which it is launched.

    Returns:
        The prediction where it is tightest; None while nobody has looked at the job, in the form
        or with `fsdp-tui estimate`.
    """
    with suppress(Exception):  # whatever is wrong with a file of ours, the job starts
        found = recall(spec, "ddp", world_size(spec), on_gpus=True)
        if found is None or not gpus:
            return None
        factor = read_calibration().factor
        fit = worst(
            fit_of(found, room_of(gpu, (), {}, shares=True), on_gpus=True, factor=factor)
            for gpu in gpus
        )
        return Whole(fit.high, fit.room.free, fit.verdict is Verdict.FITS)
    return None
