"""The jobs database under many hands: who may change what, and that nobody is turned away."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from jobs.errors import NotFoundError, StateError, UserError
from jobs.machine.processes import ProcessId
from jobs.machine.residence import residence
from jobs.paths import close_to_others
from jobs.queue.states import ACTIVE, ENDED, State
from jobs.queue.store import PERSON, SERVICE, Job, Store, Terms
from jobs.queue.tables import trouble, update
from jobs.run.rundir import RunDir
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from pathlib import Path

A, B = "GPU-a", "GPU-b"


def add(store: Store, name: str = "t", **changes: Any) -> Job:
    prepare = changes.pop("prepare", lambda run_dir: run_dir.create())
    terms = Terms(**{"ranks": 2, "wanted": None, "total_steps": 10} | changes)
    return store.add(name=name, terms=terms, run_id=f"run-{name}", prepare=prepare)


def bring(store: Store, job: Job, *states: State) -> Job:
    for state in states:
        if state is State.STARTING and store.get(job.id).state is State.QUEUED:
            assert store.claim(job.id, [], "starting")
        else:
            assert store.change(job.id, state, f"now {state}")
    return store.get(job.id)


# -- opening -------------------------------------------------------------------------------


@pytest.mark.parametrize("helps", [True, False])
def test_a_mount_without_shared_memory_is_left_where_that_helps(
    home: Path, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/jobs/machine/test_network_homes.py` has such a mount, where one can be made."""
    first = Store(home).path
    opened: list[Path] = []

    def fails_once(self: Store) -> None:
        opened.append(self.path)
        if len(opened) == 1:
            raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Store, "_open", fails_once)
    monkeypatch.setattr("jobs.queue.store.leave_wal_where_it_fails", lambda path, error: helps)
    if helps:
        Store(home)
    else:
        with pytest.raises(UserError, match="disk I/O error"):
            Store(home)
    assert opened == [first] * (2 if helps else 1)


# -- adding and reading --------------------------------------------------------------------


def test_a_new_job_waits_in_the_queue(store: Store) -> None:
    before = time.time()
    job = add(store, wanted=["GPU-a", "GPU-b"])
    assert (job.state, job.ranks, job.wanted) == (State.QUEUED, 2, [A, B])
    assert (job.gpus, job.started, job.ended, job.supervisor) == ([], None, None, None)
    assert before - 1 <= job.created == job.queued <= time.time() + 1
    assert job.run_dir.root == store.home / "runs" / f"{job.id}-t"
    assert job.run_dir.root.is_dir()
    assert store.get(job.id) == job
    (change,) = store.history(job.id)
    assert (change.before, change.after, change.reason) == (None, State.QUEUED, "submitted")


def test_what_it_wants_is_kept_as_it_was_said(store: Store) -> None:
    for wanted in (None, 3, [A]):
        assert store.get(add(store, wanted=wanted).id).wanted == wanted


def test_the_newest_job_is_listed_first_and_served_last(store: Store) -> None:
    ids = [add(store).id for _ in range(3)]
    assert [job.id for job in store.all()] == ids[::-1]
    assert [job.id for job in store.in_states([State.QUEUED])] == ids
    assert store.in_states([]) == []


def test_two_looks_at_one_home_agree(home: Path) -> None:
    job = add(Store(home))
    assert Store(home).get(job.id) == job


def test_when_its_files_cannot_be_written_there_is_no_job(store: Store) -> None:
    def prepare(_: RunDir) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        add(store, prepare=prepare)
    assert store.all() == []
    assert store.history(1) == []
    assert add(store).state is State.QUEUED, "the next one is welcome"


def test_nobody_sees_a_job_before_its_files_are_there(store: Store) -> None:
    seen: list[list[Job]] = []
    add(store, prepare=lambda _: seen.append(Store(store.home).all()))
    assert seen == [[]]


def test_a_job_that_is_not_there(store: Store) -> None:
    for call in (store.get, store.remove, lambda n: store.change(n, State.FAILED, "")):
        with pytest.raises(NotFoundError, match="no job 7"):
            call(7)


