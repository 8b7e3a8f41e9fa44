"""Who is alive: identity, ending, and finding processes by the mark in their environment."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import psutil
import pytest

from jobs.machine import processes
from jobs.machine.processes import ProcessId
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

_READY = "import sys, time, signal, os; {setup}; print('ready', flush=True); signal.pause()"


class Children:
    """Starts sleeping processes and ends them all at the end of the test."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[str]] = []

    def start(self, setup: str = "pass", run_id: str | None = None) -> ProcessId:
        """A process that has done its `setup` and now sleeps."""
        mark = {processes.RUN_ID_VARIABLE: run_id} if run_id else {}
        child = subprocess.Popen(
            [sys.executable, "-c", _READY.format(setup=setup)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | mark,
        )
        self.all.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        identity = ProcessId.of(child.pid)
        assert identity is not None
        return identity

    def end_all(self) -> None:
        for child in self.all:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.end_all()


IGNORE_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def state_of(pid: int) -> str:
    return str(psutil.Process(pid).status())


# -- identity ------------------------------------------------------------------------------


def test_a_process_knows_itself() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive()
    assert me == ProcessId.of(os.getpid())


def test_there_is_no_such_process(children: Children) -> None:
    gone = children.start()
    children.end_all()
    assert ProcessId.of(gone.pid) is None
    assert not gone.alive()
    assert not gone.signal(signal.SIGTERM)


def test_a_pid_that_now_belongs_to_another_is_not_the_same_process(children: Children) -> None:
    identity = children.start()
    other = dataclasses.replace(identity, started=identity.started - 60)
    assert not other.alive()
    assert not other.signal(signal.SIGKILL)
    assert processes.end([other], grace=0) == []
    assert identity.alive(), "the stranger was not touched"


def test_a_signal_is_sent_to_the_very_process(children: Children) -> None:
    identity = children.start()
    assert identity.signal(signal.SIGTERM)
    assert children.all[0].wait(PATIENCE) == -signal.SIGTERM


def test_identity_survives_the_database(children: Children) -> None:
    """Start times go through SQLite and JSON as floats."""
    identity = children.start()
    assert ProcessId(identity.pid, float(repr(identity.started))).alive()


def test_a_zombie_is_not_alive(children: Children) -> None:
    identity = children.start()
    os.kill(identity.pid, signal.SIGKILL)
    eventually(lambda: state_of(identity.pid) == psutil.STATUS_ZOMBIE)
    assert not identity.alive()
    assert not identity.signal(signal.SIGTERM)


# -- ending --------------------------------------------------------------------------------


def test_ending_asks_first(children: Children) -> None:
    saves = children.start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
    assert processes.end([saves], grace=PATIENCE) == []
    assert children.all[0].wait(PATIENCE) in (7, 0), "collected by us or by its Popen"
    assert not saves.alive()


class Clock:
    """The module `time`, on a clock that only moves when somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(0.001)


@pytest.mark.parametrize("deaf", [1, 3])
def test_ending_kills_who_does_not_listen(
    children: Children, monkeypatch: pytest.MonkeyPatch, deaf: int
) -> None:
    """All get the grace together, and not one after the other."""
    clock, killed = Clock(), []
    stock = ProcessId.signal

    def signal_(self: ProcessId, number: signal.Signals) -> bool:
        killed.extend([(self, clock.now)] if number is signal.SIGKILL else [])
        return stock(self, number)

    monkeypatch.setattr(processes, "time", clock)
    monkeypatch.setattr(ProcessId, "signal", signal_)
    polite, *others = children.start(), *(children.start(IGNORE_TERM) for _ in range(deaf))
    assert processes.end([*others, polite], grace=0.2, timeout=1e9) == []
    times = {who: when for who, when in killed if who != polite}
    assert set(times) == set(others)
    assert all(0.2 <= when < 0.3 for when in times.values()), times
    assert not polite.alive()
    assert not any(who.alive() for who in others)


def test_without_grace_nobody_is_asked(children: Children, tmp_path: object) -> None:
    note = f"{tmp_path}/asked"
    asked = children.start(f"signal.signal(signal.SIGTERM, lambda *_: open({note!r}, 'w').close())")
    assert processes.end([asked], grace=0) == []
    assert not asked.alive()
    assert not os.path.exists(note)


def test_a_stopped_process_can_be_ended(children: Children) -> None:
    frozen = children.start()
    os.kill(frozen.pid, signal.SIGSTOP)
    eventually(lambda: state_of(frozen.pid) == psutil.STATUS_STOPPED)
    assert frozen.alive()
    assert processes.end([frozen], grace=0.1) == []
    assert not frozen.alive()


def test_waiting_gives_up_and_tells_who_is_left(children: Children) -> None:
    stays = children.start()
    assert processes.wait_gone([stays], timeout=0.1) == [stays]
    assert processes.wait_gone([], timeout=5) == []


def test_reaping_leaves_alone_who_is_waited_for_by_hand(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAITED_FOR", set())
    mine, orphan = children.start(), children.start()
    processes.wait_for_by_hand(mine.pid)
    for identity in (mine, orphan):
        os.kill(identity.pid, signal.SIGKILL)
        eventually(lambda pid=identity.pid: state_of(pid) == psutil.STATUS_ZOMBIE)  # type: ignore[misc]
    processes.reap()
    assert not psutil.pid_exists(orphan.pid)
    assert children.all[0].wait(PATIENCE) == -signal.SIGKILL, "its exit status is still known"


# -- the mark of a run ---------------------------------------------------------------------


def test_processes_of_a_run_are_found_by_their_mark(children: Children) -> None:
    run_id = uuid.uuid4().hex
    marked = {children.start(run_id=run_id), children.start(run_id=run_id)}
    children.start(run_id=uuid.uuid4().hex)
    children.start(run_id=run_id + "0")
    children.start()
    assert set(processes.with_run_id(run_id)) == marked
    assert processes.with_run_id(uuid.uuid4().hex) == []


def test_the_mark_is_found_in_a_session_of_its_own(children: Children) -> None:
    """Torch elastic starts every rank so: no process group holds them together."""
    run_id = uuid.uuid4().hex
    identity = children.start("os.setsid()", run_id=run_id)
    assert os.getpgid(identity.pid) == identity.pid
    assert processes.with_run_id(run_id) == [identity]


def test_a_grandchild_carries_the_mark_and_an_ended_one_does_not_count(children: Children) -> None:
    run_id = uuid.uuid4().hex
    spawn = "import subprocess; subprocess.Popen(['sleep', '100000'])"
    parent = children.start(spawn, run_id=run_id)
    eventually(lambda: len(processes.with_run_id(run_id)) == 2)
    assert processes.end(processes.with_run_id(run_id), grace=0) == []
    assert processes.with_run_id(run_id) == []
    assert not parent.alive()


def test_orphans_of_a_subreaper_become_its_children() -> None:
    script = """
import os, sys, time, psutil
from jobs.machine import processes
assert processes.become_subreaper()
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.05)
        os._exit(0)
    os._exit(0)
while psutil.Process().children():
    processes.reap()
    time.sleep(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
