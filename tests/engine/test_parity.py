"""The parity table: any strategy on any number of ranks trains what one process would.

Six steps of the toy FLUX.1 in fp32 on CPU ranks, every step clipped, all on the same global batch
of four, of eight where four ranks accumulate, through the same code as a real job
(`engine.run.run_job`). With SGD every loss and every trained tensor must agree; with AdamW, which
turns the rounding of a gradient near zero into a whole step, every loss. SGD trains in every layout
here, AdamW in some; `tests/bench/parity.py` has all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.support.parity import (
    CASES,
    HALF,
    ROUNDING,
    STEPS,
    TOLERANCE,
    Case,
    Table,
    train_all,
)

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def table(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return train_all(toy, tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder)
def test_every_loss_is_that_of_one_process(table: Table, case: Case) -> None:
    losses = table.losses(case)
    assert len(losses) == STEPS
    assert losses == pytest.approx(table.losses(case.reference), rel=TOLERANCE)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.optimizer == "sgd"], ids=lambda case: case.folder
)
def test_every_tensor_trained_by_sgd_is_that_of_one_process(table: Table, case: Case) -> None:
    mine, expected = table.trained(case), table.trained(case.reference)
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        difference = (tensor - expected[name]).abs().max()
        assert difference <= TOLERANCE * expected[name].abs().max(), name


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_an_average_is_exported_and_changes_nothing_of_the_training(
    table: Table, kind: str
) -> None:
    plain = Case("one process", kind, "sgd")
    averaged = replace(plain, extra="ema")
    assert table.losses(averaged) == table.losses(plain)
    with_average, without = table.trained(averaged), table.trained(plain)
    assert any(not tensor.equal(without[name]) for name, tensor in with_average.items())


def test_dropped_captions_change_the_losses(table: Table) -> None:
    plain = Case("one process", "full", "sgd")
    assert table.losses(replace(plain, extra="caption dropout")) != table.losses(plain)


@pytest.mark.parametrize(
    "case",
    sorted({c.reference for c in CASES}, key=lambda c: c.folder),
    ids=lambda case: case.folder,
)
def test_the_reference_trains_and_is_clipped(table: Table, case: Case) -> None:
    """Else the table would show that doing nothing is the same everywhere."""
    steps = table.log(case).steps
    assert all((step.grad_norm or 0) > 0.05 for step in steps), "each step is clipped"
    assert max(step.loss for step in steps) - min(step.loss for step in steps) > 1e-3


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.folder)
def test_half_precision_differs_by_its_rounding_only(table: Table, case: Case) -> None:
    """Two ranks and one agree, and both follow the curve of fp32."""
    two, one = table.losses(case), table.losses(case.reference)
    exact = table.losses(replace(case.reference, precision="no"))
    assert not any("left out" in line for line in table.log(case).warnings)
    assert two == pytest.approx(one, rel=ROUNDING[case.precision])
    assert two == pytest.approx(exact, rel=ROUNDING[case.precision])
    assert two != exact, "it did compute in half precision"
    assert two[-1] < two[0]


@pytest.mark.parametrize(
    ("ranks", "changed", "told"),
    [(2, 0, {0, 1}), (4, 0, {0, 1, 2, 3}), (4, 1, {1, 3})],
    ids=["copies on 2", "copies on 4", "a shard of one of two replicas"],
)
def test_a_copy_that_differs_in_one_bit_is_found(
    table: Table, ranks: int, changed: int, told: set[int]
) -> None:
    """On the ranks that hold the copies; there the job ends, before it is saved."""
    layouts = 1 if ranks == 2 else 2
    for rank in range(ranks):
        file = table.root / f"planted-{layouts}-{rank}.json"
        said = json.loads(file.read_text())[changed]
        expected = "the ranks' copies of 1 trained tensors differ, such as w"
        assert said.startswith(expected) if rank in told else said == "nothing"
