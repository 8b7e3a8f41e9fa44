"""The queue keeper: one at a time, there as long as there is something to keep."""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from jobs.backends import backend
from jobs.backends import keeper as runner
from jobs.machine.processes import ProcessId, end
from jobs.queue.states import State
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from jobs.queue.store import Store
    from jobs.spec.job_spec import JobSpec


LOCAL = backend("local")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, no_gpus: None, started: list[int]) -> None:
    monkeypatch.setattr(runner, "POLL_INTERVAL", 0.01)


def submit(store: Store, spec: JobSpec) -> int:
    from jobs import service

    return service.submit(store, spec).id


def test_without_work_it_leaves_once_it_has_been_idle_for_long_enough(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep, strftime=time.strftime)
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "POLL_INTERVAL", 1.0)
    runner.keep(store, LOCAL, idle_seconds=3.0)
    assert now == 1003.0
    assert [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()] == [
        f"started by process {os.getppid()}",
        "nothing left to do; exiting",
    ]
    with open(store.home / "runner.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the next one may come


def test_it_stays_as_long_as_there_is_work(
    store: Store, job_spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(store, job_spec)
    looks: list[int] = []
    monkeypatch.setattr("jobs.backends.local.dispatch.dispatch", lambda _: looks.append(1))
    keeper = threading.Thread(target=runner.keep, args=(store, LOCAL, 0.05), daemon=True)
    keeper.start()
    eventually(lambda: len(looks) > 20)  # for longer than it may be idle
    assert keeper.is_alive()
    store.change(job, State.STOPPED, "")
    keeper.join(PATIENCE)
    assert not keeper.is_alive()


def test_a_pause_is_not_idleness(
    store: Store, job_spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended for longer than it may be idle: it looks before it leaves."""
    job = submit(store, job_spec)
    looks: list[int] = []
    seconds = itertools.count(step=1000.0)
    clock = SimpleNamespace(
        monotonic=lambda: next(seconds), sleep=time.sleep, strftime=time.strftime
    )
    monkeypatch.setattr(runner, "time", clock)

    def look(_: Store) -> None:
        looks.append(1)
        if len(looks) == 3:
            store.change(job, State.STOPPED, "")

    monkeypatch.setattr("jobs.backends.local.dispatch.dispatch", look)
    runner.keep(store, LOCAL, idle_seconds=60.0)
    assert len(looks) == 3


def test_a_bad_look_does_not_end_it(
    store: Store,
    job_spec: JobSpec,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = submit(store, job_spec)
    looks: list[int] = []

    def look(_: Store) -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError("the disk is full")
        store.change(job, State.STOPPED, "")

    monkeypatch.setattr("jobs.backends.local.dispatch.dispatch", look)
    runner.keep(store, LOCAL, idle_seconds=0.05)
    assert len(looks) == 2
    assert "OSError: the disk is full" in capsys.readouterr().out


def test_a_second_one_leaves_at_once(store: Store, job_spec: JobSpec) -> None:
    submit(store, job_spec)
    with open(store.home / "runner.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runner.keep(store, LOCAL)  # would stay for as long as the job is there


def test_it_leaves_when_the_state_directory_is_deleted(store: Store, job_spec: JobSpec) -> None:
    submit(store, job_spec)
    keeper = threading.Thread(target=runner.keep, args=(store, LOCAL, 3600.0), daemon=True)
    keeper.start()
    for path in store.home.glob("jobs.db*"):
        path.unlink(missing_ok=True)  # SQLite takes some of them away itself
    keeper.join(PATIENCE)
    assert not keeper.is_alive(), "it stays until it has been idle for long"
    assert not store.path.exists(), "it put nothing in its place"


def test_it_is_started_once_and_detached(store: Store, job_spec: JobSpec) -> None:
    store.pause(True)
    job = submit(store, job_spec)  # for which it stays
    runner.ensure(store, LOCAL)
    log = store.home / "runner.log"
    eventually(lambda: "started" in log.read_text())
    pid = int(log.read_text().split("[")[1].split("]")[0])
    found = ProcessId.of(pid)
    assert found is not None
    try:
        assert os.getsid(pid) == pid != os.getsid(0)
        runner.ensure(store, LOCAL)
        runner.ensure(store, LOCAL)
        assert log.read_text().count("started") == 1
        store.change(job, State.STOPPED, "")
        eventually(lambda: not found.alive())
        assert "exiting" in log.read_text()
    finally:
        end([found], grace=0)
