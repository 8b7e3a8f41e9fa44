"""Run on two gloo ranks by `tests/engine/train/test_optimizer.py`: what optimizers do on shards."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from engine.train.ema import averaged_in_place, is_schedule_free
from engine.train.optimizer import build_optimizer, build_scheduler, fill_state
from engine.train.skipping import step_unless
from jobs.spec.job_spec import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
RATES = {"adamw": 1e-2, "adamw_8bit": 1e-2, "sgd": 0.1, "lion": 1e-3, "prodigy": 1.0}
RATES["adamw_schedule_free"] = 1e-2
RATES |= {"adafactor": 1e-2, "came": 5e-4, "muon": 1e-2}
# It starts far below the rate, and begins to estimate it after about 25 steps.
STEPS = {"prodigy": 40}
PRODIGY_START = 1e-4  # of the rate; by default a millionth
OFFLOADED = ("adamw", "adamw_8bit", "adamw_schedule_free", "prodigy", "muon", "came")
COLLECTIVE = ("prodigy", "muon", "adafactor", "came")  # whose steps add up or exchange something
ON_HOST = ("adamw_8bit", "adamw_schedule_free")  # which cannot leave out a step by themselves
BATCH = 8
# Replicas, and ranks of each, under HSDP.
REPLICAS = {"two replicas": (2, 1), "one replica": (1, 2)}


class Net(torch.nn.Module):
    """Uneven rows, rows for one rank only, zeros, filters; one matrix whose halves have 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Linear(10, 23)
        self.norm = torch.nn.LayerNorm(23)
        self.wide = torch.nn.Linear(23, 64)
        self.blocks = torch.nn.Linear(64, 128)  # 2 x 4096 values: 16 blocks of 256 on each rank
        self.out = torch.nn.Linear(128, 5)
        self.zeros = torch.nn.Linear(5, 5, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.filters = torch.nn.Parameter(torch.randn(7, 3, 2, 4))
        torch.nn.init.zeros_(self.zeros.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`inputs`: (B, 10). Returns (B, 5)."""
        hidden = torch.tanh(self.wide(self.norm(self.narrow(inputs))))
        outputs = self.out(torch.tanh(self.blocks(hidden)))
        return (outputs + self.zeros(outputs)) * self.gain + self.filters.square().mean() / 2


class Run:
    """A small training, whole or on this rank's shards."""

    def __init__(self, name: str, how: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.how = how
        self.model = Net()
        if how != "whole":
            options: dict[str, Any] = {}
            if how == "offload":
                options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
            if how in REPLICAS:
                options["mesh"] = init_device_mesh(
                    "cpu", REPLICAS[how], mesh_dim_names=("replicate", "shard")
                )
            fully_shard(self.model.blocks, **options)
            fully_shard(self.model, **options)
        self.spec = JobSpec(
            optimizer=name,
            learning_rate=RATES[name],
            mixed_precision="no",
            weight_decay=0.01,
            lr_scheduler="cosine",
            max_train_steps=200,
        )
        parameters = list(self.model.parameters())
        matrices = [p for p in parameters if p.ndim == 2]
        self.optimizer = build_optimizer(self.spec, parameters, CPU, matrices=matrices)
        if name == "prodigy":
            for group in self.optimizer.param_groups:
                group.update(dict.fromkeys(("d", "d0", "d_max"), PRODIGY_START))
        self.scheduler = build_scheduler(self.spec, self.optimizer)
        self.done = 0

    def advance(self, steps: int, *, left_out: int | None = None) -> list[float]:
        """Losses of the global batch, drawn by the number of the step.

        Args:
            steps: How many.
            left_out: The step, counted from 0, whose gradients are NaN: the device skips it, and it
                is then repeated with the right ones. Every step goes through `step_unless`.
        """
        losses: list[float] = []
        for step in range(steps):
            if step == left_out:
                for parameter in self.model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.nan)
                step_unless(self.optimizer, torch.ones(()))
                self.optimizer.zero_grad()
            draw = torch.Generator().manual_seed(self.done)
            inputs = torch.randn(BATCH, 10, generator=draw)
            mine = slice(None)
            if self.how != "whole":
                share = BATCH // dist.get_world_size()
                mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
            outputs = self.model(inputs[mine])
            loss = (outputs - inputs[mine, :5].sin() * 2).square().mean()
            loss.backward()
            if left_out is None:
                self.optimizer.step()
            else:
                step_unless(self.optimizer, torch.zeros(()))
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.done += 1
            mean = loss.detach()
            if self.how != "whole":
                dist.all_reduce(mean, op=dist.ReduceOp.SUM)
                mean /= dist.get_world_size()
            losses.append(mean.item())
        return losses

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on a batch of its own."""
        inputs = torch.randn(256, 10, generator=torch.Generator().manual_seed(10**6))
        return float((self.model(inputs) - inputs[:, :5].sin() * 2).square().mean())

    def tensors(self) -> dict[str, Any]:
        """What a checkpoint holds, as `engine.checkpoint` takes it."""
        fill_state(self.optimizer)
        options = StateDictOptions(ignore_frozen_params=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        alone = not dist.is_initialized()
        state_dict_saver.save(self.tensors(), checkpoint_id=path, no_dist=alone)

    def load(self, path: Path, other: Run) -> None:
        tensors = self.tensors()
        alone = not dist.is_initialized()
        state_dict_loader.load(tensors, checkpoint_id=path, no_dist=alone)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=StateDictOptions(ignore_frozen_params=True, strict=False),
        )
        state = json.loads(json.dumps(other.scheduler.state_dict(), default=lambda _: None))
        self.scheduler.load_state_dict(state)
        self.done = other.done

    def whole(self) -> list[torch.Tensor]:
        """Every parameter, gathered."""
        values = [p.detach() for p in self.model.parameters()]
        return [v.full_tensor() if isinstance(v, DTensor) else v.clone() for v in values]

    def equals(self, other: Run) -> bool:
        """Bit for bit."""
        return all(map(torch.equal, self.whole(), other.whole()))


def round_trip(name: str, how: str, path: Path) -> dict[str, bool]:
    """Save and load before the first step and after the third, against a run left alone."""
    alone, saved, early, late = (Run(name, how) for _ in range(4))
    saved.save(path / f"{name}-0")
    early.load(path / f"{name}-0", saved)
    for run in (alone, saved, early):
        run.advance(3)
    same_early = saved.equals(alone) and early.equals(alone)
    saved.save(path / f"{name}-3")
    late.load(path / f"{name}-3", saved)
    for run in (alone, saved, late):
        run.advance(2)
    return {"before": same_early, "after": saved.equals(alone) and late.equals(alone)}


def leaves_out(name: str, how: str, path: Path) -> dict[str, bool]:
    """Runs with a step that the device leaves out, against one without; one is saved after it.

    At the end of the first run, so that nothing else is asked of its state before it is compared.
    """
    alone, with_one, again = (Run(name, how) for _ in range(3))
    alone.advance(2)
    with_one.advance(2, left_out=1)
    with_one.save(path / f"{name}-{how}-left-out")
    mine, others = (tree_leaves(run.tensors()) for run in (with_one, alone))
    again.load(path / f"{name}-{how}-left-out", with_one)
    for run in (alone, again):
        run.advance(2)
    with_one.advance(2, left_out=0)
    return {
        "state": len(mine) == len(others) and all(map(_is_equal, mine, others)),
        "after": with_one.equals(alone),
        "resumed": again.equals(alone),
    }


def _is_equal(one: Any, other: Any) -> bool:
    one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def save_whole(name: str, path: Path) -> None:
    """Save a run on shards after its third step, and what it then has, unsharded."""
    run = Run(name, "sharded")
    run.advance(3)
    run.save(path / f"{name}-shards")
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    states = [run.optimizer.state[p] for p in parameters]
    whole = [
        {n: v.full_tensor() if isinstance(v, DTensor) else deepcopy(v) for n, v in state.items()}
        for state in states
    ]
    run.advance(1)
    later = run.whole()
    if dist.get_rank() == 0:
        torch.save([later, whole], path / f"{name}-whole.pt")


def largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of two models' parameters."""
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def average_gap(run: Run, reference: Run) -> float:
    """The largest difference of two runs' averages, while they are in place."""
    with averaged_in_place(run.optimizer), averaged_in_place(reference.optimizer):
        return largest(run.whole(), reference.whole())


def parity(name: str, how: str) -> dict[str, Any]:
    """Some steps on shards against as many on whole tensors, with the same global batch."""
    reference, run = Run(name, "whole"), Run(name, how)
    start = reference.whole()
    steps = STEPS.get(name, 10)
    expected, losses = reference.advance(steps), run.advance(steps)
    kept = [state.get("exp_avg") for state in run.optimizer.state.values()]
    inner = [k.to_local() if isinstance(k, DTensor) else k for k in kept]
    return {
        "parameters": largest(run.whole(), reference.whole()),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "moved": largest(reference.whole(), start),
        "average": average_gap(run, reference) if is_schedule_free(run.optimizer) else 0.0,
        "eight_bit": sum(hasattr(k, "codes") for k in inner),
        "fused": bool(run.optimizer.param_groups[0].get("fused")),
    }


def overflow(name: str) -> dict[str, Any]:
    """One fp16 step with a gradient that overflows on the last rank only, then a good one."""
    run, before = Run(name, "sharded"), Run(name, "whole").whole()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    outcome = {}
    for case in ("overflow", "good"):
        scaler.scale(run.model(torch.ones(2, 10)).square().mean()).backward()
        gradient = run.model.blocks.weight.grad
        assert isinstance(gradient, DTensor)
        if case == "overflow" and dist.get_rank() == dist.get_world_size() - 1:
            gradient.to_local()[0, 0] = float("inf")
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        outcome[case] = [largest(run.whole(), before) > 0, scaler.get_scale()]
    return outcome


def work(rank: int, _: int, directory: Path) -> None:
    """Everything that needs ranks, in one start of them; `rank<RANK>.json` says what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {
        "parity": {name: parity(name, "sharded") for name in RATES},
        "offload": {name: parity(name, "offload") for name in OFFLOADED},
        **{how: {name: parity(name, how) for name in COLLECTIVE} for how in REPLICAS},
        "round_trip": {name: round_trip(name, "sharded", directory) for name in RATES},
        "leaves_out": {name: leaves_out(name, "sharded", directory) for name in COLLECTIVE},
        "saved": {name: save_whole(name, directory) for name in COLLECTIVE},
        "overflow": {name: overflow(name) for name in ("adamw", "sgd", "prodigy")},
    }
    (directory / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
