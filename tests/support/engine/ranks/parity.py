"""One rank that trains several jobs in a row; on GPUs started by `torchrun … parity.py CASES.json`.

The file maps run directories to jobs. All jobs of a world size share the processes; each has a
mesh, a model and an optimizer of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from engine.model.files.weights import local_part
from engine.parallel.replica_check import check_replicas
from engine.ranks.mesh import build_mesh, sharding_mesh
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World, leave_world, start_world
from engine.run_job import run_job
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import JobSpec
from tests.support.engine.toy_jobs import pretend_cards


def train(rank: int, ranks: int, cases: Path) -> None:
    pretend_cards()
    for name, values in json.loads(cases.read_text()).items():
        gc.collect()
        gc.freeze()  # each job collects garbage several times; what is left of those before is none
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
    found = find_planted_differences(rank, ranks)
    cases.with_name(f"planted-{len(found)}-{rank}.json").write_text(json.dumps(found))
    leave_world()


def find_planted_differences(rank: int, ranks: int) -> list[str]:
    """What `check_replicas` says when one copy is changed by its last bit, in each layout."""
    said = []
    if ranks > 1:
        world = World(rank, ranks, torch.device("cpu"), "ddp", "t")
        said.append(_plant({"w": torch.nn.Parameter(torch.ones(5))}, world, on_rank=1))
    if ranks == 4:
        spec = JobSpec(num_processes=4, strategy="hsdp", dp_replicate_size=2)
        mesh = build_mesh(spec, "hsdp", 4, "cpu")
        assert mesh is not None
        layer = torch.nn.Linear(3, 5)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.ones_(layer.bias)
        fully_shard(layer, mesh=sharding_mesh(mesh))
        world = World(rank, 4, torch.device("cpu"), "hsdp", "t", mesh=mesh)
        said.append(_plant(dict(layer.named_parameters()), world, on_rank=3))
    return said


def _plant(trained: dict[str, torch.nn.Parameter], world: World, *, on_rank: int) -> str:
    check_replicas(trained, world)  # all is well
    if world.rank == on_rank:
        mine = local_part(next(iter(trained.values())).detach()).view(-1)
        mine[-1] = torch.nextafter(mine[-1], torch.tensor(2.0))
    try:
        check_replicas(trained, world)
    except RuntimeError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]))
