"""Ranks that sample and measure the validation loss, for `test_sampling_ranks.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from engine import families
from engine.data.prepare import prepare
from engine.diffusion.objective import build_objective
from engine.diffusion.random_numbers import keyed_generator
from engine.model.adapters import lora
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import leave_world, start_world
from engine.run_job import build_model
from engine.sample.sampler import Sampler
from engine.train.validation_loss import ValidationLoss
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.engine.run_context import run_context

if TYPE_CHECKING:
    from jobs.spec.keys.prompts import SampleRequest


class Recording:
    """A family that keeps the latents it decodes, and looks whether the model is sharded then."""

    def __init__(self, model: torch.nn.Module, sharded: bool) -> None:
        self._family = families.load("flux")
        self._model = model
        self._sharded = sharded
        self.latents: list[list[float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def decode(self, pipeline: Any, latents: torch.Tensor, request: SampleRequest) -> Any:
        if self._sharded:
            base = [p for p in self._model.parameters() if not p.requires_grad]
            assert all(isinstance(parameter, DTensor) for parameter in base), "still gathered"
        self.latents.append([request.height, request.width, *latents.flatten().tolist()])
        return self._family.decode(pipeline, latents, request)


class StopsLate:
    """A wish to stop that is seen from the n-th look on; 0 for never."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._done = 0

    def __call__(self) -> bool:
        self._done += 1
        return 0 < self._looks <= self._done


def look(rank: int, ranks: int, cases: dict[str, dict[str, Any]]) -> None:
    """Do each case: directory → job. Writes `rank-<r>.json` there, beside the pictures."""
    torch.set_num_threads(1)
    for name, values in cases.items():
        _case(rank, Path(name), values)
    leave_world()


def _case(rank: int, root: Path, values: dict[str, Any]) -> None:
    spec = load_spec(None, values)
    world = start_world(spec)
    run_dir = RunDir(root)
    run_dir.create()
    telemetry = Telemetry(run_dir, rank)
    family = families.load("flux")
    model_root = Path(spec.pretrained_model_name_or_path)
    run = run_context(spec, run_dir, world, telemetry, family=family)
    data = prepare(run)
    model = build_model(run)
    _train(model)
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1

    model.register_forward_hook(count)
    recording = Recording(model, world.shards)
    stops = StopsLate(values.get("validation_steps", 0) if rank == 1 else 0)
    run = replace(run, stop_requested=stops)
    sampler = Sampler(replace(run, family=recording), data)
    model.train()
    files = sampler.sample(model, root / "samples", 7)
    facts: dict[str, Any] = {
        "sampled": made,
        "files": files,
        "latents": recording.latents,
        "training": model.training,
    }
    if data.held:
        objective = build_objective(spec, family, model_root)
        loss = ValidationLoss(run, objective, data)
        for name in ("first", "again"):
            made = 0
            measured = loss.measure(model)
            facts[name] = [measured.loss, measured.levels] if measured else None
            facts["measured"] = made
    (root / f"rank-{rank}.json").write_text(json.dumps(facts))
    telemetry.close()


@torch.no_grad()
def _train(model: torch.nn.Module) -> None:
    """Make the adapter say something, the same on any number of ranks."""
    for number, (name, parameter) in enumerate(sorted(lora.lora_parameters(model).items())):
        if ".lora_B." in name:
            parameter.normal_(std=0.2, generator=keyed_generator(number))
