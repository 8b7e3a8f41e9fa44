"""A rank that trains several compiled jobs in a row, and counts their graphs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch._dynamo
from torch._dynamo.utils import counters

from engine.ranks.telemetry import Telemetry
from engine.ranks.world import leave_world, start_world
from engine.run_job import run_job
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec


def train(rank: int, ranks: int, cases: dict[str, dict[str, Any]], folder: str) -> None:
    """Train each case; name → graphs and breaks goes to `graphs-<ranks>-<rank>.json`."""
    counts = {}
    for name, values in cases.items():
        torch._dynamo.reset()
        gc.freeze()  # each job collects garbage several times; what was imported is none
        counters.clear()
        run_dir = RunDir(Path(folder, name))
        run_dir.create()
        spec = load_spec(None, values)
        telemetry = Telemetry(run_dir, rank)
        run_job(spec, run_dir, start_world(spec), telemetry)
        telemetry.close()
        counts[name] = [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]
    Path(folder, f"graphs-{ranks}-{rank}.json").write_text(json.dumps(counts))
    leave_world()
