"""The supervisor in an allocation, with fake ranks: what it writes, and what Slurm then says."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.backends.slurm import commands, ranks, warden
from jobs.backends.slurm.ranks import SlurmRanks
from jobs.backends.slurm.records import (
    Allocation,
    Submission,
    outcome_file,
    read_warden_report,
    request_stop,
    warden_file,
    write_submission,
)
from jobs.backends.slurm.task import rank_environment
from jobs.backends.slurm.warden import WardenFile, supervisor_of
from jobs.errors import UserError
from jobs.queue.states import State
from jobs.run.fence import FENCE_VARIABLE, check_fence, raise_fence
from jobs.run.rundir import RunDir, read_json
from jobs.run.why_failed import why_failed
from jobs.spec.file.load import load_spec
from jobs.supervise import supervisor
from jobs.supervise.port import Attempt, Outcome, UnreachableError
from jobs.supervise.supervisor import Supervisor
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.held_ranks import has_done_more_than
from tests.support.waiting import eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from jobs.backends.slurm.keeper import Keeper
    from jobs.queue.store import Job, Store
    from tests.support.jobs.fake_slurm import FakeSlurm

    Submit = Callable[..., Job]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.01")


def begin(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, **changes: object
) -> tuple[Job, subprocess.Popen[bytes]]:
    """A job in its allocation."""
    job = submit(**changes)
    keeper.look()
    return job, slurm.start("1")


def watch(job: Job) -> tuple[Supervisor, SlurmRanks]:
    """The supervisor of a job's first allocation, in this process."""
    report = WardenFile(job.run_dir, Allocation("1"), job.attempt)
    mine = SlurmRanks(job.run_dir, Allocation("1"), report)
    return Supervisor(job.run_dir, mine, report), mine


def running(job: Job) -> bool:
    said = read_warden_report(warden_file(job.run_dir))
    return said is not None and said.state is State.RUNNING


def finished(store: Store, slurm: FakeSlurm, keeper: Keeper, job: Job) -> Job:
    """After its batch script has ended, and Slurm has said so."""
    slurm.end("1")
    keeper.look()
    return store.get(job.id)


