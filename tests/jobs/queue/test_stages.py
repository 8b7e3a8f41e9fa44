"""Jobs that start only when others have completed."""

from __future__ import annotations

import sqlite3
from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import service
from jobs.errors import NotFoundError, StateError
from jobs.queue.job import NewJob, Terms, check_stages, why_after
from jobs.queue.states import ACTIVE, ENDED, State
from jobs.queue.store import Store
from jobs.queue.tables import HELD_BY_STAGE
from jobs.run.rundir import RunDir
from jobs.service.repair import repair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.queue.job import Job

_PATHS = {
    State.QUEUED: (),
    State.COMPLETED: (State.STARTING, State.COMPLETED),
    **{state: (State.STARTING, state) for state in ACTIVE - {State.STARTING}},
    State.STARTING: (State.STARTING,),
    State.STOPPED: (State.STOPPED,),
    State.FAILED: (State.FAILED,),
    State.LOST: (State.STARTING, State.LOST),
}
REMOVED = "removed"


def new(*follows: int, prepare: Callable[[RunDir], None] = RunDir.create) -> NewJob:
    return NewJob("t", Terms(1, None, 9), "run", prepare, follows)


def add(store: Store, *follows: int) -> Job:
    return store.add_all([new(*follows)])[0]


def bring(store: Store, job: int, to: State | str) -> None:
    for state in _PATHS[State.FAILED if to == REMOVED else State(to)]:
        store.change(job, state, f"now {state}")
    if to == REMOVED:
        store.remove(job)


