"""The lines of the event stream: a contract, so they are compared as they are written."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs.run import events
from jobs.run.eventlog import EventLog
from jobs.run.failure import Cause
from jobs.run.rundir import event

if TYPE_CHECKING:
    from pathlib import Path

SHARDED: dict[str, Any] = {
    "ranks": 2,
    "replicas": 1,
    "units": {"Block": 4},
    "tensors": 9,
    "parameters": 80,
    "local_parameters": 40,
    "wrapped_parameters": 64,
    "local_bytes": 160,
    "largest_unit_bytes": 64,
    "root_bytes": 16,
    "replicated_parameters": 0,
}
FAILED: dict[str, Any] = {
    "rank": 1,
    "type": "OSError",
    "cause": Cause.DISK_FULL,
    "message": "no",
    "phase": "save",
    "step": 3,
    "traceback": "rank1.log",
}


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            events.Start(0, 9, 2, "fsdp2", "as asked", 12, 4, 2, 6.5, 80),
            '"start", "step": 0, "total_steps": 9, "world_size": 2, "strategy": "fsdp2", '
            '"strategy_reason": "as asked", "samples": 12, "global_batch": 4, "accumulation": 2, '
            '"steps_per_epoch": 6.5, "trained_parameters": 80, "base_matmul": null, '
            '"best_by": "validation_loss"',
        ),
        (
            events.PhaseEvent("load", "begin", total=3),
            '"phase", "name": "load", "state": "begin", "done": 0, "total": 3',
        ),
        (
            events.PhaseEvent("load", "progress", 1),
            '"phase", "name": "load", "state": "progress", "done": 1, "total": null, '
            '"seconds_left": null',
        ),
        (
            events.PhaseEvent("encode", "end", 4, 4, seconds=0.5, ranks=[2, 2]),
            '"phase", "name": "encode", "state": "end", "done": 4, "total": 4, "seconds": 0.5, '
            '"ranks": [2, 2]',
        ),
        (
            events.Data(3, 1, 0, 3, [[64, 64, 3]], 3.5, 1.5),
            '"data", "samples": 3, "held_out": 1, "skipped": 0, "texts": 3, '
            '"buckets": [[64, 64, 3]], "steps_per_epoch": 3.5, "epochs": 1.5, '
            '"total_steps": null',
        ),
        (
            events.Freed("text encoders", "rss", 1, 9, 2, 7),
            '"freed", "what": "text encoders", "measure": "rss", "before": 1, "loaded": 9, '
            '"after": 2, "held": 7',
        ),
        (events.Sharding(**SHARDED), f'"sharding", {json.dumps(SHARDED)[1:-1]}'),
        (
            events.Step(2, 0.25, 1e-4, 1.5, 0.5, 0.125, 4.0, 77, epoch=0.5),
            '"step", "step": 2, "epoch": 0.5, "loss": 0.25, "lr": 0.0001, "grad_norm": 1.5, '
            '"seconds": 0.5, "data_seconds": 0.125, "images_per_second": 4.0, "peak_bytes": 77, '
            '"base_loss": null',
        ),
        (
            events.Sample(2, "samples/step-2", ["00.png"]),
            '"sample", "step": 2, "directory": "samples/step-2", "files": ["00.png"]',
        ),
        (
            events.Validation(2, 0.5, [(0.1, 0.5)], 3, 1.25),
            '"validation", "step": 2, "loss": 0.5, "levels": [[0.1, 0.5]], "samples": 3, '
            '"seconds": 1.25',
        ),
        (
            events.Checkpoint(2, "step-2", 9, 0.5),
            '"checkpoint", "step": 2, "path": "step-2", "bytes": 9, "seconds": 0.5',
        ),
        (events.Export("export"), '"export", "path": "export"'),
        (
            events.Memory(2, "rss", {"load": [1, None]}),
            '"memory", "step": 2, "measure": "rss", "peaks": {"load": [1, null]}',
        ),
        (
            events.Scores(2, clip_t=0.25, samples=3, seconds=1.5),
            '"scores", "step": 2, "clip_t": 0.25, "clip_i": null, "dino_i": null, "samples": 3, '
            '"references": null, "seconds": 1.5',
        ),
        (events.Warned("oh"), '"warning", "message": "oh"'),
        (events.Failed.read(FAILED | {"trace": "…"}), f'"error", {json.dumps(FAILED)[1:-1]}'),
        (events.End("stopped", 7), '"end", "reason": "stopped", "step": 7'),
    ],
    ids=lambda one: one.kind if isinstance(one, events.Event) else "",
)
def test_a_line_is_written_as_ever_and_read_back(
    one: events.Event, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    line = one.line()
    assert line == f'{{"t": 1.5, "kind": {text}}}\n'
    again = type(one).read(json.loads(line))
    assert again.t == 1.5
    assert again.line() == line


def test_a_step_of_another_version_is_read_as_far_as_it_goes() -> None:
    line = json.loads(event("step", step="3", loss=0.5, lr="fast", seconds=True, more=1))
    step = events.Step.read(line)
    assert (step.step, step.loss, step.lr, step.seconds) == (3, 0.5, None, None)
    with pytest.raises(KeyError):
        events.Step.read({"loss": 0.5})


HUGE = 10**400


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "phase", "name": "encode", "state": "begin", "t": HUGE},
        {"kind": "phase", "name": "encode", "state": "begin", "t": None},
        {"kind": "phase", "name": "encode", "state": "begin", "t": []},
        {"kind": "step", "step": 1, "loss": 0.5, "t": HUGE},
    ],
)
def test_a_time_that_cannot_be_used_skips_the_line(tmp_path: Path, line: dict[str, Any]) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps(line) + "\n" + event("step", step=2, loss=0.25))
    log = EventLog(path).read_all()
    assert log.phase is None
    assert [step.step for step in log.steps] == [2]


@pytest.mark.parametrize("odd", ["many", [], HUGE])
def test_an_odd_field_with_a_default_does_not_cost_the_event(odd: Any) -> None:
    now = {"t": 1.0}
    assert events.End.read(now | {"reason": "completed", "step": odd}).reason == "completed"
    assert events.Checkpoint.read(now | {"step": 5, "bytes": odd}).step == 5
    assert events.Validation.read(now | {"step": 5, "loss": 0.5, "samples": odd}).loss == 0.5
    assert events.Start.read(now | {"step": 5, "world_size": odd}).step == 5
    phase = events.PhaseEvent.read(now | {"name": "encode", "state": "end", "total": odd})
    assert (phase.state, phase.total) == ("end", None if odd != HUGE else HUGE)
    step = events.Step.read(now | {"step": 5, "loss": 0.5, "seconds": odd})
    assert (step.step, step.seconds) == (5, None)
