"""`python tests/bench/save.py`: how long training stands still for a checkpoint.

Two CPU ranks hold an FSDP2 model with AdamW's state and save it in each way the engine has. `pause`
is how long the call takes that training waits for, the first time and at best later; `complete` is
until the manifest is in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.ports import free_port  # noqa: E402

WAYS: Final[dict[str, dict[str, Any]]] = {
    "behind training": {"checkpointing_async": True},
    "training waits": {"checkpointing_async": False},
    "full layout": {"fsdp_state_dict_type": "FULL_STATE_DICT"},
}
RANKS: Final = 2
WIDTH: Final = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=40, help="of 2048 squared; 40: 168 M numbers")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--dir", type=Path, help="where the checkpoints go; default: /tmp")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=asked.dir) as scratch:
        torch.multiprocessing.spawn(
            rank, (free_port(), asked.layers, asked.repeats, scratch), RANKS
        )
        found = json.loads(Path(scratch, "found.json").read_text())
    print(f"{found['bytes'] / 2**30:.2f} GiB on {RANKS} ranks")
    print(f"{'way':17}{'first pause':>12}{'pause':>8}{'complete':>10}")
    for way, row in found["ways"].items():
        print(f"{way:17}{row['first']:11.2f}s{row['pause']:7.2f}s{row['complete']:9.2f}s")


def rank(number: int, port: int, layers: int, repeats: int, scratch: str) -> None:
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from engine.checkpoint import Saver
    from engine.ranks.telemetry import Telemetry
    from engine.ranks.world import leave_world, start_world
    from engine.train.train_state import TrainState
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

    torch.set_num_threads(1)
    asked = {"num_processes": RANKS, "strategy": "fsdp2", "device": "cpu"}
    world = start_world(JobSpec(**asked))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    training = TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1.0))
    rows: dict[str, dict[str, float]] = {}
    size = 0
    for way, settings in WAYS.items():
        spec = JobSpec(**asked, **settings)
        run_dir = RunDir(Path(scratch, way.replace(" ", "-")))
        run_dir.create()
        telemetry = Telemetry(run_dir, number)
        saver = Saver(spec, run_dir, world, telemetry)
        pauses, totals = [], []
        for training.step in range(1, repeats + 1):
            world.barrier()
            begun = time.perf_counter()
            saver.save(training)
            pauses.append(time.perf_counter() - begun)
            saver.finish()
            totals.append(time.perf_counter() - begun)
        files = run_dir.checkpoint(repeats).iterdir()
        size = sum(file.stat().st_size for file in files)
        rows[way] = {"first": pauses[0], "pause": min(pauses[1:]), "complete": min(totals[1:])}
        saver.close()
        telemetry.close()
        world.barrier()
        if world.main:
            shutil.rmtree(run_dir.root)
    if world.main:
        Path(scratch, "found.json").write_text(json.dumps({"bytes": size, "ways": rows}))
    leave_world()


if __name__ == "__main__":
    main()
