"""Optimizers: the same numbers on shards as on whole tensors, or refused; exact resumes."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from came_pytorch import CAME
from diffusers.optimization import get_scheduler
from lion_pytorch import Lion
from peft import LoraConfig, inject_adapter_in_model
from prodigyopt import Prodigy
from torch.distributed.checkpoint.api import CheckpointException
from transformers.optimization import Adafactor

from engine.model.adapters.lora import initialise, lora_parameters
from engine.train import gradients
from engine.train.ema import averaged_in_place, averages_of
from engine.train.optimizer import (
    build_optimizer,
    build_scheduler,
    explain_load_failure,
)
from engine.train.skipping import decides_on_device, step_unless
from jobs.errors import UserError
from jobs.spec.job_spec import JobSpec
from tests.support.engine.ranks.optim import (
    BATCH,
    COLLECTIVE,
    CPU,
    OFFLOADED,
    ON_HOST,
    PRODIGY_START,
    RATES,
    REPLICAS,
    STEPS,
    Run,
    largest,
    leaves_out,
    round_trip,
    work,
)
from tests.support.engine.toy_jobs import start_ranks

if TYPE_CHECKING:
    from pathlib import Path

# What a sum in another order amounts to; AdamW turns it into more where gradients are near zero.
# Lion takes signs, so it is exact or off by a whole step. 8 bits round such a difference up to a
# neighbouring code now and then: about a hundredth of the parameters' way of 0.1 in ten steps.
TOLERANCE = {"adamw": 1e-5, "sgd": 1e-6, "lion": 1e-6, "adamw_8bit": 3e-3, "prodigy": 1e-5}
TOLERANCE |= {"adamw_schedule_free": 1e-5, "muon": 1e-5, "adafactor": 1e-5, "came": 1e-5}


@pytest.mark.parametrize("end", [0.0, 1e-5])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("polynomial", {"lr_power": 2.0}),
        ("cosine_with_restarts", {"lr_num_cycles": 3}),
        ("constant_with_warmup", {}),
    ],
)
def test_rates_are_those_of_diffusers(kind: str, changes: dict[str, Any], end: float) -> None:
    """With a last rate, theirs of a polynomial; of the others, theirs raised in proportion."""
    steps, warmup, peak = 20, 4, 1e-3
    spec = JobSpec(
        lr_scheduler=kind,
        lr_warmup_steps=warmup,
        max_train_steps=steps,
        learning_rate=peak,
        lr_end=end,
        **changes,
    )
    ours, theirs = (torch.optim.SGD([torch.zeros(1)], lr=peak) for _ in range(2))
    own = build_scheduler(spec, ours)
    words = {"num_cycles": changes.get("lr_num_cycles", 1), "power": changes.get("lr_power", 1.0)}
    stock = get_scheduler(kind, theirs, num_warmup_steps=warmup, num_training_steps=steps, **words)
    for step in range(steps + 1):
        (found,), (rate,) = own.get_last_lr(), stock.get_last_lr()
        if step < warmup:  # their first step has rate 0, ours has none without
            assert found == pytest.approx(peak * (step + 1) / warmup)
        elif kind == "constant_with_warmup":
            assert found == rate
        elif kind == "polynomial":  # they cannot end at 0: 1e-7 is what they take
            share = max(0.0, 1 - (step - warmup) / (steps - warmup))
            assert found == pytest.approx(end + (peak - end) * share**2)
            assert rate == pytest.approx(1e-7 + (peak - 1e-7) * share**2)
        else:
            assert found == pytest.approx(end + (peak - end) * rate / peak, abs=1e-12)
        ours.step()
        theirs.step()
        own.step()
        stock.step()


@pytest.mark.parametrize(
    ("how", "pefts", "deviation"),
    [("kaiming", True, 1 / (3 * 64) ** 0.5), ("gaussian", "gaussian", 1 / 8)],
)
def test_adapters_begin_as_pefts_do(how: Any, pefts: Any, deviation: float) -> None:
    config = LoraConfig(r=8, target_modules=["0"], init_lora_weights=pefts)
    stock = inject_adapter_in_model(config, torch.nn.Sequential(torch.nn.Linear(64, 48)))
    model = inject_adapter_in_model(config, torch.nn.Sequential(torch.nn.Linear(64, 48)))
    initialise(model, 3, how)
    drawn, theirs = (lora_parameters(one)["0.lora_A.default.weight"] for one in (model, stock))
    assert drawn.std().item() == pytest.approx(deviation, rel=0.15)
    assert theirs.std().item() == pytest.approx(deviation, rel=0.15)
    assert not lora_parameters(model)["0.lora_B.default.weight"].any()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ranks leave what they found."""
    directory = tmp_path_factory.mktemp("ranks")
    start_ranks(work, 2, directory).join()
    return directory


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", RATES)
def test_trains_whole_tensors(name: str) -> None:
    run = Run(name, "whole")
    before = run.evaluate()
    run.advance(STEPS.get(name, 15))
    assert run.evaluate() < before


