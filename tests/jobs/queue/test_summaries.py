"""How far jobs are is known without reading all that they wrote."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.queue.job_list import JobList, Progress, keep_summary, progress, progress_of, report_of
from jobs.queue.states import State
from jobs.run import eventlog
from jobs.run.eventlog import EventLog, RunReport, read_end, read_report
from jobs.run.rundir import event
from tests.support.tui.made_up_runs import add_job, append_events, write_facts, write_steps

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Store


class Reads:
    """The event files that are opened, and the bytes that are read of them."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.bytes = 0

    def open(self, path: Any, mode: str) -> Any:
        self.opened.append(str(path))
        reads = self

        class Counted(io.FileIO):
            def read(self, size: int | None = -1, /) -> bytes:
                data = super().read(-1 if size is None else size)
                reads.bytes += len(data)
                return data

        return Counted(path, mode)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counted = Reads()
    monkeypatch.setattr(eventlog, "open", counted.open, raising=False)
    return counted


def test_of_an_ended_job_nothing_is_read_again(store: Store, reads: Reads) -> None:
    jobs = [add_job(store, f"old-{n}", state=State.COMPLETED) for n in range(3)]
    for job in jobs:
        write_steps(job, 30)
        write_facts(job)
    keep_summary(store, jobs[0])  # as its supervisor does; the others ended without one
    expected = {job.id: progress(job) for job in jobs}
    reads.opened.clear()
    assert progress_of(store, jobs) == expected
    assert len(set(reads.opened)) == 2
    reads.opened.clear()
    assert progress_of(store, jobs) == expected
    report = report_of(store, jobs[0])
    assert reads.opened == []
    assert report == read_report(jobs[0].run_dir)
    assert report.sharding


def test_no_more_files_are_read_than_asked_for(store: Store, reads: Reads) -> None:
    jobs = [add_job(store, f"old-{n}", state=State.COMPLETED) for n in range(5)]
    assert len(progress_of(store, jobs, most=2)) == 2
    assert len(set(reads.opened)) <= 2
    assert len(progress_of(store, jobs, most=2)) == 4
    assert len(progress_of(store, jobs)) == 5


def test_a_job_that_was_resumed_is_read_again(store: Store) -> None:
    job = add_job(store, state=State.COMPLETED)
    write_steps(job, 30)
    report_of(store, job)
    assert progress_of(store, [job])[job.id].step == 30
    store.requeue(job.id, "resumed")
    store.claim(job.id, [], "starting")
    write_steps(job, 10, first=31)
    append_events(job, event("warning", message="late"))
    assert progress_of(store, [store.get(job.id)])[job.id].step == 40
    store.change(job.id, State.COMPLETED, "again")
    again = store.get(job.id)
    assert progress_of(store, [again])[job.id].step == 40
    assert report_of(store, again).warnings[-1] == "late"


def test_of_a_running_job_only_what_is_new_is_read(
    store: Store, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.queue.job_list._WORTH_KEEPING", 1)
    job = add_job(store, state=State.RUNNING)
    append_events(job, event("warning", message="early"))
    write_steps(job, 3000)
    size = job.run_dir.events.stat().st_size
    assert report_of(store, job).warnings == ("early",)
    reads.bytes = 0
    append_events(job, event("warning", message="late"))
    assert report_of(store, job).warnings == ("early", "late")
    assert reads.bytes < size / 5, "what is new, and the end for the newest steps"
    reads.bytes = 0
    assert progress_of(store, [job])[job.id].step == 3000
    assert reads.bytes <= eventlog._FIRST_READ


def test_steps_of_epochs_are_what_the_ranks_say(store: Store) -> None:
    """The database does not know them before the data is counted."""
    job = add_job(store, state=State.RUNNING, total_steps=0)
    write_steps(job, 30, seconds=2.0)
    assert (progress(job).total_steps, progress(job).eta) == (None, None)
    job.run_dir.rank_file(0).parent.mkdir(parents=True, exist_ok=True)
    for text in ("", "[]", '{"rank": 0}', '{"total_steps": null}', '{"total_steps": -3}'):
        job.run_dir.rank_file(0).write_text(text)
        assert progress(job).total_steps is None
    job.run_dir.rank_file(0).write_text('{"total_steps": 75}')
    assert progress(job) == progress_of(store, [job])[job.id]
    assert (progress(job).total_steps, progress(job).eta) == (75, pytest.approx(90, rel=0.5))
    store.change(job.id, State.COMPLETED, "")
    keep_summary(store, store.get(job.id))
    job.run_dir.rank_file(0).unlink()
    assert progress_of(store, [store.get(job.id)])[job.id].total_steps == 75, "kept with the rest"


def test_summaries_of_an_older_version_are_read(store: Store) -> None:
    job = add_job(store, state=State.COMPLETED)
    write_steps(job, 5)
    keep_summary(store, job)
    with store.write() as db:
        db.execute("UPDATE summaries SET progress='[4, 0.5, 0.25, null]'")
    assert progress_of(store, [job])[job.id] == Progress(4, 0.5, 0.25)


def test_what_is_kept_may_be_damaged(store: Store) -> None:
    job = add_job(store, state=State.COMPLETED)
    write_steps(job, 5)
    expected = report_of(store, job)
    for text in ("", "{", "[]", '{"offset": -1}', '{"notes": 3}', "9" * 5000):
        with store.write() as db:
            db.execute("UPDATE summaries SET progress=?, report=?", (text, text))
        assert progress_of(store, [job])[job.id].step == 5
        assert report_of(store, job) == expected


def test_who_only_looks_keeps_nothing(store: Store) -> None:
    job = add_job(store, state=State.COMPLETED)
    store.read_only = True
    assert progress_of(store, [job]) == {job.id: Progress()}
    assert report_of(store, job) == RunReport()
    with store.connect() as db:
        assert not db.execute("SELECT * FROM summaries").fetchall()


LINES = st.one_of(
    st.integers(0, 60).map(lambda n: event("step", step=n, loss=float(n), seconds=n / 8)),
    st.integers(0, 60).map(lambda n: event("start", step=n)),
    st.integers(0, 200).map(lambda n: event("warning", message="x" * n)),
    st.just("no JSON\n"),
    st.integers(0, 60).map(  # of a file that was damaged
        lambda n: event("end").replace("}", f', "kind": "step", "step": {n}, "loss": 1}}')
    ),
)


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(LINES, max_size=120), first=st.integers(1, 900))
def test_the_end_has_exactly_the_last_steps_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], first: int
) -> None:
    path = tmp_path_factory.mktemp("end") / "events.jsonl"
    path.write_text("".join(lines))
    whole = EventLog(path).read_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eventlog, "_FIRST_READ", first)
        end = read_end(path)
    assert end.steps[-20:] == whole.steps[-20:]
    assert end.seconds_per_step() == whole.seconds_per_step()


def test_the_list_is_the_same_until_somebody_writes(store: Store, tmp_path: Path) -> None:
    listed = JobList(store)
    assert listed.look() == []
    job = add_job(store)
    first = listed.look()
    assert [one.id for one in first] == [job.id]
    assert listed.look() is first
    store.explain(job.id, "waits")
    assert listed.look()[0].reason == "waits"
    # A repaired database takes the place of the old one.
    with store.connect() as db:
        db.execute("VACUUM INTO ?", (str(tmp_path / "new.db"),))
    (tmp_path / "new.db").rename(store.path)
    store.move(job.id, priority=7)
    assert listed.look()[0].priority == 7
    listed.close()
    assert listed.look()[0].priority == 7
