"""What the ranks of `tests/engine/exports/test_exports_ranks.py` do: train, save, and export."""

from __future__ import annotations

import errno
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from engine import checkpoint, families
from engine.exports.live import export, export_trained
from engine.exports.recipe import Recipe
from engine.exports.writing import Writing
from engine.model.files.weights import local_part
from engine.ranks.failure import record_failure
from engine.ranks.mesh import build_mesh
from engine.ranks.team import FileBarrier, StrandedError
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import build_model, start_training
from engine.train.ema import is_schedule_free
from jobs.errors import UserError
from jobs.run.checkpoint_files import read_checkpoint
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.run_context import run_context

if TYPE_CHECKING:
    from pathlib import Path

    from engine.train.train_state import TrainState
    from jobs.spec.job_spec import JobSpec

STEP = 2
TIMEOUT, LONGER = 8, 12  # seconds


def on_rank(rank: int, ranks: int, cases: dict[str, dict[str, Any]], shared: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{shared}/meet", rank=rank, world_size=ranks)
    for name, values in cases.items():
        one = _Case(load_spec(None, values), RunDir(shared / name), rank, ranks)
        one.save_and_export()
        if name == "lora":
            one.wait_longer_than_a_collective_may()
            one.fail_on_a_full_disk()
        one.telemetry.close()
    dist.destroy_process_group()


class _Case:
    """A job on this rank."""

    def __init__(self, spec: JobSpec, run_dir: RunDir, rank: int, ranks: int) -> None:
        self.spec, self.run_dir = spec, run_dir
        run_dir.create()
        self.telemetry = Telemetry(run_dir, rank)
        mesh = build_mesh(spec, "fsdp2", ranks, "cpu")
        self.world = World(rank, ranks, torch.device("cpu"), "fsdp2", "t", mesh=mesh)
        self.barrier = FileBarrier(run_dir, "t", rank, ranks)
        self.family = families.load(spec.model_family)
        self.root = (run_dir.root.parent / "toy" / "model").resolve()
        self.run = run_context(
            spec,
            run_dir,
            self.world,
            self.telemetry,
            family=self.family,
            model_root=self.root,
            barrier=self.barrier,
        )
        model = build_model(self.run)
        self.training = start_training(spec, model, self.world)
        _train(self.training)

    def save_and_export(self) -> None:
        """A checkpoint and exports of the same step: with and without the average."""
        contents = checkpoint.collect(self.training, self.spec, self.world.size)
        checkpoint.write(contents, self.run_dir.checkpoint(STEP), self.world)
        for module in self.training.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()  # as a sample leaves it where nothing is resharded after forward
        export_trained(self.run, self.training)
        if self.training.has_average:
            self._export("raw", "t2")

    def _export(self, name: str, token: str) -> None:
        saved = read_checkpoint(self.run_dir.checkpoint(STEP))
        when = saved.time if saved is not None else 0.0
        recipe = Recipe(self.spec, self.family, self.root, STEP, ema=False, time=when)
        barrier = FileBarrier(self.run_dir, token, self.world.rank, self.world.size)
        export(self.training.model, recipe, self.run_dir.root / name, self.world, barrier)

    def wait_longer_than_a_collective_may(self) -> None:
        """Rank 0 takes its time to read back."""
        stock = Writing.finish

        def slow(writing: Writing) -> Any:
            time.sleep(LONGER)
            return stock(writing)

        group = dist.group.WORLD
        group.set_timeout(timedelta(seconds=TIMEOUT))
        Writing.finish = slow  # type: ignore[method-assign]
        self._export("late", "t3")
        Writing.finish = stock  # type: ignore[method-assign]
        group.set_timeout(timedelta(minutes=5))
        dist.barrier()

    def fail_on_a_full_disk(self) -> None:
        """Rank 0 cannot write; the others are told, and nobody is left in a collective."""
        stock = os.pwrite

        def full(*words: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        failure: Exception | None = None
        try:
            os.pwrite = full
            self._export("full", "t4")
        except (UserError, StrandedError) as error:
            failure = error
            if self.world.main:
                record_failure(self.run_dir, 0, error, self.telemetry)
        finally:
            os.pwrite = stock
        assert isinstance(failure, UserError if self.world.main else StrandedError)
        assert not (self.run_dir.root / "full").exists()
        dist.barrier()


@torch.no_grad()
def _train(training: TrainState) -> None:
    """Change weights and average, the same on any number of ranks."""
    for step in range(1, STEP + 1):
        for number, parameter in enumerate(training.trained().values()):
            local_part(parameter.detach()).mul_(1.01).add_(0.001 * (number % 7 + step))
            parameter.grad = torch.full_like(parameter, 0.1 * (number % 3 - 1))
        if is_schedule_free(training.optimizer):
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.step = step
        if training.ema is not None:
            training.ema.update(step)