def test_a_number_may_be_as_large_as_a_database_can_hold(home: Path, store: Store) -> None:
    add(store)
    largest = 2**63 - 1
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE sqlite_sequence SET seq=? WHERE name='jobs'", (largest - 1,))
    db.close()
    assert add(store).id == largest
    assert store.get(largest).id == largest
    for no_job in (0, -1, largest + 1, 2**99):
        with pytest.raises(NotFoundError, match=f"no job {no_job}"):
            store.get(no_job)


def test_the_home_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_TUI_HOME", str(tmp_path / "deep" / "home"))
    store = Store()
    assert store.home == tmp_path / "deep" / "home"
    assert stat.S_IMODE(store.home.stat().st_mode) == 0o700


# -- states --------------------------------------------------------------------------------


def test_a_change_is_kept_with_its_reason(store: Store) -> None:
    job = bring(store, add(store), State.STARTING, State.RUNNING, State.COMPLETED)
    assert (job.state, job.reason) == (State.COMPLETED, "now completed")
    assert job.ended is not None
    assert job.started is not None
    assert job.boot_id == str(residence())
    assert job.elsewhere == ""
    changes = store.history(job.id)
    assert [c.after for c in changes] == ["queued", "starting", "running", "completed"]
    assert [c.before for c in changes] == [None, "queued", "starting", "running"]
    assert [c.t for c in changes] == sorted(c.t for c in changes)


def test_a_change_happens_only_from_the_state_it_was_decided_in(store: Store) -> None:
    job = bring(store, add(store), State.STARTING)
    assert store.change(job.id, State.STOPPING, "", only_from={State.RUNNING}) is False
    assert store.get(job.id) == job
    assert len(store.history(job.id)) == 2
    assert store.change(job.id, State.STOPPING, "", only_from={State.STARTING}) is True