def dispatched(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    started: list[int] = []
    monkeypatch.setattr(
        "jobs.backends.local.dispatch._start_supervisor", lambda job: started.append(job.id)
    )
    monkeypatch.setenv("FSDP_TUI_CPU_JOBS", "99")
    service.dispatch(store)
    return started


def test_it_starts_exactly_when_all_before_it_have_completed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each state a job may be in, and behind each two of them."""
    outcomes = [*State, REMOVED]
    earlier = {outcome: add(store).id for outcome in outcomes}
    groups = [*((one,) for one in outcomes), *combinations(outcomes, 2)]
    made = store.add_all([new(*(earlier[each] for each in group)) for group in groups])
    for outcome, job_id in earlier.items():
        bring(store, job_id, outcome)
    started = dispatched(store, monkeypatch)
    dead = {REMOVED, *ENDED} - {State.COMPLETED}
    for group, job in zip(groups, map(store.get, (job.id for job in made)), strict=True):
        free = set(group) == {State.COMPLETED}
        assert (job.id in started, bool(job.blockers)) == (free, not free)
        assert job.stuck == (not dead.isdisjoint(group))
        assert free or job.reason.startswith("after job ")
        assert ("release this job" in job.reason) is job.stuck
        if job.stuck and len(group) == 1:
            assert not store.claim(job.id, [], "too early")
            service.hold(store, job.id, False)
            assert store.get(job.id).state is State.STARTING, "started all the same"


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([State.COMPLETED], ""),
        ([State.RUNNING], "after job 1, which is running"),
        ([State.QUEUED, State.SAVING], "after job 1, which is queued, and job 2, which is saving"),
        (
            [State.RUNNING, State.STOPPED],
            "after job 2, which was stopped, and job 1, which is running: resume job 2, or release "
            "this job to start it all the same",
        ),
        (
            [REMOVED, State.QUEUED, State.QUEUED, State.COMPLETED],
            "after job 1, which was removed, job 2, which is queued, and 1 more: release this job "
            "to start it all the same",
        ),
    ],
)
def test_the_reason_says_what_to_do(
    store: Store, states: Sequence[State | str], words: str
) -> None:
    job = [add(store) for _ in states] and add(store, *range(1, len(states) + 1))
    for job_id, state in enumerate(states, 1):
        bring(store, job_id, state)
    assert why_after(store.get(job.id)) == words


@pytest.mark.parametrize("follows", [[9], [1, 9], [2], [3]])
def test_only_jobs_that_exist_can_be_followed(store: Store, follows: list[int]) -> None:
    """So none can follow itself or a later one, and no two wait for each other."""
    add(store)
    with pytest.raises(NotFoundError, match="no job"):
        store.add_all([new(*follows)] * 2)
    assert [job.id for job in store.all()] == [1]


def test_a_job_that_cannot_be_queued_leaves_nothing(store: Store) -> None:
    def fail(_: RunDir) -> None:
        raise OSError("full")

    add(store)
    with pytest.raises(OSError, match="full"):
        store.add_all([new(1, prepare=fail)])
    with store.connect() as db:
        assert db.execute("SELECT COUNT(*) FROM stages").fetchone()[0] == 0


def test_what_was_passed_stays_passed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was stopped in the queue still waits; one that has started is free."""
    job = [add(store), add(store, 1)][1]
    store.change(job.id, State.STOPPED, "")
    assert store.requeue(job.id, "resumed").passed_over
    bring(store, 1, State.COMPLETED)
    assert dispatched(store, monkeypatch) == [job.id]
    store.change(job.id, State.FAILED, "")
    store.requeue(1, "more steps")
    assert not store.requeue(job.id, "resumed").passed_over


def test_a_completed_job_may_be_removed_before_the_next_starts(store: Store) -> None:
    job = [add(store), add(store), add(store, 1, 2)][2]
    for earlier in (1, 2):
        bring(store, earlier, State.COMPLETED)
        store.remove(earlier)
        assert not store.get(job.id).stuck
    assert not store.get(job.id).passed_over


def test_a_release_ends_the_hold_first(store: Store) -> None:
    job = [add(store), add(store, 1)][1]
    store.hold(job.id, True)
    assert store.get(job.id).held
    released = store.hold(job.id, False)
    assert (released.held, released.passed_over) == (False, True), "it still waits"
    assert store.hold(job.id, False).passed_over, "job 1 may still complete"
    bring(store, 1, State.FAILED)
    assert not store.hold(job.id, False).passed_over
    assert store.history(job.id)[-1].reason == "released; no longer waits for job 1"


def test_a_job_is_released_at_once_where_that_is_asked(store: Store) -> None:
    job = [add(store), add(store, 1)][1]
    store.hold(job.id, True)
    released = store.hold(job.id, False, now=True)
    assert (released.held, released.passed_over) == (False, False)


def test_who_lost_its_stages_is_freed_by_no_removal_of_others(store: Store) -> None:
    lost = [add(store), add(store, 1), add(store)][1]
    with sqlite3.connect(store.path) as db:
        db.execute("DELETE FROM stages")
    bring(store, 3, State.COMPLETED)
    store.remove(3)
    assert store.get(lost.id).held


def test_older_processes_and_a_repair_never_start_it_early(store: Store) -> None:
    """A supervisor of an earlier version goes by `held` alone; a damaged page loses stages."""
    job = [add(store), add(store, 1)][1]
    with sqlite3.connect(store.path) as db:
        row = db.execute("SELECT held FROM jobs WHERE id=?", (job.id,)).fetchone()
        assert row == (HELD_BY_STAGE,)
        db.execute("DROP TABLE claims")
    repair(store.home)
    assert store.get(job.id).blockers == ((1, State.QUEUED),)
    with sqlite3.connect(store.path) as db:
        db.execute("DELETE FROM stages")
    assert store.get(job.id).held
    assert not store.hold(job.id, False).held


@given(st.lists(st.tuples(st.integers(1, 5), st.sets(st.integers(1, 5))), max_size=12))
def test_no_edits_make_jobs_wait_for_each_other(edits: list[tuple[int, set[int]]]) -> None:
    waits: dict[int, set[int]] = {number: set() for number in range(1, 6)}

    def get(number: int) -> Any:
        blockers = tuple((earlier, State.QUEUED) for earlier in waits[number])
        return SimpleNamespace(id=number, blockers=blockers)

    for number, follows in edits:
        new = waits | {number: follows}
        try:
            check_stages(number, sorted(follows), get)
        except StateError:
            assert not _can_all_complete(new)
        else:
            assert _can_all_complete(new)
            waits = new


def _can_all_complete(waits: dict[int, set[int]]) -> bool:
    left = set(waits)
    while free := {number for number in left if not waits[number] & left}:
        left -= free
    return not left


def test_an_edit_keeps_the_hold_and_ends_the_wait(store: Store) -> None:
    job = [add(store), add(store, 1)][1]

    def follow(*earlier: int) -> Job:
        terms = Terms(1, None, 9)
        return store.redescribe(
            job.id, name="t", terms=terms, reason="", prepare=lambda _: None, follows=earlier
        )

    assert not follow().passed_over
    store.hold(job.id, True)
    assert (follow(1).held, follow().held) == (True, True)
    with pytest.raises(StateError, match="job 2 cannot wait for itself"):
        follow(2)


def test_a_database_of_version_3_gets_stages(store: Store) -> None:
    add(store)
    with sqlite3.connect(store.path) as db:
        db.execute("DROP TABLE stages")
        db.execute("PRAGMA user_version=3")
    assert add(Store(store.home), 1).blockers == ((1, State.QUEUED),)