@pytest.mark.parametrize("name", RATES)
def test_a_resumed_run_on_whole_tensors_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert round_trip(name, "whole", tmp_path) == {"before": True, "after": True}


@pytest.mark.parametrize("name", RATES)
def test_a_step_that_the_device_leaves_out_changes_nothing(name: str, tmp_path: Path) -> None:
    """Bit for bit, counts of steps too; and the next ones are those of a run without it."""
    run = Run(name, "whole")
    assert decides_on_device(run.optimizer) == (name not in ON_HOST)
    if name not in ON_HOST:
        found = leaves_out(name, "whole", tmp_path)
        assert found == {"state": True, "after": True, "resumed": True}


@pytest.mark.parametrize("name", COLLECTIVE)
def test_a_step_that_devices_leave_out_on_shards_changes_nothing(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["leaves_out"][name] == {"state": True, "after": True, "resumed": True}


def test_parameters_that_leave_out_other_steps_count_their_own() -> None:
    """Adafactor's share depends on the count of a parameter's steps, known to the device alone."""
    first, second = (torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    optimizer = build_optimizer(JobSpec(optimizer="adafactor"), [first, second], CPU)
    for spoilt, both in ((1.0, False), (0.0, True), (1.0, True)):
        first.grad, second.grad = torch.ones(4, 3), torch.ones(4, 3) if both else None
        step_unless(optimizer, torch.tensor(spoilt))
    assert torch.equal(first, second)
    states = optimizer.state_dict()["state"].values()
    assert [state["step"] for state in states] == [1, 1]
    assert torch.equal(*(state["exp_avg_sq_row"] for state in states))


def test_lions_numbers_are_its_authors_bit_for_bit() -> None:
    ours, theirs = Run("lion", "whole"), Run("lion", "whole")
    (group,) = ours.optimizer.param_groups
    settings = {name: group[name] for name in ("lr", "weight_decay", "betas")}
    theirs.optimizer = Lion(theirs.model.parameters(), **settings)
    theirs.scheduler = build_scheduler(theirs.spec, theirs.optimizer)
    assert ours.advance(5) == theirs.advance(5)
    assert ours.equals(theirs)


def test_the_rate_stays_a_number() -> None:
    for name in RATES:
        run = Run(name, "whole")
        run.advance(1)
        assert all(isinstance(rate, float) for rate in run.scheduler.get_last_lr()), name
        assert all(isinstance(group["lr"], float) for group in run.optimizer.param_groups), name


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("adamw_8bit", "torchao"),
        ("lion", "lion-pytorch"),
        ("prodigy", "prodigyopt"),
        ("adamw_schedule_free", "schedulefree"),
        ("came", "came-pytorch"),
    ],
)
def test_a_missing_package_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    spec = JobSpec(optimizer=name)
    with pytest.raises(UserError) as caught:
        build_optimizer(spec, [torch.nn.Parameter(torch.zeros(2))], CPU)
    assert caught.value.message == f"optimizer: {name} needs the package {package}"
    assert caught.value.hint == "pip install 'fsdp-tui[optimizers]'"


