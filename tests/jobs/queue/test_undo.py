"""Files and rows change together, whatever ends the process between them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from jobs.queue import undo
from jobs.queue.job import Terms
from jobs.queue.states import State
from jobs.queue.store import Store
from tests.support.jobs.kills import kill, killed
from tests.support.tui.made_up_runs import add_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.queue.job import Job
    from jobs.queue.undo import Undo


@pytest.fixture
def job(store: Store) -> Job:
    made = add_job(store, ranks=1)
    made.run_dir.create()
    made.run_dir.job_file.write_text("before")
    return made


def describe(store: Store, job: Job, prepare: Callable[[Undo], None]) -> Job:
    return store.redescribe(
        job.id, name="other", terms=Terms(1, None, 9), reason="changed", prepare=prepare
    )


def change(job: Job, files: Undo) -> None:
    """One file is written, one is made, one directory gets another name."""
    root = job.run_dir.root
    (root / "old").mkdir(exist_ok=True)
    files.keep([job.run_dir.job_file, root / "new"], [(root / "old", root / "moved")])
    job.run_dir.job_file.write_text("after")
    (root / "new").touch()
    os.replace(root / "old", root / "moved")


def look(job: Job) -> tuple[str, list[str]]:
    root = job.run_dir.root
    names = [name for name in ("new", "old", "moved") if (root / name).exists()]
    return job.run_dir.job_file.read_text(), names


def test_a_change_that_was_killed_is_undone_by_the_next_look(store: Store, job: Job) -> None:
    def prepare(files: Undo) -> None:
        change(job, files)
        kill()

    killed(lambda: describe(store, job, prepare))
    assert look(job) == ("after", ["new", "moved"])
    again = Store(store.home)
    assert again.get(job.id).name == job.name
    assert look(job) == ("before", ["old"])
    assert not undo.is_left(store.home)
    assert not list(job.run_dir.root.glob(".*.before"))


def test_a_change_that_the_database_took_stays(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        monkeypatch.setattr(store, "_settle", kill)  # right after the commit
        describe(store, job, lambda files: change(job, files))

    killed(work)
    assert undo.is_left(store.home)
    assert Store(store.home).get(job.id).name == "other"
    assert look(job) == ("after", ["new", "moved"])
    assert not undo.is_left(store.home)
    assert not list(job.run_dir.root.glob(".*.before"))


def test_one_that_raises_is_undone_at_once(store: Store, job: Job) -> None:
    def prepare(files: Undo) -> None:
        change(job, files)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        describe(store, job, prepare)
    assert look(job) == ("before", ["old"])


def test_a_submit_that_was_killed_leaves_nothing(store: Store) -> None:
    def work() -> None:
        store.add(
            name="new", terms=Terms(1, None, 5), run_id="r", prepare=lambda d: (d.create(), kill())
        )

    killed(work)
    runs = store.home / "runs"
    assert [path.name for path in runs.iterdir()] == ["1-new"]
    Store(store.home)
    assert not list(runs.iterdir())


def test_what_cannot_be_undone_now_is_undone_later(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on meanwhile: a state changes however broken a disk is."""

    def prepare(files: Undo) -> None:
        change(job, files)
        kill()

    def refuse(*words: object) -> None:
        raise OSError(5, "Input/output error")

    other = add_job(store, "other", ranks=1)
    killed(lambda: describe(store, job, prepare))
    with monkeypatch.context() as broken:
        broken.setattr("os.replace", refuse)
        store.change(other.id, State.STOPPED, "asked to")
        assert undo.is_left(store.home)
    store.pause(paused=True)
    assert look(job) == ("before", ["old"])


def test_a_journal_that_cannot_be_read_now_stays(
    store: Store, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(files: Undo) -> None:
        change(job, files)
        kill()

    def refuse(*words: object) -> bytes:
        raise OSError(5, "Input/output error")

    killed(lambda: describe(store, job, prepare))
    with monkeypatch.context() as broken:
        broken.setattr(undo, "read_regular", refuse)
        Store(store.home)
    assert undo.is_left(store.home)
    Store(store.home)
    assert look(job) == ("before", ["old"])


def test_a_run_directory_that_is_gone_is_in_nobodys_way(store: Store, job: Job) -> None:
    def prepare(files: Undo) -> None:
        change(job, files)
        kill()

    killed(lambda: describe(store, job, prepare))
    shutil.rmtree(job.run_dir.root)
    assert Store(store.home).get(job.id).name == job.name
    assert not undo.is_left(store.home)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"job": 1, "changes": 1, "files": 3}'])
def test_a_journal_that_says_nothing_is_forgotten(store: Store, job: Job, text: str) -> None:
    (store.home / "jobs.undo").write_text(text)
    Store(store.home)
    assert not undo.is_left(store.home)
