"""The life of a job with the real supervisor, and everything that may be killed on the way.

Launcher and ranks are light fakes (`tests/support/jobs/fakes`). Whatever happens, the state that is
shown is true, and no process of the run is left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.errors import StateError
from jobs.machine.processes import RUN_ID_VARIABLE, with_run_id
from jobs.queue.job_list import kept_progress
from jobs.queue.states import State
from jobs.run.eventlog import EventLog
from jobs.run.failure import Cause, Failure, read_failure
from jobs.run.rundir import read_json
from tests.support.jobs.fakes.supervise import start_supervisor
from tests.support.jobs.lab import ENDLESS, opened
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobs.queue.store import Store
    from tests.support.jobs.lab import Lab


AGES = "3600"  # seconds


@pytest.fixture
def lab(
    store: Store,
    job_values: dict[str, Any],
    no_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lab]:
    with opened(store, job_values, monkeypatch, tmp_path / "gates") as made:
        yield made


# -- ordinary lives ------------------------------------------------------------------------


def test_a_job_completes(lab: Lab) -> None:
    go_on = lab.hold(3)
    (lab.gates / "start").unlink()
    job = lab.submit(max_train_steps=6)
    assert job.state is State.STARTING
    (lab.gates / "start").touch()
    lab.wait(job, State.RUNNING)
    go_on.touch()
    job = lab.wait(job, State.COMPLETED)
    assert job.reason == "trained 6 steps"
    eventually(lambda: kept_progress(lab.store).get(job.id))
    assert kept_progress(lab.store)[job.id] == (job.ended, service.progress(job))
    assert lab.path(job) == ["queued", "starting", "running", "completed"]
    assert job.run_dir.latest_checkpoint() == (6, job.run_dir.checkpoint(6))
    assert with_run_id(job.run_id) == [], "the state is true the moment it is shown"
    assert " completed: trained 6 steps\n" in job.run_dir.supervisor_log.read_text()
    record = read_json(job.run_dir.launch_file)
    assert record is not None
    assert record["environment"][RUN_ID_VARIABLE] == job.run_id
    assert record["versions"]["python"] == sys.version.split()[0]


def test_all_of_it_is_detached_and_apart(lab: Lab) -> None:
    """Nothing hangs on this process or its terminal, and each rank leads a session."""
    job = lab.running()
    processes = [
        lab.supervisor(job),
        lab.launcher(job),
        lab.rank(job, 0),
        lab.rank(job, 1),
    ]
    sessions = {os.getsid(process.pid) for process in processes}
    assert len(sessions) == 4
    assert os.getsid(0) not in sessions
    assert set(with_run_id(job.run_id)) == set(processes[1:])
    service.stop(lab.store, job.id, now=True)
    lab.wait(job, State.STOPPED)


def test_a_save_is_shown(lab: Lab) -> None:
    lab.hold(3).touch()
    (lab.gates / "save").unlink()
    job = lab.submit()
    lab.wait(job, State.SAVING)
    (lab.gates / "save").touch()
    lab.wait(job, State.COMPLETED)


def test_the_next_in_the_queue_starts_by_itself(lab: Lab) -> None:
    """Nobody looks meanwhile: the supervisor that leaves starts the next."""
    go_on = lab.hold(3)
    first, second = lab.submit(), lab.submit()
    assert second.state is State.QUEUED
    assert second.reason == f"waiting for job {first.id} to free the CPU"
    go_on.touch()
    second = lab.wait(second, State.COMPLETED)
    first = lab.get(first)
    assert first.state is State.COMPLETED
    assert first.ended is not None
    assert second.started is not None
    assert first.ended <= second.started


# -- stopping ------------------------------------------------------------------------------


def test_a_stop_saves_and_ends_as_soon_as_the_ranks_do(lab: Lab) -> None:
    """It waits for no grace: each of those here is longer than anyone waits for this test."""
    lab.set(term_grace=AGES, failure_grace=AGES)
    job = lab.running(stop_grace_seconds=float(AGES))
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    assert "SIGTERM" not in job.run_dir.supervisor_log.read_text()
    newest = job.run_dir.latest_checkpoint()
    assert newest is not None
    assert job.reason == f"stopped at step {newest[0]}, saved"
    assert lab.path(job) == ["queued", "starting", "running", "stopping", "stopped"]
    assert not job.run_dir.requested("stop")


def test_resume_goes_on_at_the_next_step(lab: Lab) -> None:
    job = lab.running()
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    newest = job.run_dir.latest_checkpoint()
    assert newest is not None
    target = newest[0] + 4
    service.resume(lab.store, job.id, {"max_train_steps": str(target)})
    job = lab.wait(job, State.COMPLETED)
    assert job.attempt == 1
    steps = [record.step for record in EventLog(job.run_dir.events).read_all().steps]
    assert steps == list(range(1, target + 1))
    starts = [
        json.loads(line)["step"]
        for line in job.run_dir.events.read_text().splitlines()
        if '"start"' in line
    ]
    assert starts == [0, newest[0]]


def test_a_resume_on_more_ranks_runs(lab: Lab) -> None:
    job = lab.running()
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPED)
    service.resume(lab.store, job.id, {"num_processes": "3"})
    job = lab.wait(job, State.RUNNING)
    lab.wait_for_ranks(job, 3)
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPED)


def test_stop_twice_sends_sigterm(lab: Lab) -> None:
    lab.set(ranks="ignore-stop")
    job = lab.running()
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPING)
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    assert "saved" in job.reason, "SIGTERM asks for the same as the request file"
    assert "SIGTERM to" in job.run_dir.supervisor_log.read_text()


def test_ranks_that_sigterm_ends_at_once_are_stopped_without_a_save(lab: Lab) -> None:
    lab.set(ranks="ignore-stop die-on-term")
    job = lab.running()
    for _ in range(2):
        service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    assert job.reason == "ended by SIGTERM; no checkpoint"


def test_stop_three_times_kills_what_does_not_listen(lab: Lab) -> None:
    lab.set(ranks="ignore-stop ignore-term")
    job = lab.running()
    log = job.run_dir.supervisor_log
    for said in ("stops after the current step", "SIGTERM to"):
        service.stop(lab.store, job.id)
        eventually(lambda said=said: said in log.read_text())  # type: ignore[misc]
        assert lab.get(job).state is State.STOPPING
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    assert job.reason == "ended by SIGKILL; no checkpoint"


def test_stop_now_kills_at_once(lab: Lab) -> None:
    lab.set(ranks="ignore-stop ignore-term", term_grace=AGES)
    job = lab.running(stop_grace_seconds=float(AGES))
    service.stop(lab.store, job.id, now=True)
    job = lab.wait(job, State.STOPPED)
    assert job.reason == "ended by SIGKILL; no checkpoint"
    assert "SIGTERM" not in job.run_dir.supervisor_log.read_text()


def test_a_stop_that_takes_too_long_becomes_firmer_by_itself(lab: Lab) -> None:
    lab.set(ranks="ignore-stop ignore-term", term_grace="0.2")
    job = lab.running(stop_grace_seconds=0.2)
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    log = job.run_dir.supervisor_log.read_text()
    assert log.index("SIGTERM to") < log.index("SIGKILL to")


@pytest.mark.parametrize("words", ["never-up", "never-up imports"])
def test_a_job_that_is_not_up_yet_can_be_stopped(lab: Lab, words: str) -> None:
    lab.set(ranks=words)
    job = lab.submit(stop_grace_seconds=0.2)
    lab.wait_for_ranks(job, 2)
    assert lab.get(job).state is State.STARTING
    service.stop(lab.store, job.id, now=True)
    assert lab.wait(job, State.STOPPED).reason.startswith("ended by SIGKILL")
    assert "all ranks are up" not in job.run_dir.supervisor_log.read_text()


def test_a_stop_that_comes_before_the_supervisor_is_kept(lab: Lab) -> None:
    job = lab.submit_unsupervised(max_train_steps=ENDLESS)
    service.stop(lab.store, job.id)
    start_supervisor(job)
    assert lab.wait(job, State.STOPPED).stop_level == 1


def test_a_stopped_job_makes_room_for_the_next(lab: Lab) -> None:
    job = lab.running()
    following = lab.submit()
    service.stop(lab.store, job.id)
    lab.wait(following, State.COMPLETED)
    assert lab.get(job).state is State.STOPPED


# -- failures ------------------------------------------------------------------------------


def test_a_rank_that_fails_says_why(lab: Lab) -> None:
    lab.set(ranks="1:crash@2", failure_grace="0")
    job = lab.wait(lab.submit(max_train_steps=ENDLESS), State.FAILED)
    assert job.reason == "rank 1 failed at step 2 during train: ValueError: a bad day"


def test_a_rank_that_exits_without_a_word_is_named(lab: Lab) -> None:
    lab.set(ranks="1:exit@2", failure_grace="0")
    job = lab.wait(lab.submit(max_train_steps=ENDLESS), State.FAILED)
    # The newest step that any rank has said: the other one, which waits for nobody here, goes on.
    assert re.fullmatch(
        r"rank 1 exited with status 7 at step \d+ during train; its log ends with: so long",
        job.reason,
    )


def test_a_rank_that_leaves_as_if_all_were_well_is_a_failure(lab: Lab) -> None:
    lab.set(ranks="leave@2")
    job = lab.wait(lab.submit(max_train_steps=ENDLESS, num_processes=1), State.FAILED)
    assert "without a reason" in job.reason


def test_a_rank_that_leaves_the_others_waiting_is_named(lab: Lab) -> None:
    lab.set(ranks="0:leave@2", failure_grace="0")
    job = lab.wait(lab.submit(max_train_steps=ENDLESS), State.FAILED)
    assert "rank 0" in job.reason
    assert "rank 1 was killed" not in job.reason, "that was us"


def test_a_launcher_that_refuses_is_quoted(lab: Lab) -> None:
    lab.set(launcher="refuse")
    job = lab.wait(lab.submit(), State.FAILED)
    assert job.reason == "the launcher failed: error: no such option: --fsdp_versoin"


def test_a_description_that_became_wrong_meanwhile_fails_the_job(lab: Lab) -> None:
    job = lab.submit_unsupervised()
    job.run_dir.job_file.write_text("learning_rat: 1\n")
    start_supervisor(job)
    job = lab.wait(job, State.FAILED)
    assert "could not start" in job.reason
    assert "learning_rat" in job.reason


def test_an_error_that_nobody_thought_of_fails_the_job(lab: Lab) -> None:
    """Else its supervisor is replaced, and fails in the same way, for ever."""
    lab.set(trouble="build")
    job = lab.submit()
    job = lab.wait(job, State.FAILED, look=True)
    assert "an error that nobody thought of" in job.reason
    log = job.run_dir.supervisor_log.read_text()
    assert "Traceback (most recent call last):" in log
    assert ", in build\n" in log, "whoever mends it learns where it was"


def test_trouble_with_the_housekeeping_does_not_end_the_job(lab: Lab) -> None:
    """A full disk, say; at the very least no rank may be left behind."""
    lab.set(trouble="housekeeping", step_seconds="0.1")
    job = lab.wait(lab.submit(), State.COMPLETED)
    assert with_run_id(job.run_id) == []


def deleted(directory: Path) -> bool:
    """Whether a directory is gone after a try to delete it, while others may be writing into it."""
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def test_a_run_directory_that_was_deleted_leaves_no_process(lab: Lab) -> None:
    lab.set(ranks="freeze@2")
    job = lab.running()
    eventually(lambda: deleted(job.run_dir.root))
    with suppress(StateError):  # it may have ended by itself
        service.stop(lab.store, job.id, now=True)
    eventually(lambda: lab.get(job).state.ended)
    assert with_run_id(job.run_id) == []


def test_a_job_starts_again_after_a_failure_as_often_as_it_asks(lab: Lab) -> None:
    lab.set(ranks="1:crash@2", failure_grace="0", lockstep="1")  # both have said that they train
    job = lab.wait(lab.submit(max_train_steps=9, max_restarts=1), State.FAILED)
    assert "a bad day" in job.reason
    assert "checkpoint" not in job.reason, "no healthy ranks lost their launcher"
    assert lab.path(job) == [
        "queued",
        "starting",
        "running",
        "starting",
        "running",
        "failed",
    ]
    assert any(reason.startswith("restart 1 of 1 after: rank 1") for reason in lab.reasons(job))


def test_a_job_that_starts_again_goes_on_after_its_newest_checkpoint(lab: Lab) -> None:
    lab.set(ranks="save@2 1:crash@4 once", failure_grace="0", lockstep="1")
    job = lab.wait(lab.submit(max_train_steps=6, max_restarts=3), State.COMPLETED)
    assert lab.path(job).count("starting") == 2, "the other restarts were not needed"
    log = job.run_dir.rank_log(0).read_text()
    assert log.count("starting after step") == 2
    assert "starting after step 2" in log
    steps = [record.step for record in EventLog(job.run_dir.events).read_all().steps]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_job_that_stands_still_is_ended(lab: Lab) -> None:
    lab.set(ranks="hang@2")
    job = lab.submit(max_train_steps=ENDLESS, hang_timeout=4)
    job = lab.wait(job, State.FAILED)
    assert job.reason.startswith("hang: ")
    assert job.reason.endswith("stacks are in logs/rank*.log")
    assert read_failure(job.run_dir) == Failure(job.reason, Cause.HANG)


# -- kills ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_is_killed(lab: Lab, number: int) -> None:
    lab.set(failure_grace="0")
    job = lab.running()
    lab.kill(lab.rank(job, number))
    job = lab.wait(job, State.FAILED)
    assert job.reason.startswith(f"rank {number} was killed by SIGKILL at step ")
    assert read_failure(job.run_dir) == Failure(job.reason, Cause.KILLED, number)


def test_the_launcher_is_killed(lab: Lab) -> None:
    """Its ranks are orphans then, alive and holding their memory; they save and leave."""
    job = lab.running()
    lab.kill(lab.launcher(job))
    job = lab.wait(job, State.FAILED)
    newest = job.run_dir.latest_checkpoint()
    assert newest is not None
    assert "the launcher was killed by SIGKILL" in job.reason
    assert f"resume continues after step {newest[0]}" in job.reason


def test_the_launcher_is_killed_and_its_ranks_do_not_listen(lab: Lab) -> None:
    lab.set(ranks="ignore-term", term_grace="0.2")
    job = lab.running()
    lab.kill(lab.launcher(job))
    job = lab.wait(job, State.FAILED)
    assert "the launcher was killed by SIGKILL" in job.reason
    assert with_run_id(job.run_id) == []


def test_the_supervisor_is_killed_and_the_job_completes(lab: Lab) -> None:
    go_on = lab.hold(3)
    job = lab.submit(max_train_steps=12)
    lab.wait(job, State.RUNNING)
    before = lab.supervisor(job), lab.launcher(job), lab.rank(job, 1)
    lab.kill(before[0])
    service.refresh(lab.store)
    eventually(lambda: lab.supervisor(job) != before[0])
    assert lab.launcher(job) == before[1]
    assert lab.rank(job, 1) == before[2], "the ranks did not notice"
    go_on.touch()
    job = lab.wait(job, State.COMPLETED)
    assert job.reason == "trained 12 steps"
    assert "took over" in job.run_dir.supervisor_log.read_text()


def test_the_supervisor_is_killed_and_nobody_looks_until_the_end(lab: Lab) -> None:
    go_on = lab.hold(3)
    job = lab.submit(max_train_steps=8)
    lab.wait(job, State.RUNNING)
    lab.kill(lab.supervisor(job))
    go_on.touch()
    eventually(lambda: not with_run_id(job.run_id))
    assert lab.get(job).state is State.RUNNING, "nobody knows better yet"
    job = lab.wait(job, State.COMPLETED, look=True)
    assert job.reason == "trained 8 steps"


def test_the_supervisor_is_killed_and_the_job_can_be_stopped(lab: Lab) -> None:
    job = lab.running()
    lab.kill(lab.supervisor(job))
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    assert "saved" in job.reason


def test_the_supervisor_is_killed_after_a_stop_was_asked_for(lab: Lab) -> None:
    """The ranks obey and leave before anyone looks: the job was stopped, as asked."""
    job = lab.running()
    lab.kill(lab.supervisor(job), number=signal.SIGSTOP)
    lab.store.raise_stop_level(job.id, 1)
    job.run_dir.request("stop")
    lab.kill(lab.supervisor(job))
    eventually(lambda: not with_run_id(job.run_id))
    job = lab.wait(job, State.STOPPED, look=True)
    assert "saved" in job.reason


def test_supervisor_and_rank_are_killed(lab: Lab) -> None:
    lab.set(failure_grace="0")
    job = lab.running()
    lab.kill(lab.supervisor(job), lab.rank(job, 1))
    job = lab.wait(job, State.FAILED, State.LOST, look=True)
    assert "rank 1 was killed by SIGKILL" in job.reason, "its launcher said so"


def test_supervisor_and_launcher_are_killed(lab: Lab) -> None:
    """The ranks live on, without anyone above them."""
    job = lab.running()
    lab.kill(lab.supervisor(job), lab.launcher(job))
    assert len(with_run_id(job.run_id)) == 2
    job = lab.wait(job, State.FAILED, State.LOST, State.STOPPED, look=True)
    assert job.state is not State.STOPPED, "nobody asked for that"
    newest = job.run_dir.latest_checkpoint()
    assert newest is not None, "they saved"
    assert f"resume continues after step {newest[0]}" in job.reason
    assert with_run_id(job.run_id) == []


def test_supervisor_and_launcher_are_killed_and_the_rest_is_stopped_now(lab: Lab) -> None:
    """Without a grace: the one that ranks get here is longer than anyone waits for this test."""
    lab.set(ranks="ignore-stop ignore-term", term_grace=AGES)
    job = lab.running(stop_grace_seconds=float(AGES))
    lab.kill(lab.supervisor(job), lab.launcher(job))
    service.stop(lab.store, job.id, now=True)
    job = lab.wait(job, State.STOPPED, look=True)
    assert job.reason.startswith("ended by SIGKILL")


def test_everything_is_killed(lab: Lab) -> None:
    job = lab.running()
    lab.kill_everything(job)
    job = lab.wait(job, State.LOST, look=True)
    assert job.reason == "all processes were killed; no checkpoint"
    again = service.resume(lab.store, job.id, {"max_train_steps": "3"})
    assert lab.wait(again, State.COMPLETED).attempt == 1


def test_everything_is_killed_before_the_ranks_are_up(lab: Lab) -> None:
    lab.set(ranks="never-up")
    job = lab.submit()
    lab.wait_for_ranks(job, 2)
    lab.kill_everything(job)
    assert lab.wait(job, State.LOST, State.FAILED, look=True).ended is not None


def test_everything_is_killed_after_the_last_word(lab: Lab) -> None:
    """What is done is done: the event stream says so."""
    go_on = lab.hold(3)
    job = lab.submit(max_train_steps=4)
    lab.wait(job, State.RUNNING)
    lab.kill(lab.supervisor(job), number=signal.SIGSTOP)
    go_on.touch()
    eventually(lambda: EventLog(job.run_dir.events).read_all().end_reason == "completed")
    for process in with_run_id(job.run_id):
        process.signal(signal.SIGKILL)  # unless it has left by itself
    lab.kill(lab.supervisor(job))
    eventually(lambda: not with_run_id(job.run_id))
    assert lab.wait(job, State.COMPLETED, look=True).reason == "trained 4 steps"


def test_the_machine_was_restarted(lab: Lab) -> None:
    job = lab.running()
    waiting = lab.submit(max_train_steps=3)
    lab.kill_everything(job)
    lab.monkeypatch.setattr("jobs.machine.residence.boot_id", lambda: "another-boot")
    service.refresh(lab.store)
    job = lab.get(job)
    assert (job.state, job.reason) == (State.LOST, "the machine rebooted")
    lab.wait(waiting, State.COMPLETED)


def test_a_job_that_was_killed_makes_room_for_the_next(lab: Lab) -> None:
    job = lab.running()
    waiting = lab.submit(max_train_steps=3)
    lab.kill_everything(job)
    lab.wait(waiting, State.COMPLETED, look=True)
    assert lab.get(job).state is State.LOST


def test_a_closed_terminal_and_ctrl_c_reach_nothing(lab: Lab) -> None:
    job = lab.running()
    supervisor, step = lab.supervisor(job), lab.step(job)
    for number in (signal.SIGHUP, signal.SIGINT):
        lab.kill(supervisor, number=number)
    lab.wait_for_step(job, step + 2)
    assert supervisor.alive()
    assert lab.supervisor(job) == supervisor
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPED)


def test_of_many_supervisors_one_launches(lab: Lab) -> None:
    job = lab.submit_unsupervised()
    for _ in range(4):
        start_supervisor(job)
    job = lab.wait(job, State.COMPLETED)
    assert job.run_dir.supervisor_log.read_text().count(" launched ") == 1
    assert job.run_dir.events.read_text().count('"start"') == 1


def test_of_many_that_look_at_an_orphaned_job_one_adopts_it(lab: Lab) -> None:
    job = lab.running()
    lab.kill(lab.supervisor(job))
    for _ in range(4):
        service.refresh(lab.store)
    service.stop(lab.store, job.id)
    job = lab.wait(job, State.STOPPED)
    assert job.run_dir.supervisor_log.read_text().count("took over") == 1


def test_what_a_launch_cut_short_left_behind_is_ended_first(lab: Lab) -> None:
    """A supervisor that is killed between the launch and its record of it."""
    job = lab.submit_unsupervised(max_train_steps=4)
    stray = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"],
        env=os.environ | {RUN_ID_VARIABLE: job.run_id},
        start_new_session=True,
    )
    start_supervisor(job)
    assert stray.wait(PATIENCE) == -signal.SIGKILL
    lab.wait(job, State.COMPLETED)


def test_a_record_of_another_run_is_not_taken_for_this_one(lab: Lab) -> None:
    """A run directory that outlived its database: `launch.json` names processes long gone."""
    job = lab.submit_unsupervised(max_train_steps=4)
    old = {
        "attempt": 0,
        "restarts": 0,
        "command": ["x"],
        "environment": {RUN_ID_VARIABLE: "other"},
        "ranks": 2,
        "grace": 1.0,
        "events_offset": 0,
        "launcher": [os.getpid(), 1000.0],
    }
    job.run_dir.launch_file.write_text(json.dumps(old))
    start_supervisor(job)
    lab.wait(job, State.COMPLETED)


# -- a supervisor that is suspended --------------------------------------------------------


def test_ranks_that_are_gone_are_not_shown_as_running_because_nobody_looks(lab: Lab) -> None:
    job = lab.running()
    assert lab.supervisor(job).signal(signal.SIGSTOP)
    lab.kill(*with_run_id(job.run_id))
    assert lab.get(job).state is State.RUNNING
    job = lab.wait(job, State.FAILED, State.LOST, look=True)


def test_a_suspended_supervisor_is_told_of_and_the_job_is_stopped_without_it(lab: Lab) -> None:
    job = lab.running()
    first = lab.supervisor(job)
    assert first.signal(signal.SIGSTOP)
    eventually(first.suspended)
    service.refresh(lab.store)
    suspended = f"its supervisor (process {first.pid}) is suspended and does not respond"
    said = f"{suspended}; its ranks keep running"
    assert lab.get(job).reason == said
    assert first.signal(signal.SIGCONT)
    eventually(lambda: not first.suspended())
    service.refresh(lab.store)
    assert lab.get(job).reason == "all ranks are up"
    assert first.signal(signal.SIGSTOP)
    eventually(first.suspended)
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPED)
    assert not first.alive()


def test_what_was_said_of_a_suspended_supervisor_goes_with_it(lab: Lab) -> None:
    job = lab.running()
    first = lab.supervisor(job)
    assert first.signal(signal.SIGSTOP)
    eventually(first.suspended)
    service.refresh(lab.store)
    assert "is suspended" in lab.get(job).reason
    assert first.signal(signal.SIGKILL)
    eventually(lambda: not first.alive())
    service.refresh(lab.store)
    eventually(lambda: lab.get(job).reason == "all ranks are up")
    assert lab.supervisor(job) != first
    service.stop(lab.store, job.id)
    lab.wait(job, State.STOPPED)


def test_a_start_that_someone_ended_is_told_as_what_it_was(lab: Lab) -> None:
    lab.set(ranks="never-up die-on-term")
    job = lab.submit()
    lab.wait_for_ranks(job, 2)
    launcher = lab.launcher(job)
    lab.supervisor(job).signal(signal.SIGTERM)
    assert launcher.signal(signal.SIGTERM)
    eventually(lambda: not launcher.alive())
    job = lab.wait(job, State.LOST, look=True)
    said = "someone sent SIGTERM to the launcher, which ended the ranks; no checkpoint"
    assert job.reason == said


def test_a_stop_that_nobody_asked_for_is_told_as_what_it_was(lab: Lab) -> None:
    job = lab.running()
    launcher = lab.launcher(job)
    lab.supervisor(job).signal(signal.SIGTERM)
    assert launcher.signal(signal.SIGTERM)
    job = lab.wait(job, State.STOPPED, look=True)
    assert job.reason.startswith("someone sent SIGTERM to the launcher; stopped at step ")
