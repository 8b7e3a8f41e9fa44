"""Ranks that train toys and count their live tensors: what `test_memory_ranks.py` starts."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from memory_support import resizes

from engine import run
from engine.memory.live import Live, storage_of
from engine.telemetry import Telemetry
from engine.world import leave_world, start_world
from jobs.rundir import RunDir
from jobs.specfile import load_spec

if TYPE_CHECKING:
    from collections.abc import Iterator


class OwnTensors(Live):
    """Without gloo's copy of what it reduces and scatters, which NCCL does not make.

    It is made inside of the collective, and first seen when that splits it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.split.Tensor and storage_of(args[0]) not in self.alive():
            self.ignore(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


class Counting:
    """`engine.peaks.Peaks` that counts live tensors instead of pages.

    Gloo's threads may hold a buffer for a moment after a collective has ended. That can only add,
    so of several steps the one with the least counts; not the first, before there is any state.
    """

    measure = "tensors"

    def __init__(self, live: Live) -> None:
        self._live = live
        self._steps: list[dict[str, int]] = [{}]

    @property
    def phases(self) -> dict[str, int]:
        steps = [step for step in self._steps if "step" in step][1:]
        return {name: min(step[name] for step in steps) for name in steps[0]} if steps else {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._live.reset()
        yield
        step = self._steps[-1]
        step[name] = max(step.get(name, 0), self._live.most)
        if name == "step":
            self._steps.append({})

    def memory(self) -> dict[str, int | None]:
        return {}


def train(rank: int, ranks: int, cases: dict[str, dict[str, Any]], port: int, folder: str) -> None:
    """Train each case; writes phase → bytes of each to `<rank>.json`."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # gloo's threads need the interpreter to let go of a buffer
    found = {name: _count(name, values, rank, folder) for name, values in cases.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave_world()


def _count(name: str, values: dict[str, Any], rank: int, folder: str) -> dict[str, int]:
    run_dir = RunDir(Path(folder, name))
    run_dir.create()
    spec = load_spec(None, values)
    telemetry = Telemetry(run_dir, rank)
    live = OwnTensors()
    counting = Counting(live)
    with live, resizes(live), patch.object(run, "Peaks", lambda device: counting):
        run.run_job(spec, run_dir, start_world(spec), telemetry)
    telemetry.close()
    return counting.phases
