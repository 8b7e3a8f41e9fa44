"""What a supervisor decides, on a clock and processes that are made up.

Its life with real processes: `test_supervisor.py`.
"""

from __future__ import annotations

import signal
import sqlite3
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs import service
from jobs.backends.local import ranks as local
from jobs.backends.local import report as told
from jobs.backends.local.ranks import LocalRanks
from jobs.backends.local.report import DatabaseReport
from jobs.errors import UserError
from jobs.queue.states import State
from jobs.run import why_failed
from jobs.run.rundir import RankStatus
from jobs.supervise import supervisor
from jobs.supervise.port import Outcome
from jobs.supervise.supervisor import FAILURE_GRACE, TERM_GRACE, Supervisor

if TYPE_CHECKING:
    from jobs.queue.store import Job, Store
    from jobs.spec.job_spec import JobSpec


@dataclass
class World:
    """Time, and processes by pid, as the supervisor sees them."""

    now: float = 1000.0
    alive: set[int] = field(default_factory=set)
    signals: list[tuple[int, int]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def process(self, pid: int, started: float = 0.0) -> Any:
        return SimpleNamespace(
            pid=pid,
            alive=lambda: pid in self.alive,
            signal=lambda number: self.signals.append((pid, number)),
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    clock = SimpleNamespace(
        monotonic=lambda: made.now, time=lambda: made.now, sleep=made.sleep, strftime=time.strftime
    )
    for module in (supervisor, local, told):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(local, "ProcessId", made.process)
    return made


@pytest.fixture
def watch(
    store: Store, job_spec: JobSpec, no_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> Supervisor:
    """The supervisor of a job with two ranks; nothing runs."""
    monkeypatch.setattr("jobs.backends.local.dispatch._start_supervisor", lambda job: None)
    job = service.submit(store, job_spec)
    job.run_dir.create()
    job = store.get(job.id)
    report = DatabaseReport(store, job)
    return Supervisor(job.run_dir, LocalRanks(job, report), report)


def strand(watch: Supervisor, statuses: list[RankStatus]) -> None:
    """Look at ranks that wrote this, unless a test wrote something else."""
    spec = SimpleNamespace(num_processes=2, gpus=None, num_machines=1)
    attempt: Any = SimpleNamespace(launcher=None, spec=spec)
    for status in statuses:
        path = watch.run_dir.rank_file(status.rank)
        if not path.exists():
            path.write_text(status.to_json())
    watch._end_the_stranded(attempt, statuses)


def clean_up(watch: Supervisor, attempt: Any) -> bool:
    healthy = watch.failed_at is None and watch.hang is None
    return watch.ranks.clean_up(attempt, healthy=healthy, stop_request=watch._note_stop)


def job_of(watch: Supervisor) -> Job:
    assert isinstance(watch.ranks, LocalRanks)
    return watch.ranks.job


def rank(number: int) -> RankStatus:
    return RankStatus(
        rank=number,
        pid=100 + number,
        started=0.0,
        host="h",
        device="cpu",
        phase="train",
        step=3,
        heartbeat=0.0,
        progressed=0.0,
    )


# -- stopping ------------------------------------------------------------------------------------


def test_each_level_of_a_stop_asks_those_whom_it_should(
    watch: Supervisor,
    world: World,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher would end the ranks when it gets SIGTERM; they are to save first."""
    launcher, first, second = (world.process(pid) for pid in (300, 301, 302))
    monkeypatch.setattr(local.processes, "with_run_id", lambda run_id: [first, launcher, second])
    attempt: Any = SimpleNamespace(launcher=launcher, spec=SimpleNamespace(stop_grace_seconds=7.0))
    store.change(job_of(watch).id, State.STARTING, "starting")

    def after(level: int) -> tuple[int, str, float | None]:
        store.raise_stop_level(job_of(watch).id, level)
        watch._carry_out_stops(attempt, [])
        job = store.get(job_of(watch).id)
        assert job.state is State.STOPPING
        return watch.stop_level, job.reason, watch.deadline

    assert after(1) == (1, "stops after the current step, with a checkpoint", world.now + 7.0)
    assert watch.run_dir.requested("stop")
    assert world.signals == []
    assert after(2) == (2, "SIGTERM sent", world.now + TERM_GRACE)
    assert world.signals == [(301, signal.SIGTERM), (302, signal.SIGTERM)]
    assert "SIGTERM to [301, 302]" in capsys.readouterr().err
    world.signals.clear()
    assert after(3) == (3, "SIGKILL sent", None)
    assert world.signals == [(pid, signal.SIGKILL) for pid in (301, 300, 302)]
    attempt.launcher = None  # one that was adopted after its launcher had gone
    world.signals.clear()
    watch.ranks.kill(attempt)
    assert world.signals == [(pid, signal.SIGKILL) for pid in (301, 300, 302)]


# -- ranks that wait for a failed one ------------------------------------------------------------


def test_ranks_that_wait_for_one_that_is_gone_are_ended_after_a_while(
    watch: Supervisor, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [rank(0), rank(1)]
    world.alive = {100, 101}
    strand(watch, ranks)
    assert watch.failed_at is None, "all of them train"
    world.alive = {101}
    strand(watch, ranks)
    assert watch.failed_at == world.now
    world.now += FAILURE_GRACE - 0.1
    strand(watch, ranks)
    assert (world.signals, watch.ended_by_us) == ([], set()), "it may end by itself"
    world.now += 0.1
    strand(watch, ranks)
    assert (world.signals, watch.ended_by_us) == ([(101, signal.SIGKILL)], {1})
    assert "ending ranks that wait for a failed one: [1]" in capsys.readouterr().err


def test_a_rank_that_said_why_it_fails_is_not_one_that_waits(
    watch: Supervisor,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world.alive = {100, 101}
    errors: list[dict[str, Any]] = [{"rank": 0, "type": "ValueError"}]
    monkeypatch.setattr(type(watch.run_dir), "rank_errors", lambda self: errors)
    strand(watch, [rank(0), rank(1)])
    assert watch.failed_at == world.now, "though all of them live"
    world.now += FAILURE_GRACE
    strand(watch, [rank(0), rank(1)])
    assert watch.ended_by_us == {1}
    errors.append({"rank": 1, "type": "ValueError"})
    watch.ended_by_us.clear()
    capsys.readouterr()
    strand(watch, [rank(0), rank(1)])
    assert watch.ended_by_us == set()
    assert capsys.readouterr().err == "", "there is nothing to say"


def test_a_rank_that_never_came_up_waits_for_a_failed_one_too(
    watch: Supervisor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an allocation, where a container starts late: nobody else would end it."""
    killed: list[set[int]] = []
    monkeypatch.setattr(watch.ranks, "gone", lambda statuses: {1})
    monkeypatch.setattr(watch.ranks, "kill", lambda attempt, ranks: killed.append(ranks))
    for _ in range(2):
        strand(watch, [rank(1)])
        world.now += FAILURE_GRACE
    assert killed == [{0}]


def test_a_rank_that_came_to_its_end_after_the_look_has_not_failed(
    watch: Supervisor, world: World
) -> None:
    """It read «train», then the rank wrote «end» and was gone; rank 0 still writes its export."""
    seen = [rank(0), rank(1)]
    watch.run_dir.rank_file(1).write_text(replace(rank(1), phase="end").to_json())
    world.alive = {100}
    strand(watch, seen)
    assert watch.failed_at is None
    watch.run_dir.rank_file(1).write_text(rank(1).to_json())
    strand(watch, seen)
    assert watch.failed_at == world.now, "it was training when it died"


def test_ranks_that_have_all_ended_have_not_failed(watch: Supervisor, world: World) -> None:
    strand(watch, [rank(0), rank(1)])
    assert watch.failed_at is None


# -- a job that stands still ---------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["rank 1 waits in all_reduce", None])
def test_a_job_that_stands_still_is_ended_once_its_stacks_are_written(
    watch: Supervisor,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wait: str | None,
) -> None:
    found = SimpleNamespace(reason="stood still")
    monkeypatch.setattr(supervisor, "find_hang", lambda *_: found)
    monkeypatch.setattr(why_failed, "find_wait", lambda run_dir: wait)
    attempt: Any = SimpleNamespace(
        launcher=world.process(300), spec=SimpleNamespace(hang_timeout=9.0)
    )
    ranks: list[Any] = [SimpleNamespace(status=rank(number)) for number in (0, 1)]
    for name, value in (("failed_at", 1.0), ("stop_level", 1), ("hang", "before")):
        before = getattr(watch, name)
        setattr(watch, name, value)
        watch._end_a_hang(attempt, ranks)
        assert world.signals == [], "it is ended for another reason"
        setattr(watch, name, before)
    monkeypatch.setattr(
        local.processes, "with_run_id", lambda run_id: [world.process(100), world.process(101)]
    )
    begun = world.now
    watch._end_a_hang(attempt, ranks)
    assert watch.hang == ("stood still; rank 1 waits in all_reduce" if wait else "stood still")
    assert world.now == begun + supervisor.STACK_DUMP_TIME
    assert world.signals == [
        (100, signal.SIGUSR1),
        (101, signal.SIGUSR1),
        (100, signal.SIGKILL),
        (101, signal.SIGKILL),
        (300, signal.SIGKILL),
    ]
    lines = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    said = ["hang: stood still", *([f"hang: {wait}"] if wait else [])]
    assert lines == [*said, "SIGKILL to [100, 101, 300]"]


def test_a_job_that_moves_on_is_left_alone(
    watch: Supervisor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "find_hang", lambda *_: None)
    attempt: Any = SimpleNamespace(launcher=None, spec=SimpleNamespace(hang_timeout=9.0))
    still: Any = SimpleNamespace(status=rank(0))
    watch._end_a_hang(attempt, [still])
    assert (watch.hang, world.signals) == (None, [])


def test_records_that_cannot_be_read_keep_no_rank_alive(
    watch: Supervisor,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(run_dir: Any) -> str:
        raise KeyError("version")

    monkeypatch.setattr(supervisor, "find_hang", lambda *_: SimpleNamespace(reason="stood still"))
    monkeypatch.setattr(why_failed, "find_wait", fail)
    attempt: Any = SimpleNamespace(launcher=None, spec=SimpleNamespace(hang_timeout=9.0))
    still: Any = SimpleNamespace(status=rank(0))
    monkeypatch.setattr(local.processes, "with_run_id", lambda run_id: [world.process(100)])
    watch._end_a_hang(attempt, [still])
    assert watch.hang == "stood still"
    assert world.signals == [(100, signal.SIGUSR1), (100, signal.SIGKILL)]
    assert "cannot read the flight records: KeyError: 'version'" in capsys.readouterr().err


# -- what the launcher left ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "before", "patience", "interrupted"),
    [
        (2, {}, 30.0, True),  # all ranks: they can still save
        (3, {}, 30.0, True),  # and a process of one's own
        (1, {}, 2.0, False),
        (2, {"failed_at": 1.0}, 2.0, False),
        (2, {"hang": "stood still"}, 2.0, False),
        (2, {"stop_level": 1}, 30.0, True),
        (2, {"stop_level": 2}, 30.0, False),
        (2, {"stop_level": 3}, 0.0, False),  # the person will not wait
    ],
)
def test_ranks_that_are_all_there_get_the_time_to_save(
    watch: Supervisor,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
    before: dict[str, Any],
    patience: float,
    interrupted: bool,
) -> None:
    some = [world.process(200 + number) for number in range(left)]
    ended: list[int] = []

    def wait_gone(processes: list[Any], seconds: float) -> list[Any]:
        world.now += seconds
        return processes

    def end(processes: list[Any], grace: float) -> list[Any]:
        assert grace == 0
        ended.extend(one.pid for one in processes)
        return []

    monkeypatch.setattr(local.processes, "with_run_id", lambda run_id: some)
    monkeypatch.setattr(local.processes, "wait_gone", wait_gone)
    monkeypatch.setattr(local.processes, "end", end)
    for name, value in before.items():
        setattr(watch, name, value)
    attempt: Any = SimpleNamespace(spec=SimpleNamespace(stop_grace_seconds=30.0))
    begun = world.now
    orphaned = clean_up(watch, attempt)
    assert world.now - begun == pytest.approx(patience, abs=0.25)
    assert (orphaned and watch.stop_level < 2) is interrupted
    pids = [one.pid for one in some]
    assert world.signals == [(pid, signal.SIGTERM) for pid in pids]
    assert ended == pids


def test_nobody_is_waited_for_longer_than_the_longest_grace(
    watch: Supervisor,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    some = [world.process(200), world.process(201)]
    monkeypatch.setattr(local.processes, "with_run_id", lambda run_id: some)
    monkeypatch.setattr(
        local.processes, "wait_gone", lambda left, seconds: (world.sleep(seconds), left)[1]
    )
    monkeypatch.setattr(local.processes, "end", lambda left, grace: left[:1])
    attempt: Any = SimpleNamespace(spec=SimpleNamespace(stop_grace_seconds=10 * TERM_GRACE))
    clean_up(watch, attempt)
    assert world.now - 1000.0 == pytest.approx(TERM_GRACE, abs=0.25)
    assert "still alive after SIGKILL: [200]" in capsys.readouterr().err


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UserError("no such key"), "could not start: no such key"),
        (ValueError("a mistake"), "its supervisor failed: ValueError: a mistake"),
    ],
)
def test_a_supervisor_that_fails_leaves_no_process_of_the_run(
    watch: Supervisor,
    store: Store,
    error: Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> None:
        raise error

    ended: list[Any] = []
    monkeypatch.setattr(watch.ranks, "adopt", fails)
    monkeypatch.setattr(local.processes, "with_run_id", lambda run_id: [run_id])
    monkeypatch.setattr(local.processes, "end", lambda some, *, grace: ended.append(some))
    store.change(job_of(watch).id, State.STARTING, "starting")
    watch.run()
    assert ended == [[job_of(watch).run_id]]
    job = store.get(job_of(watch).id)
    assert (job.state, job.reason) == (State.FAILED, reason)


def test_logs_are_kept_short_and_a_disk_that_fills_is_told_once_a_while(
    watch: Supervisor, world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.change(job_of(watch).id, State.STARTING, "starting")
    store.change(job_of(watch).id, State.RUNNING, "all ranks are up")
    looked: list[float] = []
    monkeypatch.setattr(supervisor, "cap_logs", lambda run_dir: looked.append(world.now) or [])
    monkeypatch.setattr(supervisor, "space_warning", lambda run_dir: "the disk is nearly full")
    watch.state = State.RUNNING
    for _ in range(3):
        watch._housekeep()
        world.sleep(supervisor.HOUSEKEEPING_EVERY * 0.6)
    assert looked == [1000.0, 1000.0 + 2 * supervisor.HOUSEKEEPING_EVERY * 0.6]
    assert store.get(job_of(watch).id).reason == "warning: the disk is nearly full"


def test_an_end_that_cannot_be_recorded_is_recorded_later(
    watch: Supervisor,
    world: World,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a full disk. Else the state would lie until someone looks."""
    change, tries = store.change, 0

    def fails_twice(*words: Any, **more: Any) -> bool:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise sqlite3.OperationalError("database or disk is full")
        return change(*words, **more)

    store.change(job_of(watch).id, State.STARTING, "starting")
    monkeypatch.setattr(store, "change", fails_twice)
    watch._finish(Outcome(State.FAILED, "the reason"))
    job = store.get(job_of(watch).id)
    assert (job.state, job.reason) == (State.FAILED, "the reason")
    assert world.now == 1002.0, "a second between two tries"
    said = capsys.readouterr().err
    assert "failed: the reason\n" in said
    assert said.count("could not record the end: database or disk is full\n") == 2
