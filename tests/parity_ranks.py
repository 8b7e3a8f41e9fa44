"""One rank that trains several jobs in a row: `torchrun … parity_ranks.py CASES.json`.

The file maps run directories to jobs. Starting ranks takes far longer than ten steps of a toy, so
all jobs of a world size share the processes; each has a mesh, a model and an optimizer of its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from engine.run import run_job
from engine.telemetry import Telemetry
from engine.world import leave_world, start_world
from jobs.rundir import RunDir
from jobs.specfile import load_spec


def main() -> None:
    rank = int(os.environ["RANK"])
    for name, values in json.loads(Path(sys.argv[1]).read_text()).items():
        run_dir = RunDir(Path(name))
        run_dir.create()
        spec = load_spec(None, values)
        telemetry = Telemetry(run_dir, rank)
        try:
            run_job(spec, run_dir, start_world(spec), telemetry)
        except BaseException:
            # At once: another rank may wait for this one in a collective.
            traceback.print_exc()
            os._exit(1)
        telemetry.close()
    leave_world()


if __name__ == "__main__":
    main()
