"""A laboratory for jobs: the real supervisor with fake ranks, and ways to disturb them."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs import service
from jobs.machine.processes import ProcessId, with_run_id
from jobs.queue.states import ACTIVE, State
from jobs.run.eventlog import EventLog
from jobs.run.rundir import read_json
from jobs.spec.file.load import load_spec
from tests.support.jobs.fakes.supervise import start_nothing, start_supervisor
from tests.support.left_over import end_all_of, name_of, processes_of
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from jobs.queue.store import Job, Store

ENDLESS = 100_000  # steps


@dataclass
class Lab:
    """Jobs of fake ranks, and ways to disturb them."""

    store: Store
    values: dict[str, Any]
    monkeypatch: pytest.MonkeyPatch
    gates: Path

    def set(self, **environment: str) -> None:
        """`ranks="1:crash@2"` sets FAKE_RANKS, and so on; inherited by what starts from now on."""
        for name, value in environment.items():
            self.monkeypatch.setenv(f"FAKE_{name.upper()}", value)

    def submit(self, **changes: Any) -> Job:
        return service.submit(self.store, load_spec(None, self.values | changes))

    def submit_unsupervised(self, **changes: Any) -> Job:
        """A job that is `starting`, with nobody there yet who starts it; see `start_supervisor`."""
        with self.monkeypatch.context() as patch:
            start_nothing(patch)
            return self.submit(**changes)

    def get(self, job: Job) -> Job:
        return self.store.get(job.id)

    def wait(self, job: Job, *states: State, look: bool = False) -> Job:
        """Until the job is in one of these states; with `look`, someone looks at it meanwhile."""

        def reached() -> bool:
            if look:
                service.refresh(self.store)
            now = self.get(job)
            assert now.state in states or not now.state.ended, f"{now.state}: {now.reason}"
            return now.state in states

        eventually(reached, told=lambda: self.get(job))
        return self.get(job)

    def wait_for_step(self, job: Job, step: int) -> None:
        eventually(lambda: self.step(job) >= step, told=lambda: self.get(job))

    def wait_for_ranks(self, job: Job, number: int) -> None:
        """Until they are there, and the launch is recorded: what is not is launched again."""
        eventually(
            lambda: len(job.run_dir.rank_statuses()) == number and job.run_dir.launch_file.exists(),
            told=lambda: self.get(job),
        )

    def running(self, **changes: Any) -> Job:
        """A job that trains, and would do so for hours."""
        job = self.submit(**{"max_train_steps": ENDLESS} | changes)
        self.wait(job, State.RUNNING)
        self.wait_for_step(job, 2)
        return self.get(job)

    def step(self, job: Job) -> int:
        last = EventLog(job.run_dir.events).read_all().last
        return last.step if last else 0

    def launcher(self, job: Job) -> ProcessId:
        record = read_json(job.run_dir.launch_file)
        assert record is not None
        return ProcessId(*record["launcher"])

    def rank(self, job: Job, number: int) -> ProcessId:
        status = next(s for s in job.run_dir.rank_statuses() if s.rank == number)
        return ProcessId(status.pid, status.started)

    def supervisor(self, job: Job) -> ProcessId:
        found = self.get(job).supervisor
        assert found is not None
        return found

    def kill(self, *victims: ProcessId, number: signal.Signals = signal.SIGKILL) -> None:
        """All of them at once: none sees another one go and reacts."""
        if number is signal.SIGKILL:
            for victim in victims:
                assert victim.signal(signal.SIGSTOP)
        for victim in victims:
            assert victim.signal(number)
        if number is signal.SIGKILL:
            eventually(lambda: not any(victim.alive() for victim in victims))

    def kill_everything(self, job: Job) -> None:
        self.kill(self.supervisor(job), *with_run_id(job.run_id))

    def reasons(self, job: Job) -> list[str]:
        return [change.reason for change in self.store.history(job.id)]

    def path(self, job: Job) -> list[str]:
        """The states it went through; saving and going on are left out."""
        states = [str(change.after) for change in self.store.history(job.id)]
        while "saving" in states:
            at = states.index("saving")
            del states[at : at + 2 if states[at + 1 : at + 2] == ["running"] else at + 1]
        return states

    def left(self) -> list[ProcessId]:
        """Every process that works for these jobs, but this one."""
        return processes_of(self.store.home)

    def hold(self, step: int) -> Path:
        """Ranks stand still at this step until there is a file of the returned name."""
        self.set(gates=str(self.gates), ranks=f"hold@{step}")
        for gate in ("start", "save"):
            (self.gates / gate).touch()
        return self.gates / "train"


@contextmanager
def opened(
    store: Store, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gates: Path
) -> Iterator[Lab]:
    """A laboratory, and after a test that passed the proof that nothing was left running in it.

    Args:
        store: Where its jobs are.
        values: What every job of it has in common.
        monkeypatch: Of the test that works in it.
        gates: A folder that it makes, outside of the state directory.
    """
    monkeypatch.setattr("jobs.backends.local.dispatch._start_supervisor", start_supervisor)
    for name in [name for name in os.environ if name.startswith("FAKE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.03")
    gates.mkdir()
    made = Lab(store, values | {"checkpointing_steps": 0}, monkeypatch, gates)
    try:
        yield made
        assert not store.in_states(ACTIVE), "the test ended before its job"
        eventually(lambda: not made.left(), told=lambda: [name_of(one) for one in made.left()])
    finally:
        end_all_of(store.home)
