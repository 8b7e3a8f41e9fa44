"""The parity table: any strategy on any number of ranks trains what one process would.

Four steps of the toy FLUX.1 in fp32 on CPU ranks, every step clipped, all on the same global batch
of four, of eight where four ranks accumulate, through the same code as a real job
(`engine.run_job.run_job`). With SGD every loss and every trained tensor must agree; with AdamW,
which turns the rounding of a gradient near zero into a whole step, every loss. A covering
selection trains here (see `COVERED`); `tests/bench/parity.py` has all layouts with both kinds of
training and both optimizers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.engine.parity import (
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
    from collections.abc import Iterable
    from pathlib import Path


pytestmark = pytest.mark.e2e

# One of everything: strategies, both kinds, both placements of a LoRA, both optimizers,
# accumulation, offload, swapped blocks, an average, half precision. All others are slow.
FAST: Final = {
    Case("ddp 2", "lora", "sgd"),
    Case("ddp 2, by size of GPU", "lora", "sgd"),
    Case("fsdp2 2", "full", "sgd"),
    Case("fsdp2 2", "full", "adamw"),
    Case("fsdp2 2, accumulated", "lora", "sgd"),
    Case("fsdp2 2, sharded lora", "lora", "sgd", extra="ema"),
    Case("fsdp2 2, cpu offload, accumulated", "full", "sgd"),
    Case("hsdp 2x2", "full", "sgd"),
    Case("fsdp2 2", "lora", "adamw", "bf16"),
    Case("fsdp2 2, sharded lora", "lora", "sgd", extra="nf4"),
    Case("fsdp2 2, sharded lora", "lora", "sgd", extra="training adapter"),
}


def of_each(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """A test of each of these, as its `case`."""
    fast = FAST | {case.reference for case in FAST}
    return pytest.mark.parametrize(
        "case",
        [pytest.param(c, marks=() if c in fast else pytest.mark.slow) for c in cases],
        ids=lambda case: case.folder,
    )


@pytest.fixture(scope="module")
def table(
    request: pytest.FixtureRequest, toy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Table:
    """The runs that the chosen tests of this file look at."""
    here = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params for item in here if hasattr(item, "callspec")]
    cases = [params["case"] for params in chosen if "case" in params]
    ranks = {params["ranks"] for params in chosen if "ranks" in params}
    plain = [replace(case, extra="") for case in cases if case.layout.startswith("one process")]
    return train_all(toy, tmp_path_factory.mktemp("parity"), [*cases, *plain], ranks)


@of_each(CASES)
def test_every_loss_is_that_of_one_process(table: Table, case: Case) -> None:
    losses = table.losses(case)
    assert len(losses) == STEPS
    assert losses == pytest.approx(table.losses(case.reference), rel=TOLERANCE)


@of_each(c for c in CASES if c.optimizer == "sgd")
def test_every_tensor_trained_by_sgd_is_that_of_one_process(table: Table, case: Case) -> None:
    mine, expected = table.trained(case), table.trained(case.reference)
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        difference = (tensor - expected[name]).abs().max()
        assert difference <= TOLERANCE * expected[name].abs().max(), name


@of_each(Case("one process", kind, "sgd", extra="ema") for kind in ("lora", "full"))
def test_an_average_is_exported_and_changes_nothing_of_the_training(
    table: Table, case: Case
) -> None:
    plain = replace(case, extra="")
    assert table.losses(case) == table.losses(plain)
    with_average, without = table.trained(case), table.trained(plain)
    assert any(not tensor.equal(without[name]) for name, tensor in with_average.items())


@of_each([Case("one process", "full", "sgd", extra="caption dropout")])
def test_dropped_captions_change_the_losses(table: Table, case: Case) -> None:
    assert table.losses(case) != table.losses(replace(case, extra=""))


@of_each([Case("one process", "lora", "sgd", extra="mixed data")])
def test_masks_weights_and_regularization_change_the_losses(table: Table, case: Case) -> None:
    losses = table.losses(case)
    assert len(losses) == STEPS
    assert losses != table.losses(replace(case, extra=""))


@of_each(sorted({c.reference for c in CASES}, key=lambda c: c.folder))
def test_the_reference_trains_and_is_clipped(table: Table, case: Case) -> None:
    """Else the table would show that doing nothing is the same everywhere."""
    steps = table.log(case).steps
    # Before anything is learned, what the base predicts leaves nothing to learn.
    learns = [step for step in steps if step.loss > 0 or step.base_loss is None]
    assert len(learns) >= STEPS - 1
    assert all((step.grad_norm or 0) > 0.05 for step in learns), "each step is clipped"
    assert max(step.loss for step in steps) - min(step.loss for step in steps) > 1e-3


@of_each(HALF)
def test_half_precision_differs_by_its_rounding_only(table: Table, case: Case) -> None:
    """Two ranks and one agree, and both follow the curve of fp32."""
    two, one = table.losses(case), table.losses(case.reference)
    exact = table.losses(replace(case.reference, precision="no"))
    assert not any("was skipped" in line for line in table.log(case).warnings)
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