def test_prodigys_numbers_are_its_authors() -> None:
    """Ours never asks the host for its estimate; a checkpoint has it where theirs has."""
    ours = Run("prodigy", "whole")
    theirs = Run("prodigy", "whole")
    (group,) = ours.optimizer.param_groups
    theirs.optimizer = Prodigy(
        theirs.model.parameters(),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        use_bias_correction=True,
        safeguard_warmup=True,
        d0=PRODIGY_START,
    )
    theirs.scheduler = build_scheduler(theirs.spec, theirs.optimizer)
    start = ours.whole()
    losses = ours.advance(STEPS["prodigy"]), theirs.advance(STEPS["prodigy"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert max((a - b).abs().max() for a, b in zip(start, ours.whole(), strict=True)) > 5e-3
    (found,), (wanted,) = (r.optimizer.state_dict()["param_groups"] for r in (ours, theirs))
    assert wanted["d"] > 4 * PRODIGY_START
    for name in ("d", "d_max", "d_numerator", "k"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name


@pytest.mark.parametrize("name", ["adafactor", "came"])
def test_factored_numbers_are_their_authors_bit_for_bit(name: str) -> None:
    ours, theirs = Run(name, "whole"), Run(name, "whole")
    (group,) = ours.optimizer.param_groups
    common = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    parameters = list(theirs.model.parameters())
    theirs.optimizer = (
        Adafactor(parameters, scale_parameter=False, relative_step=False, **common)
        if name == "adafactor"
        else CAME(parameters, **common)
    )
    theirs.scheduler = build_scheduler(theirs.spec, theirs.optimizer)
    start = ours.whole()
    assert ours.advance(5) == theirs.advance(5)
    assert ours.equals(theirs)
    assert largest(ours.whole(), start) > 1e-3


def by_hand(run: Run, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Schedule-free AdamW with every sequence kept: what is trained, and its average."""
    spec, parameters = run.spec, list(run.model.parameters())
    z, x = ([p.detach().clone() for p in parameters] for _ in range(2))
    squares = [torch.zeros_like(p) for p in parameters]
    beta, beta2 = spec.adam_beta1, spec.adam_beta2
    highest = total = 0.0
    for step in range(steps):
        inputs = torch.randn(BATCH, 10, generator=torch.Generator().manual_seed(step))
        loss = (run.model(inputs) - inputs[:, :5].sin() * 2).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        rate = spec.learning_rate * min(1.0, (step + 1) / spec.lr_warmup_steps)
        highest = max(highest, rate)
        total += highest**2
        for n, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            squares[n] = beta2 * squares[n] + (1 - beta2) * g * g
            way = g / ((squares[n] / (1 - beta2 ** (step + 1))).sqrt() + spec.adam_epsilon)
            z[n] = z[n] - rate * (way + spec.weight_decay * p.detach())
            x[n] = x[n] + highest**2 / total * (z[n] - x[n])
            p.data = (1 - beta) * z[n] + beta * x[n]
    return [p.detach() for p in parameters], x


def test_schedule_free_trains_one_point_and_has_the_average_of_others() -> None:
    run, hand = Run("adamw_schedule_free", "whole"), Run("adamw_schedule_free", "whole")
    changes = {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 3}
    for each in (run, hand):
        each.spec = each.spec.model_copy(update=changes)
    run.scheduler = build_scheduler(run.spec, run.optimizer)
    run.advance(8)
    trained, average = by_hand(hand, 8)
    assert largest(run.whole(), trained) < 1e-5
    named = dict(run.model.named_parameters())
    copies = list(averages_of(run.optimizer, named).values())
    assert largest(copies, average) < 1e-5
    assert largest(average, trained) > 1e-3
    before = run.whole()
    with averaged_in_place(run.optimizer):
        assert all(map(torch.equal, run.whole(), copies))
    assert all(map(torch.equal, run.whole(), before))
    run.advance(1)  # it trains again


def test_a_run_that_looks_at_its_average_trains_as_one_that_does_not() -> None:
    watched, alone = Run("adamw_schedule_free", "whole"), Run("adamw_schedule_free", "whole")
    for _ in range(4):
        watched.advance(1)
        with averaged_in_place(watched.optimizer):
            watched.evaluate()
    alone.advance(4)
    assert watched.equals(alone)


def test_a_schedule_free_step_in_parts_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Run("adamw_schedule_free", "whole")
    monkeypatch.setattr(gradients, "BUCKET", 1000)
    parts = Run("adamw_schedule_free", "whole")
    for run in (whole, parts):
        run.advance(3)
    assert parts.equals(whole)
    groups = [run.optimizer.param_groups for run in (parts, whole)]
    counts = [[g["k"], g["weight_sum"], g["lr_max"], len(g["params"])] for (g,) in groups]
    assert counts[0] == counts[1]
    assert counts[0][0] == 3


def test_adam_settings_reach_the_optimizer() -> None:
    settings = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1}
    for name in ("adamw", "adamw_8bit", "adamw_schedule_free", "prodigy"):
        spec = JobSpec(optimizer=name, learning_rate=0.5, **settings)
        (group,) = build_optimizer(spec, [torch.nn.Parameter(torch.ones(2))], CPU).param_groups
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.95), 1e-6), name
        assert group["weight_decay"] == 0.1, name


def test_eight_bit_state_cut_through_a_block_is_explained() -> None:
    cut = ValueError("Invalid start or end. Make sure start and end align with block boundary.")
    explained = explain_load_failure(CheckpointException("", {0: (cut, None)}))
    assert explained is not None
    assert "8-bit" in explained.message
    other = CheckpointException("", {0: (OSError("no space"), None)})
    assert explain_load_failure(other) is None


@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, "parity") for name in RATES),
        *((name, "offload") for name in OFFLOADED),
        *((name, how) for how in REPLICAS for name in COLLECTIVE),
    ],
)
def test_shards_train_like_whole_tensors(
    ranks: list[dict[str, Any]], name: str, where: str
) -> None:
    for found in (rank[where][name] for rank in ranks):
        assert found["moved"] > 5e-3
        assert found["parameters"] < TOLERANCE[name]
        assert found["average"] < TOLERANCE[name]
        assert found["losses"] < max(1e-6, TOLERANCE[name] / 30)


def test_eight_bits_are_eight_bits_on_shards_and_adamw_is_fused(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert rank["parity"]["adamw_8bit"]["eight_bit"] == 1
        assert rank["parity"]["adamw"]["fused"]
        assert rank["offload"]["adamw"]["fused"]


@pytest.mark.parametrize("name", RATES)
def test_a_resumed_run_on_shards_goes_on_bit_for_bit(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["round_trip"][name] == {"before": True, "after": True}


@pytest.mark.parametrize("name", COLLECTIVE)
def test_one_rank_resumes_what_two_have_saved(directory: Path, name: str) -> None:
    """With every number as it was saved, and on the way that two ranks take."""
    later, states = torch.load(directory / f"{name}-whole.pt")
    saved, run = Run(name, "whole"), Run(name, "whole")
    saved.advance(3)
    run.load(directory / f"{name}-shards", saved)
    (group,) = run.optimizer.param_groups
    for parameter, wanted in zip(group["params"], states, strict=True):
        found = run.optimizer.state[parameter]
        assert found.keys() == wanted.keys()
        assert all(
            torch.equal(torch.as_tensor(found[n]), torch.as_tensor(wanted[n])) for n in found
        )
    run.advance(1)
    assert largest(run.whole(), later) < TOLERANCE[name]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_all_ranks_skip_a_step_that_overflows_on_one(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["overflow"][name] == {"overflow": [False, 512.0], "good": [True, 512.0]}
