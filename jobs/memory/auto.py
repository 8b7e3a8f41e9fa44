"""What `strategy: auto` decides by: its earlier choice, else a cached prediction.

It waits for none.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from jobs.memory.calibration import read_calibration
from jobs.memory.fit import Verdict, fit_of, room_of, worst
from jobs.memory.question import recall
from jobs.run.rundir import read_json
from jobs.spec.rules.strategy import (
    AS_ASKED,
    Whole,
    depends_on_memory,
    launched_strategy,
    world_size,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.machine.gpu import Gpu
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

_KEPT: Final = ", as on its first launch"


def chosen_before(spec: JobSpec, run_dir: RunDir) -> tuple[str, str] | None:
    """Read what `auto` chose at the job's last launch, and why.

    A restart or a resumed job keeps it: what else is on the GPUs by then, or has been
    predicted meanwhile, is no reason to train in another way.

    Returns:
        Strategy and reason; None where it was not launched yet, or on another number of ranks, or
        where its settings leave no choice.
    """
    if not depends_on_memory(spec):
        return None
    record = read_json(run_dir.launch_file) or {}
    environment, gpus = record.get("environment"), record.get("gpus")
    if not (isinstance(environment, dict) and isinstance(gpus, list)):
        return None
    strategy, reason = launched_strategy(environment)
    chosen = strategy in ("ddp", "fsdp2") and reason != AS_ASKED  # before it said auto
    if len(gpus) != world_size(spec) or not chosen:
        return None
    return strategy, reason.removesuffix(_KEPT) + _KEPT


def predicted_ddp(spec: JobSpec, gpus: Sequence[Gpu]) -> Whole | None:
    """Predict the memory of a full copy of the model on each rank.

    Args:
        spec: The job.
        gpus: Those it has, at the moment at which it is launched.

    Returns:
        The prediction where it is tightest; None while the job was never estimated, in the form
        or with `fsdp-tui estimate`.
    """
    with suppress(Exception):  # whatever is wrong with a file of ours, the job starts
        predicted = recall(spec, "ddp", world_size(spec), on_gpus=True)
        if predicted is None or not gpus:
            return None
        here = read_calibration()
        needed, factor = here.corrected(predicted), here.factor
        fit = worst(
            fit_of(needed, room_of(gpu, (), {}, shares=True), on_gpus=True, factor=factor)
            for gpu in gpus
        )
        return Whole(fit.high, fit.room.free, fit.verdict is Verdict.FITS)
    return None
