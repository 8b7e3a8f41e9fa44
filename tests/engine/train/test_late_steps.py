"""A job whose steps are judged late, as on a GPU: what is written, when, and what never is."""

from __future__ import annotations

import gc
import json
import math
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine import run_job as run
from engine.families.flux import Flux
from engine.ranks import team
from engine.ranks.team import Control
from engine.ranks.telemetry import Telemetry
from engine.ranks.world import World
from engine.run_job import run_job
from engine.train import training_loop
from engine.train.optimizer_step import Stepper, StepResult
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


def train(root: Path, toy: Path, cache: Path, **keys: Any) -> list[dict[str, Any]]:
    """Run a job in this process; its events."""
    files = RunDir(root)
    files.create()
    usual = {"max_train_steps": 5, "checkpointing_steps": 2, "optimizer": "adamw"}
    spec = toy_spec(toy, cache_dir=str(cache), checkpoints_total_limit=9, **usual | keys)
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
    toy: Path, toy_cache: Path, tmp_path: Path
) -> None:
    found = places(train(tmp_path / "late", toy, toy_cache))
    assert [place for place in found if place[0] == "step"] == [("step", n) for n in range(1, 6)]
    for saved in (2, 4, 5):
        assert found.index(("step", saved)) < found.index(("checkpoint", saved))
    assert found[-1] == ("end", 5)


@pytest.mark.usefixtures("late")
def test_a_checkpoint_follows_the_step_that_completes_an_epoch(
    toy: Path, toy_cache: Path, tmp_path: Path
) -> None:
    root = tmp_path / "epochs"
    train(root, toy, toy_cache, checkpointing_steps="0.1 epochs", max_train_steps=7)
    each = json.loads(RunDir(root).rank_file(0).read_text())["steps_per_epoch"] * 0.1
    assert 1 < each < 3, "and no whole number"
    due = {math.ceil(number * each) for number in range(1, 7)}
    saved = [step for step, _ in RunDir(root).complete_checkpoints()]
    assert saved == sorted({step for step in due if step < 7} | {7})


@pytest.mark.usefixtures("late")
def test_no_checkpoint_holds_a_step_that_was_not_finite(
    toy: Path, toy_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one of the very step: saving waits until the step is judged."""
    asked: list[int] = []
    predict = Flux.predict

    def spoil(*words: Any) -> torch.Tensor:
        asked.append(1)
        return predict(*words) * (float("nan") if len(asked) == 4 else 1.0)

    monkeypatch.setattr(Flux, "predict", spoil)
    with pytest.raises(UserError, match="not finite at step 4"):
        train(tmp_path / "spoilt", toy, toy_cache)
    files = RunDir(tmp_path / "spoilt")
    assert [step for step, _ in files.complete_checkpoints()] == [2]
    events = [json.loads(line) for line in files.events.read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "step"] == [1, 2, 3]


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(
    toy: Path, toy_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    train(tmp_path / "collected", toy, toy_cache)
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

    monkeypatch.setattr(team.dist, "all_reduce", all_reduce)
    files = RunDir(tmp_path / "run")
    files.create()
    ranks = [Control(files, World(n, 2, torch.device("cuda"), "ddp", "t")) for n in range(2)]
    files.request("save_now")
    for rank in ranks:
        rank.ask()
    assert asked == [[0, 1, 0, 0], [0, 0, 0, 0]], "rank 0 speaks for the files that it removes"
    asked.clear()
    assert ranks[0].agree().save_now
    ranks[0].acknowledge("save_now")
    ranks[0].ask()
    assert asked == [[0, 0, 0, 0]], "what was granted is not asked again"
    files.request("stop")
    assert not ranks[0].agree().stop
    ranks[0].ask()
    assert ranks[0].agree().stop
    assert not ranks[0].agree(now=True).save_now


def test_the_columns_of_steps_in_a_log_do_not_shift() -> None:
    few = (9, 0.41234, 0.5, 3e-4, 0.37)
    many = (1200, 12.5, 1234.5678, 2.85e-5, 12.5)
    lines = [
        training_loop.step_line(StepResult(step, loss, norm, None, None, rate, seconds, 0.0), 1200)
        for step, loss, norm, rate, seconds in (few, many)
    ]
    assert lines[0].startswith("step    9/1200  loss  0.41234  lr 3.00e-04  grad norm    0.5000")
    for word in ("loss", "lr", "grad norm", " s"):
        assert lines[0].rindex(word) == lines[1].rindex(word)
