"""Ranks that train, stop and go on, and ranks that do nothing but save: for `test_resume_ranks.py`
and `test_checkpoint_kills.py`.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from engine.checkpoint import Saver, choose_start, load
from engine.model.files.weights import local_part
from engine.ranks.mesh import build_mesh, sharding_mesh
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World, leave_world, start_world
from engine.run_job import run_job
from engine.train.train_state import TrainState
from jobs.errors import UserError
from jobs.run.events import Event, Step
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.toy_jobs import pretend_cards

if TYPE_CHECKING:
    from jobs.spec.job_spec import JobSpec

WIDTH = 256  # of the layers that are saved


class Stopping(Telemetry):
    """A rank's telemetry that asks for a stop after a certain step, as a person would."""

    stop_at: int | None = None

    def emit(self, event: Event) -> None:
        super().emit(event)
        if isinstance(event, Step) and self.rank == 0 and event.step == self.stop_at:
            self.run_dir.request("stop")


def train(rank: int, ranks: int, jobs: list[tuple[str, dict[str, Any], int | None]]) -> None:
    """Run jobs one after the other: `(run directory, values, step to stop at)`."""
    torch.set_num_threads(1)
    pretend_cards()
    for name, values, stop_at in jobs:
        gc.collect()
        gc.freeze()  # each job collects garbage several times; what is left of those before is none
        run_dir = RunDir(Path(name))
        run_dir.create()
        spec = load_spec(None, values)
        world = start_world(spec)
        telemetry = Stopping(run_dir, rank)
        telemetry.stop_at = stop_at
        try:
            run_job(spec, run_dir, world, telemetry)
        except BaseException:
            traceback.print_exc()  # at once: another rank may wait for this one in a collective
            os._exit(1)
        telemetry.close()
        if ranks > 1:
            dist.barrier()
        run_dir.clear_request("stop")
        if ranks > 1:
            dist.barrier()
    leave_world()


def save_for_ever(rank: int, ranks: int, values: dict[str, Any], root: str) -> None:
    """Save step after step, every number of each being its step, until someone kills this."""
    torch.set_num_threads(1)
    spec, run_dir = load_spec(None, values), RunDir(Path(root))
    telemetry = Telemetry(run_dir, rank)
    world = start_world(spec)
    training = numbered(spec, world)
    saver = Saver(spec, run_dir, world, telemetry)
    path = choose_start(run_dir, None, world, telemetry.warn)
    if path is not None:
        load(training, path, world)
        check(training)
    while True:
        training.step += 1
        number(training)
        saver.tell()
        saver.save(training, last=training.step % 3 == 0)


def save_with_trouble(
    rank: int, ranks: int, values: dict[str, Any], root: str, part: str, times: int
) -> None:
    """Save, while a part of it fails on rank 1 alone; each rank writes what came of it."""
    spec, run_dir = load_spec(None, values), RunDir(Path(root))
    telemetry = Telemetry(run_dir, rank)
    training = numbered(spec, world := start_world(spec))
    saver = Saver(spec, run_dir, world, telemetry)
    owner, _, name = part.rpartition(".")
    works, left = getattr(sys.modules[owner], name), times if rank == 1 else 0

    def fail(*words: Any, **more: Any) -> Any:
        nonlocal left
        if left == 0:
            return works(*words, **more)
        left -= 1
        raise ZeroDivisionError("odd")

    setattr(sys.modules[owner], name, fail)
    came = "saved"
    try:
        saver.save(training)
        saver.finish()
    except UserError as error:
        came = error.message
    setattr(sys.modules[owner], name, works)
    training.step += 1
    saver.save(training, last=True)  # the ranks are in step still
    saver.close()
    telemetry.close()
    Path(root, f"came.{rank}").write_text(came)
    leave_world()


def numbered(spec: JobSpec, world: World) -> TrainState:
    """Layers, sharded where the world shards, and an optimizer that has its state."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    if world.shards:
        mesh = build_mesh(spec, world.strategy, world.size, "cpu")
        assert mesh is not None
        for layer in layers:
            fully_shard(layer, mesh=sharding_mesh(mesh))
        fully_shard(model, mesh=sharding_mesh(mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    training = TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return training


def tensors(training: TrainState) -> list[torch.Tensor]:
    state = [v for s in training.optimizer.state.values() for v in s.values()]
    return [local_part(t.detach()) for t in [*training.model.parameters(), *state]]


@torch.no_grad()
def number(training: TrainState) -> None:
    for tensor in tensors(training):
        tensor.fill_(training.step)


def check(training: TrainState) -> None:
    """That all numbers are of one step, and of the step that the checkpoint says."""
    found = {float(value) for tensor in tensors(training) for value in tensor.unique()}
    assert found == {float(training.step)}, f"step {training.step} holds numbers of {found}"