@pytest.mark.slow
def test_a_rank_fails_and_the_step_starts_again(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that vanishes: the others are ended, and the step goes on after the checkpoint."""
    monkeypatch.setenv("FAKE_RANKS", "once save@3 1:exit@4")
    monkeypatch.setenv("FAKE_LOCKSTEP", "1")
    job, _ = begin(slurm, submit, keeper, max_restarts=1, max_train_steps=8)
    ended = finished(store, slurm, keeper, job)
    assert ended.state is State.COMPLETED, ended.reason
    log = (slurm.root / "jobs/1/log").read_text()
    assert "restart 1 of 1 after: rank 1 exited with status 7" in log
    record = read_json(job.run_dir.launch_file) or {}
    assert record["slurm"] == {"job": "1", "restart": 0}


@pytest.mark.slow
def test_a_person_stops_it_and_resumes_it(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    job, _ = begin(slurm, submit, keeper, max_train_steps=100_000)
    eventually(lambda: running(job))
    keeper.look()
    service.stop(store, job.id)
    ended = finished(store, slurm, keeper, job)
    assert ended.state is State.STOPPED
    assert "saved" in ended.reason
    assert slurm.calls("scontrol") == 0
    step = job.run_dir.latest_checkpoint()
    assert step is not None
    service.resume(store, job.id, {"max_train_steps": step[0] + 2})
    keeper.look()
    slurm.start("2")
    slurm.end("2")
    keeper.look()
    assert store.get(job.id).state is State.COMPLETED


def test_the_time_limit_saves_and_requeues(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """USR2 to the batch script alone; the same Slurm job goes on after the checkpoint."""
    job, batch = begin(slurm, submit, keeper, max_train_steps=100_000)
    eventually(lambda: running(job))
    batch.send_signal(signal.SIGUSR2)
    eventually(lambda: slurm.get("1", "state") == "PENDING")
    batch.wait()
    keeper.look()
    assert store.get(job.id).state is State.QUEUED
    assert read_warden_report(outcome_file(job.run_dir)) is None
    saved = job.run_dir.latest_checkpoint()
    assert saved is not None
    again = slurm.start("1")
    eventually(
        lambda: (said := read_warden_report(warden_file(job.run_dir))) and said.allocation.restart
    )
    eventually(lambda: running(job))
    trains = has_done_more_than(saved[0])
    eventually(lambda: trains(job.run_dir))
    service.stop(store, job.id)
    again.wait()
    slurm.set("1", "COMPLETED")
    keeper.look()
    assert store.get(job.id).state is State.STOPPED
    newest = job.run_dir.latest_checkpoint()
    assert newest is not None
    assert newest[0] > saved[0], "it went on where the first allocation had saved"


def test_scancel_is_no_reason_to_requeue(
    store: Store, slurm: FakeSlurm, submit: Submit, keeper: Keeper
) -> None:
    """SIGTERM to all: ranks save; the batch script waits for Slurm to say what it was."""
    job, batch = begin(slurm, submit, keeper, max_train_steps=100_000)
    eventually(lambda: running(job))
    batch.send_signal(signal.SIGTERM)
    eventually(
        lambda: (
            "waiting for Slurm" in (read_warden_report(warden_file(job.run_dir)) or batch).reason
        )
    )
    assert batch.poll() is None
    slurm.set("1", "CANCELLED")
    batch.wait()
    keeper.look()
    assert store.get(job.id).state is State.STOPPED
    assert slurm.calls("scontrol") == 0


def test_signals_reach_the_ranks_whatever_the_number_of_their_step(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun` in slurm_setup has taken the first numbers."""
    monkeypatch.setattr(supervisor, "STACK_DUMP_TIME", 0.0)
    hang = SimpleNamespace(reason="no step for 30 min")
    monkeypatch.setattr(supervisor, "find_hang", lambda *_: hang)
    job = submit(slurm_setup=["srun cp weights /local"])
    keeper.look()
    watcher, _ = watch(job)
    attempt = Attempt(load_spec(job.run_dir.job_file), "srun", None, None, 0, 0, 0)
    request_stop(job.run_dir, job.attempt, 2)
    watcher._carry_out_stops(attempt, [])
    watcher.stop_level = 0
    watcher._end_a_hang(attempt, [])
    assert slurm.signals() == ["--signal=TERM 1", "--signal=USR1 1"], "to all steps, not the script"


def test_no_more_steps_past_the_time_limit(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm refuses a step before it says that it ends the job: what it says then decides."""
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    _, mine = watch(job)
    waited: list[bool] = []
    monkeypatch.setattr(mine, "_await_verdict", lambda: waited.append(True))
    failed = Outcome(State.FAILED, "the launcher failed: srun: error: …", worth_retrying=True)
    for said in ("Job credential expired", "Job is pending"):
        job.run_dir.launcher_log.write_text(f"srun: error: Unable to create step: {said}\n")
        assert mine.conclude(failed) == failed
        assert waited == []
    with open(job.run_dir.launcher_log, "a") as log:
        log.write("srun: error: Unable to create step: Job/step already completing or completed\n")
    mine.conclude(failed)
    assert waited == [True]


def test_a_preemption_while_ranks_start(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot save yet, and die of the SIGTERM: what Slurm says next decides."""
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    _, mine = watch(job)
    waited: list[bool] = []
    monkeypatch.setattr(mine, "_await_verdict", lambda: waited.append(True))
    failed = Outcome(State.FAILED, "rank 0 was killed by SIGTERM while starting")
    job.run_dir.launcher_log.write_text(
        "srun: error: n1: task 0: Killed\nsrun: error: n1: task 1: Terminated\n"
    )
    mine._ended_by_us = {1}
    mine.conclude(failed)
    assert waited == [], "we sent that one"
    mine._ended_by_us = {0}
    mine.conclude(failed)
    assert waited == [True]


@pytest.mark.parametrize("knows", [True, False])
def test_slurm_gives_no_step(
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
    knows: bool,
) -> None:
    """A controller that is away, or has just come back: no failure, and no restart."""
    said = [
        "Unable to confirm allocation for job 1: Unable to contact slurm controller",
        "Unable to create step for job 1: Job credential revoked",
        "Application launch failed: Communication connection failure",
    ]
    outcomes = [Outcome(State.COMPLETED, "trained"), *[Outcome(State.FAILED, "no step")] * 3]

    def start(*args: object) -> Attempt:
        text = f"srun: error: {said.pop()}\n" if said else "srun: ranks start\n"
        job.run_dir.launcher_log.write_text(text)
        return Attempt(spec, "srun", None, None, 0, 0, 0)

    job = submit()
    spec = load_spec(job.run_dir.job_file)
    keeper.look()
    slurm.set("1", "RUNNING")
    job.run_dir.create()
    watcher, _ = watch(job)
    monkeypatch.setattr(ranks, "ASK_EVERY", 0.0)
    monkeypatch.setattr(ranks, "start_step", start)
    monkeypatch.setattr(watcher, "_watch", lambda attempt: outcomes.pop())
    if not knows:
        slurm.forget("1")
    ended = watcher._train()
    assert ended.state is (State.COMPLETED if knows else State.LOST)
    assert said == [] if knows else "no longer knows job 1" in ended.reason


@pytest.mark.parametrize("what", ["a person", "the limit", "a cancellation", "another"])
def test_a_warden_that_waits_for_slurm_beats_and_ends_when_told(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A controller that is away for an hour."""
    job = submit()
    keeper.look()
    job.run_dir.create()
    watcher, mine = watch(job)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        said = read_warden_report(warden_file(job.run_dir))
        assert said is not None
        assert said.beat == len(looks), "each look is a sign of life"
        assert said.reason == "waiting for Slurm to start the ranks"
        if len(looks) < 3:
            return
        mine.time_up = what == "the limit"
        mine.sigterm_received = what == "a cancellation"
        if what == "a person":
            request_stop(job.run_dir, job.attempt, 1)
        elif what == "another":
            raise_fence(job.run_dir.root, "1.1")

    slurm.away()
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(warden, "BEAT_EVERY", 0.0)
    attempt = Attempt(load_spec(job.run_dir.job_file), "srun", None, None, 0, 0, 0)
    monkeypatch.setattr(ranks, "start_step", lambda *args: attempt)
    monkeypatch.setattr(ranks, "was_refused", lambda run_dir: True)
    monkeypatch.setattr(watcher, "_watch", lambda attempt: Outcome(State.FAILED, "no step"))
    monkeypatch.setattr(watcher.report, "_beat", -2)
    if what == "another":
        with pytest.raises(SystemExit):
            watcher._train()
    else:
        ended = watcher._train()
        assert ended == Outcome(State.STOPPED, "stopped before the ranks started")
    assert len(looks) == 3


def test_only_an_unknown_job_is_lost(slurm: FakeSlurm) -> None:
    """What else squeue may complain of says nothing of a job."""
    assert commands.state_of("1") == ""
    for command in ("squeue", "scancel"):
        path = slurm.root / "bin" / command
        path.write_text("#!/bin/sh\necho 'error: Security violation' >&2; exit 1\n")
    with pytest.raises(UnreachableError, match="Security violation"):
        commands.state_of("1")


@pytest.mark.slow
def test_a_job_that_was_never_up_is_killed_at_its_limit(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_RANKS", "never-up ignore-stop")
    job, batch = begin(slurm, submit, keeper, slurm_requeue=False)
    eventually(lambda: len(job.run_dir.rank_statuses()) == 4)
    batch.send_signal(signal.SIGUSR2)
    eventually(lambda: job.run_dir.requested("stop"))
    service.stop(store, job.id, now=True)
    ended = finished(store, slurm, keeper, job)
    assert ended.state is State.STOPPED
    assert slurm.calls("scontrol") == 0


@pytest.mark.slow
def test_a_preemption_signals_only_the_ranks(
    store: Store,
    slurm: FakeSlurm,
    submit: Submit,
    keeper: Keeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped though nobody asked: Slurm is asked, and the job is not taken for ended."""
    monkeypatch.setenv("FAKE_LOCKSTEP", "1")
    job, batch = begin(slurm, submit, keeper, max_train_steps=100_000)
    eventually(lambda: running(job))
    for status in job.run_dir.rank_statuses():
        os.kill(status.pid, signal.SIGTERM)
    eventually(
        lambda: (
            "waiting for Slurm" in (read_warden_report(warden_file(job.run_dir)) or batch).reason
        )
    )
    assert read_warden_report(outcome_file(job.run_dir)) is None
    assert job.run_dir.latest_checkpoint() is not None
    os.killpg(batch.pid, signal.SIGKILL)
    batch.wait()
    slurm.set("1", "PENDING", restarts=1)
    keeper.look()
    assert store.get(job.id).state is State.QUEUED


def report_of(run_dir: RunDir, environment: dict[str, str]) -> WardenFile:
    report = supervisor_of(run_dir, environment).report
    assert isinstance(report, WardenFile)
    return report


def test_a_run_belongs_to_one_slurm_job(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "ours", "SLURM_RESTART_COUNT": "2"}
    assert report_of(run_dir, environment).allocation == Allocation("7", 2), "handed in by hand"
    write_submission(run_dir, Submission("ours", 1))
    assert report_of(run_dir, environment).attempt == 1, "before its id was written down"
    write_submission(run_dir, Submission("ours", 1, "8"))
    with pytest.raises(UserError, match=r"belongs to Slurm job ours \(8\)"):
        supervisor_of(run_dir, environment)
    with pytest.raises(UserError, match="not in a Slurm job"):
        supervisor_of(run_dir, {})


def test_a_checkpoint_of_an_earlier_allocation_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fence(tmp_path)
    monkeypatch.setenv(FENCE_VARIABLE, "7.0")
    check_fence(tmp_path)
    raise_fence(tmp_path, "7.0")
    check_fence(tmp_path)
    raise_fence(tmp_path, "7.1")
    with pytest.raises(UserError, match=r"allocation 7\.1 of this job has taken over from 7\.0"):
        check_fence(tmp_path)


def test_srun_decides_who_failed_first(tmp_path: Path) -> None:
    """Its `Killed` is the cause; what the others say of a lost connection follows from it."""
    run_dir = RunDir(tmp_path)
    run_dir.create()
    record = {"t": 1.0, "rank": 0, "type": "DistBackendError", "message": "Connection closed"}
    run_dir.rank_error(0).write_text(json.dumps(record | {"phase": "train", "step": 3}))
    assert "rank 0" in why_failed(run_dir, 1)
    run_dir.launcher_log.write_text("srun: error: n1: task 1: Killed\n")
    assert "rank 1" in why_failed(run_dir, 1)


def test_what_a_cut_off_node_does(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has started the job elsewhere: the old warden ends its ranks and says nothing."""
    job = submit()
    keeper.look()
    job.run_dir.create()
    watcher, mine = watch(job)
    raise_fence(job.run_dir.root, "1.1")
    killed: list[bool] = []
    monkeypatch.setattr(mine, "end_all", lambda: killed.append(True))
    child: Any = SimpleNamespace(poll=lambda: None)
    attempt = Attempt(load_spec(job.run_dir.job_file), "srun", None, child, 0, 0, 0)
    with pytest.raises(SystemExit):
        watcher._watch(attempt)
    assert killed == [True]
    assert read_warden_report(warden_file(job.run_dir)) is None


def test_a_task_becomes_a_rank() -> None:
    task = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NODEID": "1",
        "SLURM_CPUS_ON_NODE": "32",
        "FSDP_TUI_LOCAL_RANKS": "4",
        "PMI_RANK": "5",
        "MASTER_ADDR": "node1",
    }
    rank = rank_environment(task)
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert rank.items() >= (wanted | {"OMP_NUM_THREADS": "8", "MASTER_ADDR": "node1"}).items()
    assert "PMI_RANK" not in rank
    with pytest.raises(KeyError):
        rank_environment({})


def test_a_full_disk_at_the_time_limit_still_requeues(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be said is said later; the job file may be unreadable by then, too."""
    job = submit()
    keeper.look()
    slurm.set("1", "RUNNING")
    job.run_dir.create()
    _, mine = watch(job)
    mine._attempt = Attempt(load_spec(job.run_dir.job_file), "srun", None, None, 0, 0, 0)
    mine.time_up = True
    save_checkpoint(job.run_dir, 3)
    job.run_dir.job_file.unlink()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(warden, "write_warden_report", fail)
    monkeypatch.setattr(mine, "_await_verdict", lambda: True)
    ended = mine.conclude(Outcome(State.STOPPED, "stopped at step 3, saved"))
    assert ended == Outcome(State.STOPPED, "time limit; stopped at step 3, saved")
    assert slurm.calls("scontrol requeue") == 1


def test_an_allocation_that_was_replaced_ends_without_a_word(
    slurm: FakeSlurm, submit: Submit, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have ended; what the newer allocation writes is not its own to remove."""
    job = submit()
    keeper.look()
    job.run_dir.create()
    watcher, _ = watch(job)
    unfinished = job.run_dir.checkpoints / ".step-9.tmp"
    unfinished.mkdir(parents=True)
    monkeypatch.setattr(watcher, "_train", lambda: Outcome(State.COMPLETED, "trained"))
    raise_fence(job.run_dir.root, "1.1")
    with pytest.raises(SystemExit):
        watcher.run()
    assert unfinished.exists()
    assert read_warden_report(outcome_file(job.run_dir)) is None
