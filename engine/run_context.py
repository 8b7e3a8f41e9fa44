"""Context that every part of a run needs: the job, its model, its directory and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.ranks.team import Team

if TYPE_CHECKING:
    from pathlib import Path

    from engine.families import Family
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class RunContext(Team):
    """A job on this rank.

    Attributes:
        spec: The job; parts of a run may use a modified copy (`dataclasses.replace`).
        family: Its family.
        model_root: The directory of the model.
        run_dir: The run directory.
    """

    spec: JobSpec
    family: Family
    model_root: Path
    run_dir: RunDir
