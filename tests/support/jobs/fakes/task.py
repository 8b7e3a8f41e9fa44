"""`python task.py -m jobs.backends.slurm.task RUNDIR`: a task of a real srun becomes a fake rank.

For `FSDP_TUI_PYTHON`, the interpreter of the ranks; `FAKE_STEPS` says how many steps they train.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from jobs.backends.slurm.task import rank_environment
from jobs.run.rundir import RunDir
from tests.support.jobs.fakes.rank import Rank


def main() -> int:
    """Be a rank, by what Slurm says."""
    task = rank_environment(os.environ)
    steps = int(os.environ["FAKE_STEPS"])
    return Rank(RunDir(Path(sys.argv[-1])), int(task["RANK"]), int(task["WORLD_SIZE"]), steps).run()


if __name__ == "__main__":
    sys.exit(main())
