"""Who may judge a job's processes: those of the same kernel and pid namespace, and nobody else."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from jobs import service
from jobs.backends.local import ranks as attempt
from jobs.backends.local.dispatch import dispatch, needs_attention
from jobs.backends.local.ranks import launch
from jobs.errors import UserError
from jobs.machine import processes, procfs, residence
from jobs.machine.processes import ProcessId
from jobs.machine.residence import Residence, Standing, read_residence, standing_of
from jobs.queue.states import State
from jobs.queue.store import Terms
from jobs.run.rundir import RankStatus, RunDir, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.job import Job
    from jobs.queue.store import Store

ME = Residence("boot1", "4026531836", "box1", "machine1")
OTHERS = {
    "another container": ME._replace(namespace="4026532999"),
    "another container with a name of its own": ME._replace(namespace="4026532999", host="a1b2"),
    "another machine": Residence("boot2", "4026531836", "box2", "machine2"),
    "another machine of the same name": Residence("boot2", "4026531836", "box1", "machine2"),
    "another machine without an id": Residence("boot2", "4026531836", "box1", ""),
}


@pytest.mark.parametrize(
    ("recorded", "shared", "standing"),
    [
        (str(ME), False, Standing.HERE),
        (str(ME), True, Standing.HERE),
        ("", True, Standing.HERE),
        ("boot1", True, Standing.HERE),
        ("boot1@box9", True, Standing.HERE),
        (str(ME._replace(host="renamed")), True, Standing.HERE),
        *((str(other), True, Standing.ELSEWHERE) for other in OTHERS.values()),
        (str(OTHERS["another container"]), False, Standing.ELSEWHERE),
        (str(ME._replace(boot="boot0")), True, Standing.REBOOTED),
        (str(ME._replace(boot="boot0")), False, Standing.REBOOTED),
        ("boot0", False, Standing.REBOOTED),
        (str(Residence("boot0", "4026532999", "a1b2")), False, Standing.REBOOTED),
        ("boot0@box1", True, Standing.ELSEWHERE),
        (str(ME._replace(boot="", host="box2")), True, Standing.ELSEWHERE),
        (str(ME._replace(boot="")), True, Standing.HERE),
    ],
)
def test_what_processes_of_a_residence_are(
    recorded: str,
    shared: bool,
    standing: Standing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residence, "residence", lambda: ME)
    monkeypatch.setattr(residence, "is_shared", lambda path: shared)
    assert standing_of(recorded, tmp_path) is standing


def test_a_residence_is_read_as_it_was_written() -> None:
    for one in (ME, *OTHERS.values(), Residence(), residence.residence()):
        assert read_residence(str(one)) == one


def leave(
    store: Store, monkeypatch: pytest.MonkeyPatch, other: Residence, *, shared: bool = True
) -> Job:
    """A job that runs at `other`, seen from `ME`; its supervisor's pid is nobody's here."""
    monkeypatch.setattr(residence, "is_shared", lambda path: shared)
    monkeypatch.setattr("jobs.queue.store.residence", lambda: other)
    terms = Terms(ranks=1, wanted=None, total_steps=9)
    job = store.add(name="j", terms=terms, run_id="x", prepare=RunDir.create)
    assert store.claim(job.id, [], "starting")
    store.take_over(job.id, None, ProcessId(2**22 + 7, 5.0))
    store.change(job.id, State.RUNNING, "all ranks are up")
    monkeypatch.setattr(residence, "residence", lambda: ME)
    return store.get(job.id)


def beat(run_dir: RunDir, heartbeat: float) -> None:
    status = RankStatus(0, 7, 1.0, "h", "cpu", "train", 3, heartbeat=heartbeat, progressed=1.0)
    write_atomic(run_dir.ranks / "0.json", status.to_json())


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_nobody_judges_a_job_that_lives_elsewhere(
    other: Residence, store: Store, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as lost, to a reboot or to pids of ours; nor is it supervised, resumed or removed."""
    job = leave(store, monkeypatch, other)
    for _ in range(3):
        dispatch(store)
    assert not needs_attention(store)
    assert started == []
    now = store.get(job.id)
    assert now.state is State.RUNNING
    assert now.elsewhere == other.host
    assert now.reason == f"runs in another container or machine ({other.host})"
    with pytest.raises(UserError):
        service.resume(store, job.id)
    with pytest.raises(UserError):
        service.remove(store, job.id)
    assert "carries that out" in service.stop(store, job.id)
    assert store.get(job.id).state is State.RUNNING, "it is stopped where it runs"
    assert store.get(job.id).stop_level == 1


def test_a_person_may_give_up_a_job_whose_ranks_are_silent(
    store: Store, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = leave(store, monkeypatch, OTHERS["another container"])
    now = iter(range(10**6))
    statuses = lambda self: [  # noqa: E731
        RankStatus(0, 7, 1.0, "h", "cpu", "train", 3, heartbeat=float(next(now)), progressed=1.0)
    ]
    with monkeypatch.context() as alive:
        alive.setattr(RunDir, "rank_statuses", statuses)
        assert "is killed" in service.stop(store, job.id, now=True)
    assert store.get(job.id).state is State.RUNNING
    monkeypatch.setattr(attempt, "_BEAT_WINDOW", 0.0)
    assert "none of its ranks responds" in service.stop(store, job.id, now=True)
    assert store.get(job.id).state is State.LOST


def test_nothing_starts_beside_ranks_that_live_elsewhere(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = leave(store, monkeypatch, OTHERS["another container"])
    write_atomic(job.run_dir.launch_file, f'{{"residence": "{OTHERS["another container"]}"}}')
    monkeypatch.setattr(attempt, "beats", lambda run_dir: True)
    with pytest.raises(UserError, match="its ranks still run in another container or machine"):
        launch(job)


def test_a_rank_that_writes_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    beat(run_dir, 1.0)
    now, beating = 0.0, True

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if beating:
            beat(run_dir, now)

    monkeypatch.setattr(attempt, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert attempt.beats(run_dir)
    beating = False
    assert not attempt.beats(run_dir)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ENOMEM])
def test_what_the_kernel_does_not_say_is_not_gone(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(procfs, "open", refuse, raising=False)
    assert me.alive()
    assert not me.is_dead()
    assert not me.suspended()
    assert processes.wait_gone([me], 0.0) == [me]
    monkeypatch.setattr(processes, "open", refuse, raising=False)
    if number == errno.EACCES:  # another person's process
        assert processes.with_run_id("x") == []
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            processes.with_run_id("x")