@pytest.mark.parametrize(
    ("way", "after"),
    [
        ([], State.COMPLETED),
        ([], State.RUNNING),
        ([], State.LOST),
        ([State.STARTING], State.QUEUED),
        ([State.STARTING, State.STOPPING], State.RUNNING),
        ([State.STARTING, State.COMPLETED], State.FAILED),
        ([State.STARTING, State.FAILED], State.RUNNING),
        ([State.STOPPED], State.STOPPED),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    store: Store, way: list[State], after: State
) -> None:
    job = bring(store, add(store), *way)
    with pytest.raises(StateError, match=f"cannot become {after}"):
        store.change(job.id, after, "")
    assert store.get(job.id) == job


def test_of_many_that_want_to_end_a_job_one_does(store: Store) -> None:
    job = bring(store, add(store), State.STARTING, State.RUNNING)
    endings = [State.COMPLETED, State.FAILED, State.LOST, State.STOPPED] * 2
    results = together(
        [lambda s=s: store.change(job.id, s, "", only_from=ACTIVE) for s in endings]  # type: ignore[misc]
    )
    assert sorted(results) == [False] * 7 + [True]
    assert len(store.history(job.id)) == 4


def test_resuming_starts_a_new_attempt_with_a_clean_slate(store: Store) -> None:
    job = add(store)
    assert store.claim(job.id, [A], "on GPU 0")
    store.take_over(job.id, None, ProcessId(1, 2.0))
    store.raise_stop_level(job.id, 2)
    bring(store, job, State.STOPPED)
    again = store.requeue(job.id, "resumed after step 4", Terms(2, None, 20))
    assert (again.state, again.reason) == (State.QUEUED, "resumed after step 4")
    assert (again.attempt, again.total_steps, again.stop_level) == (1, 20, 0)
    assert (again.gpus, again.supervisor, again.ended) == ([], None, None)
    assert again.queued > job.queued
    assert again.run_id == job.run_id
    assert again.run_dir == job.run_dir


@pytest.mark.parametrize("way", [[], [State.STARTING], [State.STARTING, State.STOPPING]])
def test_only_an_ended_job_can_be_resumed(store: Store, way: list[State]) -> None:
    job = bring(store, add(store), *way)
    with pytest.raises(StateError):
        store.requeue(job.id, "")
    assert store.get(job.id) == job


def test_a_resumed_job_goes_to_the_end_of_the_queue(store: Store) -> None:
    first = bring(store, add(store), State.STOPPED)
    second = add(store)
    store.requeue(first.id, "")
    assert [job.id for job in store.in_states([State.QUEUED])] == [second.id, first.id]


def test_higher_priority_comes_first_and_a_place_in_the_queue_can_be_changed(
    store: Store,
) -> None:
    def order() -> list[int]:
        return [job.id for job in store.in_states([State.QUEUED])]

    a, b, c = add(store).id, add(store).id, add(store, priority=5).id
    assert order() == [c, a, b]
    store.move(b, "first")
    assert order() == [c, b, a]
    store.move(a, priority=9)
    assert order() == [a, c, b]
    store.move(a, priority=0)
    store.move(b, "last")
    assert order() == [c, a, b]


def test_a_job_moves_one_place_among_those_of_its_priority(store: Store) -> None:
    urgent, *ids = (add(store, priority=n == 0).id for n in range(4))
    with store.write() as db:
        db.execute("UPDATE jobs SET queued=7")  # all at once
    for job, to, order in (
        (ids[2], "up", [ids[0], ids[2], ids[1]]),
        (ids[0], "down", [ids[2], ids[0], ids[1]]),
        (ids[1], "up", [ids[2], ids[1], ids[0]]),
    ):
        store.move(job, to)
        assert [job.id for job in store.in_states([State.QUEUED])] == [urgent, *order]
    for job, to, place in ((ids[2], "up", "first"), (ids[0], "down", "last"), (urgent, "up", "1")):
        with pytest.raises(StateError, match=f"already the .*{place}"):
            store.move(job, to)
    store.move(ids[2], "first")  # stays where it is


def test_only_what_waits_can_be_moved_or_held(store: Store) -> None:
    job = bring(store, add(store), State.STARTING)
    calls = (
        lambda: store.hold(job.id, True),
        lambda: store.move(job.id, priority=1),
        lambda: store.move(job.id, "up"),
    )
    for call in calls:
        with pytest.raises(StateError, match="not queued"):
            call()
    assert store.get(job.id) == job


def test_the_queue_can_be_paused(store: Store) -> None:
    assert store.paused is False
    for paused in (True, True, False):
        store.pause(paused)
        assert Store(store.home).paused is paused


def test_the_reason_for_waiting_is_no_history(store: Store) -> None:
    job = add(store)
    store.explain(job.id, "waiting for job 3")
    assert store.get(job.id).reason == "waiting for job 3"
    assert len(store.history(job.id)) == 1
    bring(store, job, State.STARTING)
    store.explain(job.id, "waiting for job 3")
    assert store.get(job.id).reason == "starting"


def test_a_stop_level_only_rises(store: Store) -> None:
    job = add(store)
    assert [store.raise_stop_level(job.id, n) for n in (1, 3, 2)] == [1, 3, 3]
    assert store.get(job.id).stop_level == 3


@pytest.mark.parametrize("way", [[State.STOPPED], [State.STARTING, State.LOST]])
def test_an_ended_job_can_be_forgotten(store: Store, way: list[State]) -> None:
    job = bring(store, add(store), *way)
    assert store.remove(job.id).run_dir == job.run_dir
    assert store.all() == []
    assert store.history(job.id) == []
    assert add(store).id > job.id, "an id is never given twice"


@pytest.mark.parametrize("way", [[], [State.STARTING], [State.STARTING, State.STOPPING]])
def test_a_job_with_processes_cannot_be_forgotten(store: Store, way: list[State]) -> None:
    job = bring(store, add(store), *way)
    with pytest.raises(StateError, match="stop it first"):
        store.remove(job.id)
    assert store.get(job.id) == job


# -- claims --------------------------------------------------------------------------------


def test_a_claim_takes_all_gpus_or_none(store: Store) -> None:
    first, second = add(store), add(store)
    assert store.claim(first.id, [B], "on GPU 1")
    assert not store.claim(second.id, [A, B], "on GPU 0, 1")
    assert store.claims() == {B: first.id}
    assert store.get(second.id).state is State.QUEUED
    assert store.get(second.id).gpus == []
    assert store.claim(second.id, [A], "on GPU 0")
    assert store.get(second.id).gpus == [A]


def test_only_a_queued_job_can_claim(store: Store) -> None:
    job = bring(store, add(store), State.STOPPED)
    assert not store.claim(job.id, [A], "")
    assert store.claims() == {}


@pytest.mark.parametrize("ending", sorted(ENDED))
def test_an_ending_gives_the_gpus_back(store: Store, ending: State) -> None:
    job = add(store)
    store.claim(job.id, [A, B], "")
    store.change(job.id, State.STOPPING, "")
    assert store.claims() == {A: job.id, B: job.id}
    store.change(job.id, ending, "")
    assert store.claims() == {}
    assert store.get(job.id).gpus == [A, B], "where it ran stays known"


def test_of_many_threads_one_gets_the_gpu(store: Store) -> None:
    jobs = [add(store) for _ in range(8)]
    results = together([lambda j=j: store.claim(j.id, [A], "") for j in jobs])  # type: ignore[misc]
    assert results.count(True) == 1
    winner = jobs[results.index(True)]
    assert store.claims() == {A: winner.id}
    assert [j.id for j in store.in_states([State.STARTING])] == [winner.id]


def test_of_many_threads_one_starts_the_job(store: Store) -> None:
    job = add(store)
    results = together([lambda g=g: store.claim(job.id, [g], "") for g in "abcdefgh"])  # type: ignore[misc]
    assert results.count(True) == 1
    assert len(store.claims()) == 1
    assert len(store.history(job.id)) == 2


def test_of_many_supervisors_one_takes_over(store: Store) -> None:
    job = bring(store, add(store), State.STARTING)
    former = ProcessId(99, 1234.567891)
    assert store.take_over(job.id, None, former)
    new = [ProcessId(100 + n, 2000.5 + n) for n in range(6)]
    results = together([lambda p=p: store.take_over(job.id, former, p) for p in new])  # type: ignore[misc]
    assert results.count(True) == 1
    assert store.get(job.id).supervisor == new[results.index(True)]
    assert not store.take_over(job.id, former, new[0])
    assert not store.take_over(job.id, None, new[0])


def test_who_only_looks_changes_nothing_and_is_told_what_to_do(store: Store) -> None:
    job = add(store)
    store.read_only = True
    with pytest.raises(StateError) as caught:
        store.claim(job.id, [], "")
    assert str(caught.value) == "read-only: nothing changed; open it without --read-only"
    assert store.get(job.id).state is State.QUEUED


# -- many processes ------------------------------------------------------------------------


def test_many_processes_may_create_and_fill_one_database(home: Path) -> None:
    done = in_processes(
        6,
        """
        for round in range(4):
            store = Store(home / f"h{round}")
            for n in range(6):
                job = store.add(
                    name=f"p{me}", terms=Terms(1, 1, 1), run_id=f"{me}-{n}",
                    prepare=lambda run_dir: run_dir.create(),
                )
                store.claim(job.id, [f"GPU-{n}"], "")
                store.get(job.id)
        """,
        home,
        before="for round in range(4): (home / f'h{round}').mkdir(exist_ok=True)",
    )
    assert done == [""] * 6, "no one was told that the database is locked"
    for number in range(4):
        store = Store(home / f"h{number}")
        assert sorted(job.id for job in store.all()) == list(range(1, 37))
        assert len({job.run_id for job in store.all()}) == 36
        assert len(store.claims()) == len(store.in_states([State.STARTING])) == 6


def test_of_many_processes_one_gets_the_gpu(store: Store) -> None:
    jobs = [add(store, wanted=1) for _ in range(30)]
    told = in_processes(
        4,
        """
        from jobs.queue.states import State
        store = Store(home)
        for n in range(1, 31):
            if store.claim(n, ["GPU-a"], ""):
                assert store.claims() == {"GPU-a": n}
                store.change(n, State.COMPLETED, "done")
        """,
        store.home,
    )
    assert told == [""] * 4
    assert store.claims() == {}
    for job in jobs:
        passed = [c.after for c in store.history(job.id)]
        assert passed in (["queued", "starting", "completed"], ["queued"])
    assert store.in_states([State.COMPLETED])


# -- databases that cannot be used ---------------------------------------------------------


def test_a_file_that_is_no_database_is_refused_in_words(home: Path) -> None:
    (home / "jobs.db").write_text("this is no database at all, whatever its name may say" * 40)
    with pytest.raises(UserError, match=r"the jobs database .*jobs\.db is damaged"):
        Store(home)


def test_a_database_that_was_deleted_is_not_replaced_by_an_empty_one(store: Store) -> None:
    """Who has it open would do so, and everyone after that would find no tables."""
    add(store)
    for path in store.home.glob("jobs.db*"):
        path.unlink()
    with pytest.raises((UserError, sqlite3.Error)):
        store.all()
    assert not store.path.exists()


def test_a_database_of_tomorrow_is_left_alone(home: Path) -> None:
    Store(home)
    with sqlite3.connect(home / "jobs.db") as db:
        db.execute("PRAGMA user_version=999")
    db.close()
    with pytest.raises(UserError, match="newer version"):
        Store(home)


def test_a_home_that_is_a_file_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tests run as root, a file in the place of a directory is what cannot be written."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("FSDP_TUI_HOME", str(path))
        with pytest.raises(UserError, match="FSDP_TUI_HOME") as caught:
            Store()
        assert str(path) in str(caught.value)


# -- helpers -------------------------------------------------------------------------------


def together(calls: list[Any]) -> list[Any]:
    """The results of calls that all begin at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        barrier.wait(PATIENCE)
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    failed = [result for result in results if isinstance(result, Exception)]
    assert not failed, failed
    return results


def in_processes(count: int, script: str, home: Path, *, before: str = "") -> list[str]:
    """Run a script in several processes that begin together; what each wrote to stderr."""
    prologue = f"""
import os, sys, time
from pathlib import Path
from jobs.queue.store import Store, Terms
home, me = Path(sys.argv[1]), int(sys.argv[2])
{before}
(home / f"ready-{{me}}").touch()
while not (home / "go").exists():
    time.sleep(0.001)
"""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", prologue + textwrap.dedent(script), str(home), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for number in range(count)
    ]
    try:
        eventually(lambda: len(list(home.glob("ready-*"))) == count)
        (home / "go").touch()
        return [worker.communicate(timeout=PATIENCE)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def test_what_a_killed_submit_left_is_in_nobodys_way(store: Store) -> None:
    left = RunDir(store.home / "runs" / "1-t")
    left.create()
    left.job_file.write_text("name: t\n")
    assert add(store).id == 1
    (aside,) = (store.home / "runs").glob(".1-t.*")
    assert (aside / "job.yaml").read_text() == "name: t\n", "nothing is lost"
    ran = RunDir(store.home / "runs" / "2-t")
    ran.create()
    ran.launch_file.write_text("{}")
    with pytest.raises(UserError, match="already exists, left by a database that was deleted"):
        add(store)


# -- who may look into it ------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_state_directory_that_others_can_write_is_narrowed_before_something_is_written(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = add(Store()).id
    home.chmod(0o777)
    Store().all()
    assert mode_of(home) == 0o777, "who reads changes no mode"
    close_to_others.cache_clear()
    Store().move(made, priority=3)
    assert mode_of(home) == 0o700
    said = f"fsdp-tui: other users could write to {home}; its mode was 777 and is now 700\n"
    assert capsys.readouterr().err == said
    Store().move(made, priority=4)
    assert capsys.readouterr().err == ""


def test_a_place_where_others_may_write_is_no_state_directory(home: Path) -> None:
    """Such as /tmp or /workspace: nobody is locked out, whatever is in it."""
    for mode, content in ((0o777, None), (0o777, "theirs.txt"), (0o1777, "jobs.db")):
        if content:
            (home / content).touch()
        home.chmod(mode)
        with pytest.raises(UserError, match=rf"set FSDP_TUI_HOME={home}/fsdp-tui"):
            Store()
        assert mode_of(home) == mode
        if content:
            (home / content).unlink()
    assert not list(home.iterdir())


def test_a_place_that_others_may_read_keeps_its_mode_and_tells_nothing(home: Path) -> None:
    home.chmod(0o755)
    (home / "theirs.txt").touch()
    store = Store()
    made = add(store).id
    close_to_others.cache_clear()
    store.move(made, priority=3)
    assert mode_of(home) == 0o755
    assert mode_of(store.path) == 0o600
    assert mode_of(home / "runs") == 0o700


def test_a_link_to_a_place_of_others_changes_no_mode(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    monkeypatch.setenv("FSDP_TUI_HOME", str(tmp_path / "link"))
    with pytest.raises(UserError, match="other users may write"):
        Store()
    assert mode_of(tmp_path / "shared") == 0o1777


def test_a_state_directory_of_another_user_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(home, 12345, -1) if os.geteuid() == 0 else pytest.skip("needs root")
    with pytest.raises(UserError, match="belongs to another user"):
        Store()


def test_rows_that_did_not_change_are_the_same_jobs_however_many_there_are(
    store: Store,
) -> None:
    with store.write() as db:
        db.executemany(
            "INSERT INTO jobs (name, state, ranks, wanted, total_steps, run_dir, run_id, created,"
            " queued) VALUES ('t', 'completed', 1, 'null', 1, '/nowhere', 'r', 1, 1)",
            [()] * 5000,
        )
    first, again = store.all(), store.all()
    assert all(one is other for one, other in zip(first, again, strict=True))
    with store.write() as db:
        db.execute("UPDATE jobs SET reason='new' WHERE id=7")
    third = store.all()
    assert [one.id for one, other in zip(third, again, strict=True) if one is not other] == [7]


def test_a_locked_database_is_waited_for_as_long_as_a_person_waits(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command gives up after a few seconds, with a sentence; who serves nobody waits longer."""
    from tui.cli import commands

    waits: list[float] = []
    connect = sqlite3.connect

    def counted(*words: Any, timeout: float = 5.0, **more: Any) -> sqlite3.Connection:
        waits.append(timeout)
        return connect(*words, timeout=0.0, **more)

    monkeypatch.setattr("jobs.queue.store.sqlite3.connect", counted)
    with store.write() as db:
        db.execute("UPDATE settings SET value=value")
        monkeypatch.setattr("sys.argv", ["fsdp-tui", "pause"])
        with pytest.raises(SystemExit) as ended:
            commands.main()
    assert ended.value.code == 1
    assert "is locked by another process" in capsys.readouterr().err
    assert set(waits) == {PERSON}
    assert PERSON <= 5 < 20 <= SERVICE
    waits.clear()
    Store(store.home, patience=SERVICE).all()
    assert set(waits) == {SERVICE}


_IN_A_TRANSACTION = """\
import signal, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute(sys.argv[2])
db.execute(sys.argv[3]).fetchone()
print("locked", flush=True)
signal.pause()
"""


@pytest.mark.parametrize(("journal", "begin"), [("WAL", "BEGIN IMMEDIATE"), ("TRUNCATE", "BEGIN")])
def test_who_keeps_the_database_locked_while_suspended_is_named(
    store: Store, journal: str, begin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process suspended inside a transaction keeps its lock: to try again would never help.

    With a rollback journal a reader blocks a writer's commit, too.
    """
    add(store)
    with store.connect() as db:
        db.execute(f"PRAGMA journal_mode={journal}")
    impatient = Store(store.home, patience=0.0)
    read = "SELECT * FROM jobs"
    words = [sys.executable, "-c", _IN_A_TRANSACTION, str(store.path), begin, read]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            with pytest.raises(sqlite3.OperationalError) as awake, impatient.write() as db:
                update(db, 1, {"reason": "x"})
            holder.send_signal(signal.SIGSTOP)
            os.waitpid(holder.pid, os.WUNTRACED)
            with pytest.raises(sqlite3.OperationalError) as suspended, impatient.write() as db:
                update(db, 1, {"reason": "x"})
            sentence = str(trouble(suspended.value, store.path))
        finally:
            holder.kill()
    assert "try again in a moment" in str(trouble(awake.value, store.path))
    assert f"is locked by process {holder.pid}, which is suspended" in sentence
    assert f"`kill -CONT {holder.pid}` resumes it" in sentence
    with impatient.write():
        pass  # its lock went with it
