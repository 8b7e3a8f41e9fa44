"""A damaged jobs database is a sentence, and is made again without the loss of a job."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.queue.tables import trouble
from jobs.run.rundir import event
from jobs.service.repair import repair
from jobs.spec.file.load import dump_spec, load_spec
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.made_up_runs import add_job, append_events, nothing_starts
from tests.support.tui.shell import Shell

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Job

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.fixture
def jobs(
    store: Store, job_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Job]:
    """One of each end, by its state."""
    nothing_starts(monkeypatch)
    text = dump_spec(load_spec(None, job_values | {"max_train_steps": 40, "priority": 3}))
    made = {}
    for state in (State.COMPLETED, State.STOPPED, State.FAILED, State.LOST, State.QUEUED):
        job = made[str(state)] = add_job(store, str(state), state=state, job_file=text)
        if state is State.QUEUED:
            continue
        record = {"run_id": job.run_id, "attempt": 0, "started": 5.0, "gpus": ["GPU-1"]}
        job.run_dir.launch_file.write_text(json.dumps(record))
        if state in (State.COMPLETED, State.STOPPED):
            append_events(job, event("end", reason=str(state)))
            save_checkpoint(job.run_dir, 7)
        if state is State.FAILED:
            error = {"type": "ValueError", "message": "no", "t": 1.0, "step": 7, "phase": "train"}
            (job.run_dir.ranks / "1.error.json").write_text(json.dumps(error))
    return made


def damage(path: Path, how: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "other":
        path.write_bytes(b"this is no database\n" * 1000)
    elif how == "header":
        with open(path, "r+b") as file:
            file.write(b"\xff" * 4096)
    else:
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))


@pytest.mark.parametrize("how", ["gone", "empty", "other", "header", "pages"])
def test_no_job_is_lost_with_the_database(store: Store, jobs: dict[str, Job], how: str) -> None:
    damage(store.path, how)
    was = store.path.read_bytes() if store.path.exists() else None
    done = repair(store.home)
    assert done.restored == tuple(job.id for job in jobs.values())
    assert done.kept is not None
    assert (done.kept.read_bytes() if done.kept.exists() else None) == was, "the old one is kept"
    again = Store(store.home)
    for name, job in jobs.items():
        found = again.get(job.id)
        assert (found.name, str(found.state), found.run_dir) == (name, name, job.run_dir)
        assert (found.ranks, found.total_steps, found.priority) == (2, 40, 3)
        assert found.run_id == job.run_id or name == "queued"
        assert found.held is (name == "queued")
        assert again.history(job.id)[-1].reason.startswith("restored: ")
    assert again.get(3).reason == "rank 1 failed at step 7 during train: ValueError: no"
    assert add_job(again, "next").id == len(jobs) + 1
    assert repair(store.home).kept is None, "it is sound now"


def test_rows_that_can_be_read_are_taken_as_they_are(store: Store, jobs: dict[str, Job]) -> None:
    before = {job.id: job for job in store.all()}
    history = store.history(2)
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE jobs SET state='junk' WHERE id=1")
        db.execute("DROP TABLE claims")
    done = repair(store.home)
    assert done.read == (2, 3, 4, 5)
    assert done.restored == (1,)
    again = Store(store.home)
    assert {job.id: job for job in again.all() if job.id > 1} == {
        number: job for number, job in before.items() if number > 1
    }
    assert again.history(2) == history


def test_a_job_that_runs_is_found_by_its_processes(store: Store, jobs: dict[str, Job]) -> None:
    job = jobs["lost"]
    environment = os.environ | {"FSDP_TUI_RUN_ID": job.run_id}
    code = "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        damage(store.path, "other")
        repair(store.home)
        found = Store(store.home).get(job.id)
        assert (found.state, found.gpus, found.supervisor) == (State.RUNNING, ["GPU-1"], None)
        assert Store(store.home).claims() == {"GPU-1": job.id}
        rank.kill()


def test_the_command_line_says_what_to_do(
    store: Store,
    jobs: dict[str, Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell = Shell(monkeypatch, capsys)
    damage(store.path, "pages")
    status, _, err = shell("list")
    assert status == 1
    assert "the jobs database" in err
    assert "is damaged" in err
    assert "`fsdp-tui doctor --repair`" in err
    assert err.count("\n") == 1
    status, out, _ = shell("doctor", "--repair")
    assert status == 0
    assert "jobs: 0 read from it, 5 from run directories" in out
    assert {row["name"] for row in shell.json("list")} == set(jobs)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "is locked by another process"),
        (sqlite3.SQLITE_PROTOCOL, "is locked by another process"),
        (sqlite3.SQLITE_FULL, "the disk is full"),
        (sqlite3.SQLITE_IOERR, "cannot use"),
        (sqlite3.SQLITE_NOTADB, "is damaged"),
    ],
)
def test_what_sqlite_says_is_said_in_words(code: int, told: str) -> None:
    error = sqlite3.OperationalError("its own words")
    error.sqlite_errorcode = code
    assert told in str(trouble(error))
