"""Ranks that make class images, for `test_class_images.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.ranks.team import StoppedError
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import leave_world, start_world
from engine.sample.class_images import add_class_images
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.run_context import run_context

if TYPE_CHECKING:
    from collections.abc import Callable


def make(rank: int, ranks: int, root: Path, jobs: dict[str, dict[str, Any]]) -> None:
    """Do each job: its name → its values, and `stop_at`, the images at which the last
    rank wants to stop."""
    torch.set_num_threads(1)
    for name, values in jobs.items():
        stop_at = values.pop("stop_at", 0)
        spec = load_spec(None, values)
        world = start_world(spec)
        run_dir = RunDir(root / name)
        run_dir.create()
        telemetry = Telemetry(run_dir, rank)
        stop_requested = _enough(Path(values["cache_dir"]), stop_at if rank == ranks - 1 else 0)
        try:
            with_images = add_class_images(
                run_context(spec, run_dir, world, telemetry, stop_requested=stop_requested)
            )
            said = str((with_images.datasets or [])[-1].path)
        except StoppedError:
            said = "stopped"
        (root / f"{name}-{rank}.txt").write_text(said)
        telemetry.close()
    leave_world()


def _enough(cache: Path, count: int) -> Callable[[], bool]:
    """A wish to stop that is there once as many images are; never for 0."""
    return lambda: 0 < count <= len(list(cache.glob("class_images/*/*.json")))
