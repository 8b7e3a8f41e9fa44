"""Learning: the demo's job teaches its model a shape that it cannot draw."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from engine.demo.judge import judge
from jobs.machine.processes import with_run_id
from jobs.queue.store import Store
from jobs.run.eventlog import EventLog
from tests.support.engine.scorers import write_demo_clip
from tests.support.jobs.real_jobs import Bench
from tui.cli import demo

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 100  # of 300, with half of the images in a step


@pytest.mark.e2e
@pytest.mark.slow
def test_the_demo_learns_to_draw_hearts_and_keeps_what_it_could_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: str
) -> None:
    bench = Bench(tmp_path, tmp_path)
    for name, value in bench.environment.items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "max_train_steps": STEPS,
        "train_batch_size": 8,
        "seed": 7,
        "lr_scheduler": "constant",
        "validation_steps": 0,
        "checkpointing_steps": 0,
        "validation_scores": ["clip_t"],
        "validation_clip_model": str(write_demo_clip(tmp_path / "clip")),
        "checkpoints_best_by": "clip_t",
    }.items():
        monkeypatch.setitem(demo.JOB, name, value)
    said: list[str] = []
    job = demo.start_demo(Store(), said.append)
    try:
        facts = bench.wait(job.id, "completed", "stopped", "failed", "lost")
    finally:
        for process in with_run_id(bench.store.get(job.id).run_id):
            process.signal(signal.SIGKILL)
    assert facts["state"] == "completed", facts["reason"]
    assert len(said) == 1
    before, after = judge(job.run_dir.samples)
    assert (before["step"], after["step"]) == (0, STEPS)
    assert before["hearts"] == after["hearts"] == 6
    assert before["hearts_right"] == 0
    assert after["hearts_right"] >= 3
    assert before["others_right"] == after["others_right"] == 2
    scores = EventLog(job.run_dir.events).read_all().measured()
    assert (scores.by, scores.best()) == ("clip_t", scores.values[-1]), "as the judge has it"
    assert [step for step, _ in scores.values] == [0, STEPS]
