"""One job, as it is, on 1, 2 and 4 ranks: `global_batch_size` keeps what every step trains on.

Its length is in epochs, so that how many steps they are is no matter of the ranks either.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs.resume import with_known_length
from jobs.run.checkpoint_files import list_checkpoints, read_state
from jobs.run.eventlog import EventLog
from jobs.run.events import Start
from jobs.run.rundir import RunDir
from jobs.spec.job_spec import JobSpec
from tests.support.engine.ranks.checkpoint import train
from tests.support.engine.toy_jobs import start_ranks, toy_values

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SIZE: Final = 8
EPOCHS: Final = 1.25  # of 24 images
STEPS: Final = 4
STOPPED: Final = 2


@pytest.fixture(scope="module")
def root(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 4, 1 and 2 ranks; one of them begins on 4 and goes on on 1."""
    folder = tmp_path_factory.mktemp("global-batch")
    job = {
        "cache_dir": str(folder / "cache"),
        "global_batch_size": SIZE,
        "max_train_steps": None,
        "num_train_epochs": EPOCHS,
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
    assert start.total_steps == STEPS
    assert not [text for text in log.warnings if "changed since" in text]


@pytest.mark.parametrize("name", ["1", "moved"])
def test_the_number_of_steps_is_written_down(root: Path, name: str) -> None:
    run = RunDir(root / name)
    assert json.loads(run.rank_file(0).read_text())["total_steps"] == STEPS
    assert json.loads(run.data_report.read_text())["total_steps"] == STEPS
    (saved,) = list_checkpoints(run)[-1:]
    state = read_state(saved.path)
    assert (saved.step, state["data"]["draws_per_epoch"]) == (STEPS, 24)
    job = with_known_length(JobSpec(**state["spec"] | {"max_train_steps": None}), state)
    assert job.max_train_steps == STEPS
