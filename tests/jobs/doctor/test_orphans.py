"""Run directories of no job: listed, and swept where nothing was trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from jobs import service
from jobs.doctor.checks.queue import check_orphans, judge_orphans
from jobs.doctor.examine import Verdict
from jobs.doctor.orphans import Orphan, find_orphans, sweep_orphans
from jobs.machine.processes import RUN_ID_VARIABLE
from jobs.queue.job import Terms
from jobs.queue.states import State
from jobs.run.rundir import RunDir, event
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.tui.made_up_runs import add_job
from tui.cli.machine.doctor import doctor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs.queue.store import Store


def leave(store: Store, name: str) -> RunDir:
    """A run directory as a submit leaves it that was killed."""
    run_dir = RunDir(store.home / "runs" / name)
    run_dir.create()
    run_dir.job_file.write_text("name: lost\n")
    return run_dir


def names(orphans: list[Orphan]) -> list[str]:
    return [orphan.path.name for orphan in orphans]


def test_those_of_jobs_and_of_others_are_none(store: Store) -> None:
    job = add_job(store, ranks=1)
    job.run_dir.create()
    (store.home / "runs" / "mine").mkdir()
    (store.home / "runs" / "7-file").touch()
    leave(store, "8-lost")
    (store.home / "runs" / "9-link").symlink_to(store.home / "runs" / "8-lost")
    leave(store, ".8-lost.1700000000000000000")
    assert names(find_orphans(store)) == [".8-lost.1700000000000000000", "8-lost"]


@pytest.mark.parametrize(
    ("train", "holds"),
    [
        (lambda run_dir: save_checkpoint(run_dir, 4), "checkpoints"),
        (lambda run_dir: (run_dir.root / "export-step-4" / "a").mkdir(parents=True), "an export"),
        (lambda run_dir: (run_dir.samples / "4").mkdir(parents=True), "samples"),
        (lambda run_dir: run_dir.events.write_text(event("step", step=1)), "events of a training"),
        (lambda run_dir: run_dir.events.write_text("{"), "events of a training"),
        (lambda run_dir: run_dir.events.write_text(event("start", step=0)), ""),
        (lambda run_dir: run_dir.checkpoints.mkdir(), ""),
    ],
)
def test_what_was_trained_is_never_swept(
    store: Store, train: Callable[[RunDir], object], holds: str
) -> None:
    run_dir = leave(store, "8-lost")
    train(run_dir)
    (orphan,) = find_orphans(store)
    assert orphan.holds == holds
    swept, left = sweep_orphans(store)
    assert (names(swept), names(left)) == (([], ["8-lost"]) if holds else (["8-lost"], []))
    assert run_dir.root.exists() == bool(holds)


def test_what_a_person_kept_is_no_orphan(store: Store) -> None:
    job = add_job(store, ranks=1)
    job.run_dir.create()
    store.change(job.id, State.STOPPED, "asked to")
    service.remove(store, job.id, files=False)
    assert find_orphans(store) == []
    assert job.run_dir.root.exists()
    gone = add_job(store, "gone", ranks=1)
    store.change(gone.id, State.STOPPED, "asked to")
    shutil.rmtree(gone.run_dir.root)
    service.remove(store, gone.id, files=False)
    assert not gone.run_dir.root.exists()


@pytest.mark.parametrize("how", ["works there", "has its run id"])
def test_what_a_process_uses_stays(store: Store, tmp_path: Path, how: str) -> None:
    run_dir = leave(store, "8-lost")
    run_dir.launch_file.write_text(json.dumps({"run_id": "still-here"}))
    place = run_dir.root if how == "works there" else tmp_path
    marks = {} if how == "works there" else {RUN_ID_VARIABLE: "still-here"}
    words = [sys.executable, "-S", "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        words,
        cwd=place,
        env=os.environ | marks,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert names(sweep_orphans(store)[1]) == ["8-lost"]
        process.communicate(b"\n")
    assert names(sweep_orphans(store)[0]) == ["8-lost"]


def test_a_job_that_is_being_submitted_is_none(store: Store) -> None:
    """Its directory is there before its row; the lock is waited for."""
    store.patience = 0
    seen: list[str] = []

    def prepare(run_dir: RunDir) -> None:
        run_dir.create()
        with pytest.raises(Exception, match="locked"):
            find_orphans(store)
        seen.append(run_dir.root.name)

    store.add(name="new", terms=Terms(1, None, 5), run_id="r", prepare=prepare)
    assert seen == ["1-new"]
    assert find_orphans(store) == []


def test_the_doctor_lists_them(store: Store) -> None:
    leave(store, "8-lost")
    save_checkpoint(leave(store, "9-trained"), 4)
    empty, trained = check_orphans(None)  # type: ignore[arg-type]
    assert (empty.verdict, trained.verdict) == (Verdict.WARN, Verdict.WARN)
    assert "`fsdp-tui doctor --repair` deletes" in (empty.advice or "")
    assert empty.lines[0].endswith("8-lost")
    assert trained.lines[0].endswith("9-trained  (checkpoints)")


def test_many_are_listed_in_part(tmp_path: Path) -> None:
    orphans = [Orphan(tmp_path / f"{number}-a", 1 << 10, "") for number in range(1, 31)]
    (finding,) = judge_orphans(orphans)
    assert finding.found.startswith("30 (30 KiB) belong to no job")
    assert (len(finding.lines), finding.lines[-1]) == (21, "and 10 more")
    assert not list(judge_orphans([]))


@pytest.mark.parametrize("what", ["none", "damaged"])
def test_of_a_database_that_cannot_be_read_nothing_is_touched(
    store: Store, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = leave(store, "8-lost")
    for path in store.home.glob("jobs.db*"):
        path.unlink()
    if what == "damaged":
        store.path.write_bytes(b"nothing that SQLite knows" * 400)
    assert not list(check_orphans(None))  # type: ignore[arg-type]
    assert doctor.main(["--repair", "--json"], standalone_mode=False) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["restored"], answer["swept"], answer["left"]) == ([8], [], [])
    assert run_dir.job_file.exists()


def test_repair_sweeps_and_names_what_it_leaves(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, trained = leave(store, "8-lost"), leave(store, "9-trained")
    save_checkpoint(trained, 4)
    assert doctor.main(["--repair"], standalone_mode=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "the jobs database is intact",
        f"deleted {lost.root}, of no job",
        f"{trained.root} belongs to no job and holds checkpoints; delete it by hand",
    ]
    assert (lost.root.exists(), trained.root.exists()) == (False, True)
