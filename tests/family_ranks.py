"""Two ranks that train every family, one job after another: `torchrun … family_ranks.py JOBS.json`.

The file maps run directories to jobs. A job that fails leaves `error.txt` in its directory, and the
ranks go: the others would wait for one in a collective.
"""

from __future__ import annotations

import gc
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
    gc.freeze()  # each job collects garbage several times; what was imported is none
    for name, values in json.loads(Path(sys.argv[1]).read_text()).items():
        run_dir = RunDir(Path(name))
        run_dir.create()
        telemetry = Telemetry(run_dir, int(os.environ["RANK"]))
        try:
            spec = load_spec(None, values)
            run_job(spec, run_dir, start_world(spec), telemetry)
        except BaseException:
            (run_dir.root / "error.txt").write_text(traceback.format_exc())
            os._exit(1)
        telemetry.close()
    leave_world()


if __name__ == "__main__":
    main()
