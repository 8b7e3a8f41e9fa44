"""Run on four gloo ranks by `tests/engine/train/test_muon.py`: muon on shards and replicas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from engine.memory.predict import Trained, temporary_bytes
from engine.memory.tracing.live import Live
from engine.train import muon
from engine.train.muon import rows_on
from engine.train.optimizer import build_optimizer
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU: Final = torch.device("cpu")
RANKS: Final = 4
# Several of one shape, so that rounds overlap; tall, wide, with rows for some ranks only.
SHAPES: Final = [*[(96, 160)] * 7, *[(128, 64)] * 3, (3, 300), (31, 40), (200,)]
# How ranks split a copy, and how many copies there are.
LAYOUTS: Final = {"sharded": (4, 1), "replicated": (1, 4), "both": (2, 2)}
STEPS: Final = 3


def spec_of(precision: str = "no") -> JobSpec:
    """The job: decay on, so that the order of its operations matters."""
    return JobSpec(
        optimizer="muon", learning_rate=1e-2, weight_decay=0.1, mixed_precision=precision
    )


def tensors(seed: int) -> list[torch.Tensor]:
    """Random numbers in all shapes; the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def train(
    how: str | None, steps: int = STEPS, precision: str = "no"
) -> tuple[list[torch.nn.Parameter], dict[str, int]]:
    """Some steps; returns what was trained, and the peak of a step and its prediction.

    Gloo's threads may hold a buffer for a moment after a collective has ended, so of several steps
    the one with the least counts; not the first, before there is any state.
    """
    shards, replicas = LAYOUTS[how] if how else (1, 1)
    mesh = init_device_mesh("cpu", (replicas, shards)) if how and shards > 1 else None

    def placed(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if mesh is None:
            return [value.clone() for value in values]
        return [distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for value in values]

    parameters = [torch.nn.Parameter(value) for value in placed(tensors(0))]
    matrices = [p for p in parameters if p.ndim == 2]
    spec = spec_of(precision)
    optimizer = build_optimizer(spec, parameters, CPU, matrices=matrices)
    peaks = []
    with Live() as live:
        for step in range(1, steps + 1):
            for parameter, gradient in zip(parameters, placed(tensors(step)), strict=True):
                parameter.grad = gradient
            before = live.activations
            live.reset()
            optimizer.step()
            peaks.append(live.most - before)
    trained = []
    for p in parameters:
        rows = rows_on(p.shape[0], shards, 0) if mesh is not None else p.shape[0]
        width = p.numel() // p.shape[0]
        trained.append(Trained(rows * width, tuple(p.shape), p.ndim == 2, mesh is not None))
    expected = temporary_bytes(spec, trained, on_cuda=False, shards=shards, replicas=replicas)
    return parameters, {"peak": min(peaks[1:]), "expected": expected}


def difference(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> float:
    """The largest difference."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in ours]
    return max((a - b).abs().max().item() for a, b in zip(whole, theirs, strict=True))


def work(rank: int, _: int, directory: Path) -> None:
    """Train in each layout; `rank<RANK>.json` says what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    muon.BUCKET = 2 * 96 * 160  # two matrices at once, so that there are several rounds
    alone, _memory = train(None)
    result: dict[str, Any] = {}
    for how in LAYOUTS:
        parameters, memory = train(how)
        local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        total = sum(part.double().sum().item() for part in local)
        result[how] = memory | {"difference": difference(parameters, alone), "sum": total}
        result[how]["in bf16"] = train(how, precision="bf16")[1]
    (directory / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
