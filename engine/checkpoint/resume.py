"""Begin where a checkpoint ends, and say in what the rest will differ from a run never stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.checkpoint.choose import choose_start
from engine.checkpoint.data_facts import tell_difference
from engine.checkpoint.restore import load
from jobs.errors import UserError
from jobs.resume import compare_plans, find_resume_conflicts
from jobs.run.checkpoint_files import read_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.run_context import RunContext
    from engine.train.train_state import TrainState
    from jobs.spec.job_spec import JobSpec


def resume(run: RunContext, training: TrainState, data: Mapping[str, Any]) -> str | None:
    """Load the newest sound checkpoint, or the one the job begins from; a collective.

    Args:
        run: The job and its ranks.
        training: What is restored, at step 0; stays there when there is nothing to begin from.
        data: What the data is, see `data_facts`.

    Returns:
        How the checkpoint's run computed with its base, for `engine.model.base_matmul`;
        None without a checkpoint.

    Raises:
        UserError: The checkpoint is of a job that this one cannot resume from.
    """
    spec, world, telemetry = run.spec, run.world, run.telemetry
    with telemetry.phase("resume") as progress:
        read = 0

        def more(count: int) -> None:
            nonlocal read
            read += count
            progress(read >> 20)

        path = choose_start(run.run_dir, spec.resume_from_checkpoint, world, telemetry.warn, more)
        if path is None:
            return None
        # It looks at the disk, so one rank does for all.
        own = path.parent == run.run_dir.checkpoints
        compared = _compare(path, spec, data, own) if world.main else ([], "")
        changes, matmul = world.from_main(compared)
        load(training, path, world)
    telemetry.moved(training.step)
    telemetry.say(f"resumed after step {training.step} from {path}")
    for change in changes:
        telemetry.warn(f"changed since {path.name} was saved: {change}")
    return matmul


def _compare(
    path: Path, spec: JobSpec, data: Mapping[str, Any], own: bool
) -> tuple[list[str], str]:
    """In what the job and its data are not what they were; and how it computed with its base.

    Raises:
        UserError: The checkpoint does not fit. The other ranks end with this one.
    """
    state = read_state(path)
    conflicts = find_resume_conflicts(state.get("spec") or {}, spec, done=int(state.get("step", 0)))
    if conflicts.impossible:
        raise UserError(f"cannot resume from {path.name}: {'; '.join(conflicts.impossible)}")
    plan = compare_plans(state, path.name, own=own)
    other = tell_difference(state.get("data") or {}, data)
    # Versions that did not choose dequantized.
    matmul = str((state.get("spec") or {}).get("base_matmul", "dequantize"))
    return [*conflicts.changes, *plan, *([other] if other else [])], matmul
