"""The median rule: which job of a sweep is stopped, when, and that a resume is left alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.run.events import Scores, Start, Step, Validation
from jobs.run.rundir import RunDir
from jobs.supervise import median
from jobs.supervise.median import MedianRule, Reports, mark_of, sweep_in, worse_than

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAN = math.nan


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(median, "_EVERY", 0.0)


@dataclass
class Sweep:
    """Makes jobs of a sweep by their validation losses, at steps 10, 20, …"""

    home: Path

    def job(self, name: str, *losses: float, sweep: str = "cats") -> RunDir:
        run_dir = RunDir(self.home / name)
        run_dir.create()
        run_dir.job_file.write_text(f"name: {name}\nsweep: {sweep}\n")
        self.report(run_dir, losses)
        return run_dir

    def report(self, run_dir: RunDir, losses: Sequence[float], first: int = 10) -> None:
        with run_dir.events.open("a") as file:
            for number, loss in enumerate(losses):
                file.write(Validation(first + 10 * number, loss).line())


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path / "runs")


def rule_of(
    run_dir: RunDir, *, after: int = 20, attempt: int = 0, **keys: Any
) -> MedianRule | None:
    spec = {
        "model_flavour": None,
        "sweep": "cats",
        "validation_fraction": 0.1,
        "stop_worse_than_median_after": after,
        "checkpoints_best_by": "validation_loss",
    }
    made: Any = SimpleNamespace(spec=SimpleNamespace(**spec | keys), events_offset=attempt)
    return MedianRule.of(run_dir, made)


@pytest.mark.parametrize(
    ("own", "others", "middle"),
    [
        ([3.0], [1.0, 2.0], 1.5),
        ([3.0, 1.2], [1.0, 2.0], None),
        ([1.2, 3.0], [1.0, 2.0], None),  # its best so far counts
        ([1.5], [1.0, 2.0], None),  # no worse than it
        ([3.0], [1.0], None),  # too few to compare with
        ([3.0], [1.0, NAN], None),
        ([NAN], [1.0, 2.0], 1.5),
        ([3.0], [1.0, 2.0, 4.0, 5.0], None),
    ],
)
def test_the_best_value_so_far_is_held_against_the_median(
    own: list[float], others: list[float], middle: float | None
) -> None:
    assert worse_than(own, others) == middle


def test_a_job_is_judged_from_the_given_step_on_against_those_that_came_as_far(
    sweep: Sweep,
) -> None:
    sweep.job("1-a", 5.0, 2.0, 1.0)
    sweep.job("2-b", 5.0, 3.0)
    sweep.job("3-slow", 0.1)
    sweep.job("4-dogs", 0.1, 0.1, 0.1, sweep="dogs")
    own = sweep.job("5-own", 9.0)
    rule = rule_of(own)
    assert rule is not None
    assert rule.look() == "", "10 is before 20"
    sweep.report(own, [2.6], 20)
    assert rule.look() == "best validation loss 2.6 is above the median 2.5 of 2 others at step 20"
    assert mark_of(own).exists()
    other = rule_of(sweep.job("6-late", 9.0, 2.55))
    assert other is not None
    assert other.look(), "the one that was stopped does not count"


def test_experts_are_compared_with_their_own_kind(sweep: Sweep) -> None:
    """The same jobs, where some see other noise levels: one is left to compare with."""
    for name, noise in (("1-a", "high"), ("2-b", "low"), ("3-c", "low")):
        with sweep.job(name, 1.0, 1.0).job_file.open("a") as file:
            file.write(f"model_flavour: 2.2-t2v-a14b-{noise}\n")
    own = sweep.job("4-own", 9.0, 9.0)
    for noise, stopped in (("high", False), ("low", True)):
        rule = rule_of(own, model_flavour=f"2.2-t2v-a14b-{noise}")
        assert rule is not None
        assert bool(rule.look()) is stopped


def test_a_job_that_is_judged_by_a_score_needs_a_higher_one_and_no_held_out_data(
    sweep: Sweep,
) -> None:
    runs = [sweep.job(name) for name in ("1-a", "2-b", "3-own")]
    for run_dir, scores in zip(runs, ([0.2, 0.4], [0.3, 0.3], [0.1, 0.3, 0.36]), strict=True):
        lines = [Scores(10 + 10 * n, clip_t=score).line() for n, score in enumerate(scores)]
        run_dir.events.write_text("".join(lines))
    keys: dict[str, Any] = {"checkpoints_best_by": "clip_t", "validation_fraction": 0.0}
    rule = rule_of(runs[-1], **keys)
    assert rule is not None
    assert rule.look() == "best CLIP-T 0.3 is below the median 0.35 of 2 others at step 20"
    mark_of(runs[-1]).unlink()
    better = rule_of(sweep.job("4-better"), **keys)
    assert better is not None
    better.run_dir.events.write_text(Scores(20, clip_t=0.36).line())
    assert better.look() == ""


def test_only_the_attempt_that_was_stopped_is(sweep: Sweep) -> None:
    sweep.job("1-a", 1.0, 1.0)
    sweep.job("2-b", 1.0, 1.0)
    own = sweep.job("3-own", 9.0, 9.0)
    rule = rule_of(own, attempt=7)
    assert rule is not None
    why = rule.look()
    assert why
    adopted = rule_of(own, attempt=7)
    assert adopted is not None
    assert adopted.look() == why, "another supervisor of the attempt goes on with it"
    assert rule_of(own, attempt=99) is None, "a resume is left alone"
    mark_of(own).unlink()
    assert rule_of(own, attempt=99) is not None


@pytest.mark.parametrize("keys", [{"sweep": None}, {"stop_worse_than_median_after": None}])
def test_nobody_is_judged_unasked(sweep: Sweep, keys: dict[str, Any]) -> None:
    assert rule_of(sweep.job("1-a"), **keys) is None


def test_the_training_loss_is_a_mean_of_steps_and_of_the_last_try_of_them(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(median, "_SMOOTHED", 4)
    monkeypatch.setattr(median, "_PIECE", 300)
    run_dir = sweep.job("1-a")
    losses = [float(n * n % 17) for n in range(41)]
    reports = Reports(run_dir, 10)
    with run_dir.events.open("a") as file:
        file.write("".join(Step(n, 99.0).line() for n in range(1, 36)))
        file.flush()
        assert [step for step, _ in reports.read()] == [10, 20, 30]
        file.write(Start(step=0).line())
        file.write("".join(Step(n, losses[n]).line() for n in range(1, 41)))
    expected = [(at, sum(losses[at - 3 : at + 1]) / 4) for at in (10, 20, 30, 40)]
    assert reports.read() == expected
    rule = rule_of(run_dir, after=10, validation_fraction=0.0)
    assert rule is not None
    assert rule.every == 10


@pytest.mark.parametrize(
    ("text", "name"),
    [("sweep: cats\n", "cats"), ("a: 1\nsweep: '12'\n", "12"), ("sweep: null\n", ""), ("", "")],
)
def test_the_sweep_is_read_from_the_job_file(tmp_path: Path, text: str, name: str) -> None:
    run_dir = RunDir(tmp_path)
    assert sweep_in(run_dir) == ""
    run_dir.job_file.write_text(text)
    assert sweep_in(run_dir) == name
