"""Ranks that train every family, one job after another: for `tests/engine/families/test_ranks.py`.

A job that fails leaves `error.txt` in its directory, and the ranks go: the others would wait for
one in a collective.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from engine.ranks.telemetry import Telemetry
from engine.ranks.world import leave_world, start_world
from engine.run_job import run_job
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.families import shrink_pipelines


def train(rank: int, ranks: int, jobs: dict[str, dict[str, Any]], output: Path) -> None:
    """Do jobs: run directory → what stands in its file. What ranks print goes to `output`."""
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(said, stream.fileno())
    torch.set_num_threads(1)
    shrink_pipelines()
    for name, values in jobs.items():
        gc.collect()
        gc.freeze()  # each job collects garbage several times; what is left of those before is none
        run_dir = RunDir(Path(name))
        run_dir.create()
        telemetry = Telemetry(run_dir, rank)
        try:
            spec = load_spec(None, values)
            run_job(spec, run_dir, start_world(spec), telemetry)
        except BaseException:
            (run_dir.root / "error.txt").write_text(traceback.format_exc())
            os._exit(1)
        telemetry.close()
    leave_world()
