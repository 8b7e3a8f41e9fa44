"""State on file systems that machines share, or that cannot do what a local disk can."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.backends.slurm.records import request_stop, requested_stop
from jobs.doctor.checks.disks import judge_journal
from jobs.doctor.examine import Verdict
from jobs.machine.residence import is_shared
from jobs.queue.job import Clocks, Terms
from jobs.queue.states import State
from jobs.queue.store import Store
from jobs.queue.tables import journal_of
from jobs.run.rundir import RankStatus, RunDir
from jobs.service.repair import repair
from tests.support.bindfs import NO_SHARED_MEMORY, REMEMBERS, mounted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every folder were on NFS."""
    for module in ("jobs.queue.tables", "jobs.service.repair", "jobs.machine.residence"):
        monkeypatch.setattr(f"{module}.is_shared", lambda path: True)


def add(store: Store) -> int:
    terms = Terms(ranks=1, wanted=None, total_steps=1)
    return store.add(name="j", terms=terms, run_id="x", prepare=RunDir.create).id


def test_a_database_where_processes_share_no_memory(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "mount", NO_SHARED_MEMORY) as home:
        store = Store(home)
        job = add(store)
        assert Store(home).get(job).state is State.QUEUED
        assert journal_of(store.path) == "rollback"


def test_a_database_that_was_made_elsewhere(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    local = Store(disk)
    job = add(local)
    assert journal_of(local.path) == "wal", "a local disk has the faster journal"
    with mounted(disk, tmp_path / "mount", NO_SHARED_MEMORY) as home:
        with closing(sqlite3.connect(home / "jobs.db")) as db, pytest.raises(sqlite3.Error):
            db.execute("SELECT * FROM jobs").fetchall()
        assert Store(home).get(job).name == "j"
    assert journal_of(local.path) == "rollback"
    assert local.get(job).name == "j"


def test_requests_of_another_machine_are_seen_at_once(tmp_path: Path) -> None:
    """The second client remembers that there was no such file, and lists it all the same."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with (
        mounted(disk, tmp_path / "a", REMEMBERS) as a,
        mounted(disk, tmp_path / "b", REMEMBERS) as b,
    ):
        here, there = RunDir(a / "run"), RunDir(b / "run")
        here.create()
        assert not there.requested("stop")
        assert not (there.control / "stop").exists()
        here.request("stop")
        request_stop(here, 0, 2)
        assert not (there.control / "stop").exists(), "else this mount remembers nothing"
        assert there.requested("stop")
        assert requested_stop(there, 0) == 2


@pytest.mark.usefixtures("shared")
def test_a_shared_home_has_no_write_ahead_log(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert journal_of(store.path) == "rollback"
    assert store.get(add(store)).state is State.QUEUED


def test_doctor_says_so_and_repair_puts_it_right(home: Path, request: Any) -> None:
    store = Store(home)
    (finding,) = judge_journal("nfs4")
    assert finding.verdict is Verdict.WARN
    assert "write-ahead log is not safe across machines" in finding.found
    request.getfixturevalue("shared")
    assert repair(home).kept is None
    (finding,) = judge_journal("nfs4")
    assert finding.verdict is Verdict.OK
    assert journal_of(store.path) == "rollback"


def test_only_what_is_known_to_be_local_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_shared(tmp_path)
    for kind in ("nfs4", "lustre", "virtiofs", "fuse.mfs", "fuse.rclone", "fuse", "ocfs2", "new"):
        monkeypatch.setattr("jobs.machine.residence.kind_of", lambda path, kind=kind: kind)
        assert is_shared(tmp_path / kind), kind


def test_times_of_other_machines_are_by_our_clock() -> None:
    clocks = Clocks(here="login")
    said = RankStatus(0, 7, 1.0, "node1", "cuda:0", "train", 3, heartbeat=5e8, progressed=4e8)
    (first,) = clocks.translate(1, [said], 1000.0)
    assert (first.heartbeat, first.progressed) == (1000.0, 1000.0)
    (same,) = clocks.translate(1, [said], 1030.0)
    assert (same.heartbeat, same.progressed) == (1000.0, 1000.0), "it is 30 s late"
    (beats,) = clocks.translate(1, [replace(said, heartbeat=6e8)], 1031.0)
    assert (beats.heartbeat, beats.progressed) == (1031.0, 1000.0)
    (ours,) = clocks.translate(1, [replace(said, host="login")], 1032.0)
    assert ours.heartbeat == 5e8
