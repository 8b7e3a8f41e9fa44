"""A job whose steps are judged late, as on a GPU: what is written, when, and what never is."""

from __future__ import annotations

import gc
import json
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import run_job as run
from engine.families.flux import Flux
from engine.ranks import control
from engine.ranks.control import Control
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_job
from engine.train import training_loop
from engine.train.optimizer_step import Stepper
from jobs.errors import UserError
from jobs.run.rundir import RunDir
from tests.support.engine.toy_jobs import toy_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def train(root: Path, toy: Path, **values: Any) -> list[dict[str, Any]]:
    """Run a job in this process; its events."""
    files = RunDir(root)
    files.create()
    spec = toy_spec(
        toy,
        cache_dir=str(root.parent / "cache"),
        max_train_steps=5,
        checkpointing_steps=2,
        optimizer="adamw",
        checkpoints_total_limit=9,
        **values,
    )
    telemetry = Telemetry(files, 0)
    try:
        run_job(spec, files, World(0, 1, CPU, "single", "t"), telemetry)
    finally:
        telemetry.close()
    return [json.loads(line) for line in files.events.read_text().splitlines()]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Stepper", partial(Stepper, late=True))
    monkeypatch.setattr(run, "export_trained", lambda *words: None)


def places(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(e["kind"], e["step"]) for e in events if e["kind"] in ("step", "checkpoint", "end")]


@pytest.mark.usefixtures("late")
def test_every_step_is_reported_once_and_before_a_checkpoint_of_it(
    toy: Path, tmp_path: Path
) -> None:
    found = places(train(tmp_path / "late", toy))
    assert [place for place in found if place[0] == "step"] == [("step", n) for n in range(1, 6)]
    for saved in (2, 4, 5):
        assert found.index(("step", saved)) < found.index(("checkpoint", saved))
    assert found[-1] == ("end", 5)


@pytest.mark.usefixtures("late")
def test_no_checkpoint_holds_a_step_that_was_not_finite(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one of the very step: saving waits until the step is judged."""
    asked: list[int] = []
    predict = Flux.predict

    def spoil(*words: Any) -> torch.Tensor:
        asked.append(1)
        return predict(*words) * (float("nan") if len(asked) == 4 else 1.0)

    monkeypatch.setattr(Flux, "predict", spoil)
    with pytest.raises(UserError, match="not finite at step 4"):
        train(tmp_path / "spoilt", toy)
    files = RunDir(tmp_path / "spoilt")
    assert [step for step, _ in files.complete_checkpoints()] == [2]
    events = [json.loads(line) for line in files.events.read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2, 3]


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[int] = []
    by_itself: set[bool] = set()
    collect, step, predict = gc.collect, Stepper.run, Flux.predict
    done = []

    def note(*words: Any) -> int:
        collected.append(len(done))
        return collect(*words)

    def run_step(self: Stepper, tell: Any) -> None:
        step(self, tell)
        done.append(1)

    def look(*words: Any) -> torch.Tensor:
        by_itself.add(gc.isenabled())
        return predict(*words)

    monkeypatch.setattr(training_loop, "_COLLECT_EVERY", 2)
    monkeypatch.setattr(run, "export_trained", lambda *words: None)
    monkeypatch.setattr(Stepper, "run", run_step)
    monkeypatch.setattr(Flux, "predict", look)
    monkeypatch.setattr(training_loop.gc, "collect", note)
    train(tmp_path / "collected", toy)
    assert by_itself == {False}
    assert [n for n in collected if n] == [2, 4]
    assert gc.isenabled()


class _Work:
    def wait(self) -> None:
        pass


def test_requests_are_shared_a_step_late_and_granted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on GPUs do not wait for each other: they take what was asked at the last boundary."""
    asked: list[list[int]] = []

    def all_reduce(votes: torch.Tensor, **_: Any) -> _Work:
        asked.append(votes.tolist())
        return _Work()

    monkeypatch.setattr(control.dist, "all_reduce", all_reduce)
    files = RunDir(tmp_path / "run")
    files.create()
    ranks = [Control(files, World(n, 2, torch.device("cuda"), "ddp", "t")) for n in range(2)]
    files.request("save_now")
    for rank in ranks:
        rank.ask()
    assert asked == [[0, 1, 0, 0], [0, 0, 0, 0]], "rank 0 speaks for the files that it removes"
    asked.clear()
    assert ranks[0].agree().save_now
    ranks[0].honoured("save_now")
    ranks[0].ask()
    assert asked == [[0, 0, 0, 0]], "what was granted is not asked again"
    files.request("stop")
    assert not ranks[0].agree().stop
    ranks[0].ask()
    assert ranks[0].agree().stop
    assert not ranks[0].agree(now=True).save_now
