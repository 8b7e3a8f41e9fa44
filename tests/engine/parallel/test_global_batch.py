"""One job, as it is, on 1, 2 and 4 ranks: `global_batch_size` keeps what every step trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs.run.eventlog import EventLog
from jobs.run.events import Start
from jobs.run.rundir import RunDir
from tests.support.engine.ranks.checkpoint import train
from tests.support.engine.toy_jobs import start_ranks, toy_values

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS: Final = 4
STOPPED: Final = 2
SIZE: Final = 8


@pytest.fixture(scope="module")
def root(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 4, 1 and 2 ranks; one of them begins on 4 and goes on on 1."""
    folder = tmp_path_factory.mktemp("global-batch")
    job = {
        "cache_dir": str(folder / "cache"),
        "global_batch_size": SIZE,
        "max_train_steps": STEPS,
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.1,
        "lr_scheduler": "cosine",
    }

    def run(name: str, ranks: int, stop_at: int | None = None) -> Any:
        return str(folder / name), toy_values(toy, **job, num_processes=ranks), stop_at

    start_ranks(train, 4, [run("4", 4), run("moved", 4, STOPPED)]).join()
    start_ranks(train, 1, [run("1", 1), run("moved", 1)]).join()
    start_ranks(train, 2, [run("2", 2)]).join()
    return folder


def steps_of(root: Path, name: str) -> list[tuple[int, float, float | None]]:
    log = EventLog(RunDir(root / name).events).read_all()
    return [(step.step, step.loss, step.grad_norm) for step in log.steps]


@pytest.mark.parametrize("name", ["2", "4", "moved"])
def test_losses_are_those_of_one_rank(root: Path, name: str) -> None:
    alone, other = steps_of(root, "1"), steps_of(root, name)
    assert [step for step, *_ in other] == list(range(1, STEPS + 1))
    assert [loss for _, loss, _ in other] == pytest.approx([loss for _, loss, _ in alone], rel=1e-6)
    assert [norm for *_, norm in other] == pytest.approx([norm for *_, norm in alone], rel=1e-5)
    losses = [loss for _, loss, _ in alone]
    assert max(losses) - min(losses) > 1e-3, "it trains"


@pytest.mark.parametrize(("name", "forwards"), [("1", 8), ("2", 4), ("4", 2), ("moved", 8)])
def test_each_rank_accumulates_its_part(root: Path, name: str, forwards: int) -> None:
    log = EventLog(RunDir(root / name).events).read_all()
    start = Start.read(log.notes[Start.kind])
    assert (start.global_batch, start.accumulation) == (SIZE, forwards)
    assert not [text for text in log.warnings if "global batch" in text]
