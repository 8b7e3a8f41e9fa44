"""Trackers are refused where they are not installed, and followed from processes of their own."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service, trackers
from jobs.errors import SpecError
from jobs.machine.processes import RUN_ID_VARIABLE
from jobs.queue.states import State
from jobs.run.rundir import RunDir
from jobs.spec.file.load import load_spec
from tests.support.jobs.lab import opened
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store

# Stands in for Python: says how it was started.
SHOW = """#!/bin/sh
echo "$@"
echo "gpus=$CUDA_VISIBLE_DEVICES rank=$RANK run=$FSDP_TUI_RUN_ID key=$WANDB_API_KEY"
"""


def test_a_tracker_that_is_not_installed_is_refused_when_the_job_is_submitted(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"wandb"}
    monkeypatch.setattr(trackers, "find_spec", lambda name: name if name in there else None)
    spec = load_spec(None, job_values | {"report_to": "wandb,aim,mlflow"})
    with pytest.raises(SpecError) as caught:
        service.submit(store, spec)
    assert str(caught.value) == "report_to: aim is not installed; pip install aim mlflow"
    assert store.all() == []


def test_a_follower_sees_no_gpu_and_is_no_process_of_the_run(
    tmp_path: Path, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(SHOW)
    python.chmod(0o700)
    monkeypatch.setattr(trackers.sys, "executable", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setenv(RUN_ID_VARIABLE, "7")
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    spec = load_spec(None, job_values | {"report_to": "wandb"})
    (child,) = trackers.start_trackers(spec, run_dir)
    assert child.wait() == 0
    assert run_dir.tracker_log("wandb").read_text().splitlines() == [
        f"-m engine.tracking {run_dir.root} wandb",
        "gpus= rank= run= key=x",
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs TensorBoard")
def test_a_job_ends_without_its_tracker_which_gets_all_of_it(
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(store, job_values, monkeypatch, tmp_path / "gates") as lab:
        job = lab.submit(max_train_steps=4, report_to="tensorboard")
        lab.wait(job, State.COMPLETED)
        place = job.run_dir.tracker_place("tensorboard")
        size = job.run_dir.events.stat().st_size
        eventually(
            lambda: place.exists() and json.loads(place.read_text())["offset"] == size,
            told=lambda: job.run_dir.tracker_log("tensorboard").read_text(),
        )
        assert json.loads(place.read_text())["last"] == {"step": 4}
        assert list((job.run_dir.tracking / "tensorboard").glob("events.out.*"))
