"""A run context without a launched run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import families
from engine.ranks.team import FileBarrier
from engine.run_context import RunContext

if TYPE_CHECKING:
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import World
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec


def run_context(
    spec: JobSpec, run_dir: RunDir, world: World, telemetry: Telemetry, **parts: Any
) -> RunContext:
    """The context of a job on this rank; `parts` replace what it would have of its own."""
    defaults = {
        "barrier": FileBarrier(run_dir, world.token, world.rank, world.size),
        "family": families.load(spec.model_family),
        "model_root": Path(spec.pretrained_model_name_or_path),
    }
    return RunContext(
        spec=spec, run_dir=run_dir, world=world, telemetry=telemetry, **defaults | parts
    )
