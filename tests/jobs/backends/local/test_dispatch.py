"""Moving the queue: what starts, what waits and why, what is mended. No process is started."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import signal
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.backends.local import dispatch as dispatching
from jobs.backends.local.dispatch import dispatch, look, needs_attention, why_silent
from jobs.machine.devices import Gpu
from jobs.machine.processes import ProcessId
from jobs.machine.procfs import is_waiting_for_kernel, switches
from jobs.machine.residence import read_residence
from jobs.queue.states import State
from jobs.queue.store import Store, Terms
from tests.support.tui.made_up_runs import add_job
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jobs.queue.store import Job


pytestmark = pytest.mark.usefixtures("no_gpus", "started")


@pytest.fixture
def add(store: Store) -> Callable[..., int]:
    def queue(wanted: int | list[str] | None = None, **changes: Any) -> int:
        terms = Terms(ranks=1, wanted=wanted, total_steps=10, **changes)
        return store.add(
            name="t", terms=terms, run_id="r", prepare=lambda run_dir: run_dir.create()
        ).id

    return queue


def have_gpus(monkeypatch: pytest.MonkeyPatch, *indices: int) -> None:
    gpus = [Gpu(index=n, uuid=f"GPU-{n}", name="H", memory_total=1) for n in indices]
    monkeypatch.setattr("jobs.machine.devices.gpus", lambda: gpus)


def run_as_me(store: Store, job_id: int) -> None:
    """The job runs, and this very process is its supervisor."""
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert store.take_over(job_id, store.get(job_id).supervisor, me)
    store.change(job_id, State.RUNNING, "all ranks are up")


def states(store: Store) -> dict[int, str]:
    return {job.id: str(job.state) for job in store.all()}


def test_one_job_at_a_time_runs_on_the_cpu(
    store: Store, add: Callable[..., int], started: list[int]
) -> None:
    first, second = add(), add()
    dispatch(store)
    assert started == [first]
    assert store.get(first).reason == "starting on CPU ranks"
    assert store.get(second).reason == f"waiting for job {first} to free the CPU"
    run_as_me(store, first)
    dispatch(store)
    assert started == [first], "nothing changed"
    store.change(first, State.COMPLETED, "")
    dispatch(store)
    assert started == [first, second]


@pytest.mark.parametrize(("slots", "count"), [("2", 2), ("9", 3), ("0", 1), ("many", 1)])
def test_the_person_may_allow_more_on_the_cpu(
    store: Store,
    add: Callable[..., int],
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
    slots: str,
    count: int,
) -> None:
    monkeypatch.setenv("FSDP_TUI_CPU_JOBS", slots)
    ids = [add() for _ in range(3)]
    dispatch(store)
    assert started == ids[:count]


def test_jobs_get_gpus_of_their_own(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, 0, 1, 2)
    named, any_two, late = add(["GPU-1"]), add(2), add(1)
    dispatch(store)
    assert started == [named, any_two]
    assert store.claims() == {"GPU-1": named, "GPU-0": any_two, "GPU-2": any_two}
    assert store.get(any_two).gpus == ["GPU-0", "GPU-2"]
    assert store.get(late).reason == (
        f"waiting for 1 GPU (0 available; job {named} on GPU 1, job {any_two} on GPUs 0,2)"
    )


def test_gpus_are_told_as_people_number_them(
    store: Store, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA_VISIBLE_DEVICES=2,3, as `gpus`, `show` and the job file have it."""
    have_gpus(monkeypatch, 2, 3)
    first, second = add(["GPU-3"]), add(["GPU-3"])
    dispatch(store)
    assert store.get(first).reason == "starting on GPU 3"
    assert store.get(second).reason == f"waiting for job {first} on GPU 3"


def test_a_gpu_that_vanished_is_waited_for(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, 0)
    job = add(["GPU-7"])
    dispatch(store)
    assert started == []
    assert "GPU-7, which this machine does not have" in store.get(job).reason


def test_a_held_job_and_a_paused_queue_start_nothing(
    store: Store, add: Callable[..., int], started: list[int]
) -> None:
    assert look(store) is False
    held, next_one = add(), add()
    assert needs_attention(store) is True
    store.hold(held, True)
    store.pause(True)
    dispatch(store)
    assert started == []
    assert "held" in store.get(held).reason
    assert "paused" in store.get(next_one).reason
    store.pause(False)
    dispatch(store)
    assert started == [next_one]
    store.change(next_one, State.COMPLETED, "")
    store.hold(held, False)
    dispatch(store)
    assert started == [next_one, held]


