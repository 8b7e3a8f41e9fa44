"""Muon: torch's numbers, the same on shards and replicas, in the memory that is predicted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.memory.tracing.live import BLOCK, Live
from engine.memory.tracing.model import build, shape_of
from engine.train import muon
from engine.train.muon import orthogonalize
from engine.train.optimizer import build_optimizer
from tests.support.engine.ranks import muon as on_ranks
from tests.support.engine.ranks.muon import CPU, LAYOUTS, RANKS, spec_of, tensors, work
from tests.support.engine.toy_jobs import start_ranks, toy_spec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    directory = tmp_path_factory.mktemp("ranks")
    start_ranks(work, RANKS, directory).join()
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_the_numbers_are_torchs() -> None:
    """Matrices of torch's `Muon` bit for bit, and the rest of its fused AdamW."""
    spec = spec_of("bf16")
    ours, theirs = ([torch.nn.Parameter(t) for t in tensors(0)] for _ in range(2))
    matrices = [p for p in theirs if p.ndim == 2]
    optimizers = [
        build_optimizer(spec, ours, CPU, matrices=[p for p in ours if p.ndim == 2]),
        torch.optim.Muon(
            matrices,
            lr=spec.learning_rate,
            weight_decay=spec.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [p for p in theirs if p.ndim != 2],
            lr=spec.learning_rate,
            weight_decay=spec.weight_decay,
            fused=True,
        ),
    ]
    for step in range(1, 4):
        for parameters in (ours, theirs):
            for parameter, gradient in zip(parameters, tensors(step), strict=True):
                parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
    assert not any(map(torch.equal, ours, tensors(0)))


@pytest.mark.parametrize("shape", [(2, 64, 256), (2, 256, 64), (1, 128, 128)])
def test_what_the_caller_holds_costs_no_memory(shape: tuple[int, int, int]) -> None:
    """The interpreter keeps a call's arguments while it traces or compiles, as `torch.compile`."""
    held = torch.randn(shape)
    size, gram = held.nbytes, 4 * shape[0] * min(shape[1:]) ** 2
    with Live() as live, torch.no_grad():
        live.ignore(held)
        batch = orthogonalize(held)
    assert size + 2 * gram <= live.most <= size + 2 * gram + 3 * BLOCK
    assert torch.linalg.svdvals(batch).median() == pytest.approx(1, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYOUTS)
def test_ranks_share_the_work_and_train_as_one(ranks: list[dict[str, Any]], how: str) -> None:
    found = [rank[how] for rank in ranks]
    assert all(each["difference"] < 1e-5 for each in found)
    shards, _ = LAYOUTS[how]
    assert len({each["sum"] for each in found}) <= shards  # copies are equal bit for bit


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYOUTS)
def test_a_step_takes_the_memory_that_is_predicted(ranks: list[dict[str, Any]], how: str) -> None:
    for found in ([rank[how] for rank in ranks], [rank[how]["in bf16"] for rank in ranks]):
        most = max(each["peak"] for each in found)
        assert most == pytest.approx(found[0]["expected"], rel=0.03)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("shape", [(96, 160), (64, 512)])
def test_one_rank_takes_the_memory_that_is_predicted(
    precision: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, a wide matrix needs most where its result is applied."""
    monkeypatch.setattr(muon, "BUCKET", 2 * shape[0] * shape[1])
    monkeypatch.setattr(on_ranks, "SHAPES", [shape] * 5)
    _, found = on_ranks.train(None, precision=precision)
    assert found["peak"] == found["expected"]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_it_trains_the_linear_layers_of_the_blocks(toy: Path, kind: str) -> None:
    """Of a FLUX.1, not its first and last layers; of a LoRA, both factors."""
    shape = shape_of(toy_spec(toy, model_type=kind, optimizer="muon"), sharded=True)
    assert shape is not None
    weights = [w for unit in build(shape).units for w in unit.weights if w.trained]
    chosen = {w.name for w in weights if w.matrix}
    assert all(
        name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name in chosen
    )
    others = {w.name for w in weights} - chosen
    if kind == "lora":
        assert not others
    else:
        assert {"x_embedder.weight", "proj_out.weight"} < others
        in_blocks = {n for n in others if "blocks." in n and not n.endswith(".bias")}
        assert all(".norm_" in name for name in in_blocks)
