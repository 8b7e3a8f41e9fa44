"""`fsdp-tui list --watch`: sentences about what changes, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import UserError
from jobs.fleet.lines import BoxGpu
from jobs.machine.gpu import Gpu, GpuProcess
from tests.support.paths import ROOT
from tests.support.tui.made_up_runs import add_job
from tests.support.waiting import PATIENCE
from tui.cli.job.watch import (
    brief_gpu,
    changed_objects,
    changed_sentences,
    in_words,
    sentence,
    watch,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs.queue.store import Store
    from jobs.service.outlook import Forecast


def row(**changes: Any) -> dict[str, Any]:
    return {
        "id": 3,
        "name": "cats",
        "state": "running",
        "reason": "",
        "step": 0,
        "total_steps": 200,
        "loss": None,
        "seconds_per_step": None,
        "eta": None,
        "eta_at_least": False,
        "starts_in": None,
        "gpus": [],
    } | changes


def test_a_job_in_words() -> None:
    assert sentence(row(state="queued", reason="waiting for job 2")) == (
        "job 3 cats is queued, waiting for job 2"
    )
    going = row(gpus=[0, 1, 3], step=40, loss=0.4123, seconds_per_step=1.5, eta=239.0)
    assert sentence(going) == (
        "job 3 cats is running on GPUs 0, 1 and 3, step 40 of 200, loss 0.4123, 1.50 seconds per "
        "step, about 4 minutes left"
    )
    assert sentence(row(eta=239.0, eta_at_least=True)).endswith(", at least 4 minutes left")
    waits = row(state="queued", starts_in=21.0, reason="waiting for job 2")
    assert sentence(waits) == "job 3 cats is queued, starts in about 21 seconds, waiting for job 2"
    assert sentence(row(state="completed", gpus=[0], step=200, seconds_per_step=1.5)) == (
        "job 3 cats is completed, step 200 of 200"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 second"), (59, "59 seconds"), (61, "1 minute"), (5400, "2 hours"), (9e4, "1 day")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_only_what_changed_is_said() -> None:
    seen: dict[int, str] = {}
    rows = [row(id=1, state="failed"), row(id=2, state="stopped"), row()]
    assert list(changed_sentences(rows, seen, first=True)) == [
        "job 3 cats is running",
        "2 more jobs have ended",
    ]
    assert list(changed_sentences(rows, seen, first=False)) == []
    rows = [row(id=2, state="stopped"), row(state="failed", reason="rank 1 was killed")]
    assert list(changed_sentences(rows, seen, first=False)) == [
        "job 3 cats is failed, rank 1 was killed",
        "job 1 was removed",
    ]
    assert list(changed_sentences(rows, seen, first=False)) == []


def test_at_first_what_there_is_is_said() -> None:
    assert list(changed_sentences([], {}, first=True)) == ["no jobs"]
    assert list(changed_sentences([row(state="lost")], {}, first=True)) == ["1 job has ended"]


def test_objects_that_changed() -> None:
    seen: dict[int, str] = {}
    assert [json.loads(line)["id"] for line in changed_objects([row()], seen)] == [3]
    assert list(changed_objects([row()], seen)) == []
    assert [json.loads(line) for line in changed_objects([], seen)] == [
        {"id": 3, "state": "removed"}
    ]


@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("database is locked"),
        UserError("no such directory"),
        FileNotFoundError(2, "gone"),
    ],
)
def test_what_passes_does_not_end_it(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_gpus: None,
    error: Exception,
) -> None:
    add_job(store, "cats")
    store.hold(1, True)
    looks = [error, error, None]

    def refresh(store: Store) -> None:
        if (failure := looks.pop(0)) is not None:
            raise failure

    def sleep(seconds: float) -> None:
        if not looks:
            raise KeyboardInterrupt

    monkeypatch.setattr("jobs.service.refresh", refresh)
    monkeypatch.setattr("tui.cli.job.watch.pause", sleep)
    with pytest.raises(KeyboardInterrupt):
        watch(store, 0.2)
    out, err = capsys.readouterr()
    assert "job 1 cats is queued" in out
    assert err.count("cannot read the jobs") == 1
    assert "the jobs can be read again" in err


def test_it_ends_with_its_reader(
    store: Store, monkeypatch: pytest.MonkeyPatch, no_gpus: None
) -> None:
    """Whoever looked from another machine is gone, and there is nothing new to print."""
    reading, writing = os.pipe()
    looks = []

    def look(store: Store, forecast: Forecast) -> list[dict[str, Any]]:
        looks.append(store)
        if len(looks) == 2:
            os.close(reading)
        return []

    monkeypatch.setattr("tui.cli.job.watch.look", look)
    with open(writing, "w", encoding="utf-8") as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(BrokenPipeError):
            watch(store, 0.01, as_json=True)
    assert len(looks) == 2


def test_what_a_fleet_is_told_of_a_gpu() -> None:
    used = GpuProcess(pid=7, memory=2**31)
    gpu = Gpu(2, "GPU-2", "H200", 2**37, 2**31 + 2**20, 97, processes=(used,))
    told = brief_gpu(gpu, {"GPU-2": 3})
    assert BoxGpu.model_validate(told) == BoxGpu(
        gpu=2, name="H200", memory_total=2**37, memory_used=2**31, utilisation=97, job=3
    )
    assert brief_gpu(gpu, {})["others"] is True


@pytest.fixture
def watching(store: Store) -> Iterator[subprocess.Popen[str]]:
    add_job(store, "cats")
    store.hold(1, True)  # so that nothing is started
    command = [sys.executable, "-m", "tui", "list", "--watch", "--interval", "0.2"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        # A worker of a parallel run ignores Ctrl-C, and what it starts would do so too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    yield process
    process.kill()
    process.communicate()


def test_it_goes_on_until_it_is_interrupted(watching: subprocess.Popen[str], store: Store) -> None:
    assert watching.stdout is not None
    assert watching.stderr is not None
    first = watching.stdout.readline()
    assert "job 1 cats is " in first
    assert first.isascii()
    assert "\x1b" not in first
    service.stop(store, 1)
    assert "job 1 cats is stopped" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    assert watching.wait(PATIENCE) == 0
    assert watching.stderr.read() == ""