def test_a_job_whose_model_is_not_here_yet_waits_and_fails_if_it_cannot_come(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add()
    forgotten: list[Path] = []
    answer = ("waits for FLUX.1-dev", False)
    monkeypatch.setattr(dispatching, "why_waiting", lambda run_dir: answer)
    monkeypatch.setattr(dispatching, "forget", lambda run_dir: forgotten.append(run_dir.root))
    dispatch(store)
    assert (store.get(job).state, store.get(job).reason) == (State.QUEUED, answer[0])
    assert forgotten == []
    answer = ("FLUX.1-dev was not found", True)
    dispatch(store)
    assert (store.get(job).state, store.get(job).reason) == (State.FAILED, answer[0])
    assert (started, forgotten) == ([], [store.get(job).run_dir.root])


def test_many_that_dispatch_at_once_start_a_job_once(
    store: Store, add: Callable[..., int], started: list[int]
) -> None:
    job = add()
    barrier = threading.Barrier(6)

    def look() -> None:
        barrier.wait(PATIENCE)
        dispatch(Store(store.home))

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert started == [job]


def test_there_is_nothing_to_do(store: Store, add: Callable[..., int], started: list[int]) -> None:
    assert not needs_attention(store)
    dispatch(store)
    job = add()
    assert needs_attention(store)
    dispatch(store)
    assert not needs_attention(store), "its supervisor was started a moment ago"
    run_as_me(store, job)
    assert not needs_attention(store)
    store.change(job, State.STOPPED, "")
    assert not needs_attention(store)
    assert started == [job]


def test_a_supervisor_that_died_is_replaced(
    store: Store, add: Callable[..., int], started: list[int]
) -> None:
    job = add()
    dispatch(store)
    dead = ProcessId(os.getpid(), 1000.0)  # the pid was given to someone else
    assert store.take_over(job, None, dead)
    assert needs_attention(store)
    dispatch(store)
    assert started == [job, job]


def test_a_supervisor_that_never_came_is_replaced_after_a_while(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add()
    dispatch(store)
    dispatch(store)
    assert started == [job]
    later = time.time() + dispatching._SUPERVISOR_STARTS_WITHIN + 1
    clock = SimpleNamespace(time=lambda: later, monotonic=time.monotonic)
    monkeypatch.setattr(dispatching, "time", clock)
    assert needs_attention(store)
    dispatch(store)
    assert started == [job, job]


# -- after a reboot ------------------------------------------------------------------------


def reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    """No supervisor of the earlier boot is alive, and the kernel gives another id."""
    monkeypatch.setattr("jobs.machine.residence.boot_id", lambda: "another-boot")


def interrupted(store: Store, add: Callable[..., int], **changes: Any) -> Job:
    job = add(**changes)
    dispatch(store)
    store.take_over(job, None, ProcessId(os.getpid(), 1000.0))
    store.change(job, State.RUNNING, "")
    return store.get(job)


def test_after_a_reboot_what_ran_is_lost_and_what_waited_starts(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = interrupted(store, add)
    waiting = add()
    reboot(monkeypatch)
    assert needs_attention(store)
    dispatch(store)
    job = store.get(lost.id)
    assert (job.state, job.reason) == (State.LOST, "the machine rebooted")
    assert job.ended is not None
    assert started == [lost.id, waiting]
    assert read_residence(store.get(waiting).boot_id).boot == "another-boot"


def test_after_a_reboot_gpus_are_free_again(
    store: Store, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, 0)
    interrupted(store, add, wanted=1)
    assert store.claims()
    reboot(monkeypatch)
    dispatch(store)
    assert store.claims() == {}


def test_after_a_reboot_a_job_goes_on_by_itself_if_it_asked_to(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = interrupted(store, add, auto_resume=True)
    reboot(monkeypatch)
    dispatch(store)
    assert [c.after for c in store.history(job.id)][-3:] == ["lost", "queued", "starting"]
    assert store.get(job.id).attempt == 1
    assert started == [job.id, job.id]


def test_after_a_reboot_a_job_that_was_being_stopped_stays_stopped(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = interrupted(store, add, auto_resume=True)
    store.raise_stop_level(job.id, 1)
    store.change(job.id, State.STOPPING, "")
    reboot(monkeypatch)
    dispatch(store)
    assert store.get(job.id).state.ended
    assert started == [job.id]


def test_a_machine_that_does_not_tell_its_boot_loses_nothing(
    store: Store, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add()
    dispatch(store)
    run_as_me(store, job)
    monkeypatch.setattr("jobs.machine.residence.boot_id", lambda: None)
    dispatch(store)
    assert states(store) == {job: "running"}


def test_a_queue_that_another_keeps_is_not_waited_for_without_end(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "_QUEUE_IS_FREE_WITHIN", 0.05)
    job = add()
    with open(store.home / "dispatch.lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        dispatch(store)  # before the other process has written its id
        assert store.get(job).reason == "another process holds the queue and does not respond"
        held.write("4321")
        held.flush()
        dispatch(store)
        assert store.get(job).reason == "process 4321 holds the queue and does not respond"
        assert started == []
    dispatch(store)
    assert started == [job]


def test_the_driver_is_asked_before_the_queue_is_taken(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpus() -> list[Gpu]:
        with open(store.home / "dispatch.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
        return [Gpu(index=0, uuid="GPU-0", name="H", memory_total=1)]

    monkeypatch.setattr("jobs.machine.devices.gpus", gpus)
    job = add(1)
    dispatch(store)
    assert started == [job]


# -- a supervisor that the kernel does not let go on -----------------------------------------

_BLOCKED = """
#include <unistd.h>
int main(void) {
    if (vfork() == 0) { write(1, "x", 1); pause(); _exit(0); }  /* waits for its child in state D */
    return 0;
}
"""


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[ProcessId]:
    """A process that waits for the kernel, whatever signal it is sent but SIGKILL."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "blocked.c").write_text(_BLOCKED)
    program = str(tmp_path / "blocked")
    subprocess.run(["cc", "-w", "-o", program, f"{program}.c"], check=True)
    process = subprocess.Popen([program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.read(1)
    identity = ProcessId.of(process.pid)
    assert identity is not None
    eventually(lambda: is_waiting_for_kernel(process.pid))
    yield identity
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_blocked_supervisor_is_told_of_and_done_without(
    store: Store, blocked: ProcessId, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(store, state=State.RUNNING)
    assert store.take_over(job.id, None, blocked)
    ranks = [blocked]
    monkeypatch.setattr("jobs.backends.local.dispatch.processes.with_run_id", lambda run_id: ranks)
    dispatch(store)
    assert store.get(job.id).reason == "all ranks are up", "waiting for a moment is usual"
    _, since = dispatching._blocked[blocked]
    clock = SimpleNamespace(monotonic=lambda: since + 9.9, time=time.time)
    monkeypatch.setattr(dispatching, "time", clock)
    assert not needs_attention(store)
    clock.monotonic = lambda: since + 10.0
    assert needs_attention(store)
    with monkeypatch.context() as changed:
        changed.setattr(ProcessId, "suspended", lambda self: True)
        assert why_silent(blocked) == "is suspended and does not respond"
    dispatch(store)
    said = f"its supervisor (process {blocked.pid}) is blocked in the kernel, for example by a disk"
    assert store.get(job.id).reason == f"{said} that does not respond; its ranks keep running"
    assert started == []
    store.raise_stop_level(job.id, 1)
    dispatch(store)
    assert blocked.is_dead()
    assert started == [job.id]


def test_a_process_that_is_being_killed_is_as_good_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert not me.is_dead()
    assert switches(me.pid) is not None
    assert switches(2**22) is None
    status = {b"SigPnd": b"0" * 16, b"ShdPnd": b"0000000000000100"}
    monkeypatch.setattr(
        "jobs.machine.procfs._status", lambda pid, *names: [status[name] for name in names]
    )
    assert me.is_dead()
    status[b"ShdPnd"] = b"0000000000004000"  # SIGTERM
    assert not me.is_dead()


def test_a_full_disk_keeps_nobody_from_taking_the_queue(
    store: Store, add: Callable[..., int], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked to hold a process number that is only shown."""

    class Full(io.FileIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dispatching, "open", lambda path, *_, **__: Full(path, "a+"), raising=False)
    job = add()
    dispatch(store)
    assert started == [job]
