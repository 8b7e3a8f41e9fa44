"""What a test can do to a supervisor and its job, and what it sees of them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from jobs.queue.job import Terms
from jobs.queue.states import State
from jobs.service import write_job_file
from jobs.spec.file.load import load_spec
from tests.support.jobs.checkpoints import save_checkpoint
from tests.support.jobs.situations.clock import PlayedClock
from tests.support.jobs.situations.kernel import Disk, Kernel
from tests.support.jobs.situations.ranks import Rank, say_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from jobs.queue.store import Job, Store

GRACE: Final = 30.0  # seconds: stop_grace_seconds of the job
TERM_GRACE: Final = 60.0  # seconds between SIGTERM and SIGKILL
FAILURE_GRACE: Final = 10.0  # seconds for ranks to end by themselves after one has failed
HANG: Final = 60.0  # seconds: hang_timeout of the job
LATE: Final = 3.0  # seconds that a look may come late
_KEYS: Final = {"stop_grace_seconds": GRACE, "hang_timeout": HANG}
_KEEPER_EVERY: Final = 5.0  # seconds


class Sent(NamedTuple):
    """A signal that ranks got: when, which, and who lived to get it."""

    at: float
    name: str
    ranks: tuple[int, ...]


class Child:
    """Stands in for the `Popen` of what launches the ranks."""

    def __init__(self, rig: Rig, pid: int) -> None:
        self.pid = pid
        self._rig = rig
        self._launch = rig.launches

    def poll(self) -> int | None:
        """Tell its exit status, which is that of the worst rank."""
        return self._rig.launcher_code() if self._launch == self._rig.launches else 1

    def wait(self, timeout: float | None = None) -> int:
        until = self._rig.clock.now + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if self._rig.clock.now >= until:
                raise subprocess.TimeoutExpired("launcher", timeout or 0.0)
            self._rig.clock.sleep(0.0)
        return code

    def send_signal(self, number: int) -> None:
        self._rig.signal_launcher(signal.Signals(number))

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def add_job(store: Store, values: dict[str, Any], wanted: list[str] | None) -> Job:
    """Put a job into the queue as `jobs.service.submit` does, but check nothing.

    A job file of these keys alone is read much faster than one of all keys.
    """
    values = values | _KEYS
    return store.add(
        name="t",
        terms=Terms.of(load_spec(None, values), wanted),
        run_id="the run id",
        prepare=lambda run_dir: write_job_file(run_dir, json.dumps(values)),
    )


@dataclass
class Rig(ABC):
    """A job of two ranks, its supervisor, and the world around them.

    A test changes the world, lets time pass, and reads `signals`, `state`, `reason`, `log` and
    `announced`. What a method does is done at once; the supervisor sees it at its next look.

    Attributes:
        no_answer: Words of the error when the backend is away.
        store: The jobs database.
        job: The job as it was submitted.
        patch: Undoes the fakes after the test.
        capture: What was printed.
    """

    no_answer: ClassVar[str]
    store: Store
    job: Job
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        self.clock = PlayedClock(self.patch)
        self.kernel = Kernel()
        self.disk = Disk(self.clock)
        self.ranks: list[Rank] = []
        self.signals: list[Sent] = []
        self.announced: list[str] = []
        self.launches = 0
        self._log: list[str] = []
        self.launcher_killed = False
        self._kept_at = 0.0
        self.kernel.take_over(self.patch)
        self.disk.take_over(self.patch)
        self._take_over_popen()

    # -- time ------------------------------------------------------------------------------

    def passes(self, seconds: float) -> None:
        """Let time pass in which the supervisor looks as usual."""
        until = self.clock.now + seconds
        while not self.clock.ended and self.clock.wakes <= until:
            self.clock.now = max(self.clock.now, self.clock.wakes)
            self._look()
        self.clock.now = until

    def suspend(self, seconds: float, *, ranks: bool) -> None:
        """Let time pass in which the supervisor does not run, nor the ranks if they are named.

        It looks once afterwards, before any rank has done anything.
        """
        self.clock.now = max(self.clock.now, self.clock.wakes) + seconds
        if not ranks:
            self._ranks_act()
        self.clock.wake()

    def until_end(self, within: float = 120.0) -> None:
        """Let time pass until the supervisor has recorded the end and returned."""
        until = self.clock.now + within
        while not self.clock.ended and self.clock.now < until:
            self.passes(5.0)
        assert self.clock.ended, f"the supervisor does not end: {self.log[-5:]}"
        assert self.clock.failure is None, f"the supervisor fails: {self.clock.failure!r}"
        self._keep(at_once=True)

    def allow_restarts(self, number: int) -> None:
        """Let the job restart so often after a failure; before it begins."""
        self.describe({"max_restarts": number})

    def describe(self, keys: dict[str, Any]) -> None:
        """Set keys of the job; before it begins."""
        job_file = self.job.run_dir.job_file
        job_file.write_text(json.dumps(json.loads(job_file.read_text()) | keys))

    def begin(self) -> None:
        """Start the supervisor, and wait until all ranks are up."""
        self.clock.start(self._supervise)
        self.passes(3.0)
        assert self.state == "running", f"{self.state}: {self.reason}; {self.log}"

    def _look(self) -> None:
        self._ranks_act()
        self.clock.wake()
        self._keep()

    def _ranks_act(self) -> None:
        for rank in self.ranks:
            rank.act(self.job.run_dir, self.clock.now)

    def _keep(self, *, at_once: bool = False) -> None:
        """Let whoever else looks after the job have a look from time to time."""
        if at_once or self.clock.now - self._kept_at >= _KEEPER_EVERY:
            self._kept_at = self.clock.now
            with self.clock.shared():
                self.keep()

    # -- ranks -----------------------------------------------------------------------------

    def phase(self, name: str, rank: int | None = None) -> None:
        """Bring a rank, or all, into a phase."""
        for each in self.ranks if rank is None else [self.ranks[rank]]:
            each.phase = name

    def progress(self, on: bool, rank: int | None = None) -> None:
        """Whether a rank, or any, makes progress from now on; heartbeats come all the same."""
        for each in self.ranks if rank is None else [self.ranks[rank]]:
            each.moves = on

    def enter(self, rank: int, *collectives: str) -> None:
        """Let a rank reach these collectives, which its flight record then has."""
        self.ranks[rank].collectives = list(collectives)

    def error(self, rank: int) -> None:
        """Let a rank fail with an error that it writes down."""
        self.ranks[rank].fail(self.job.run_dir, "the loss is odd", self.clock.now)
        self.die(rank, 1)

    def die(self, rank: int, code: int) -> None:
        """End a rank's process; a negative code is a signal."""
        self.ranks[rank].code = code

    def damage(self, rank: int, content: str | None) -> None:
        """Have a rank's status file hold this from now on; None: what it should."""
        self.ranks[rank].status = content

    def finish(self, reason: str) -> None:
        """Let the ranks save, say `completed` or `stopped`, and end well."""
        save_checkpoint(self.job.run_dir, 3)
        say_end(self.job.run_dir, reason)
        self.phase("end")
        self._ranks_act()
        for rank in self.ranks:
            if rank.alive:
                self.die(rank.number, 0)

    def remove(self) -> None:
        """Remove the job and its run directory, as a person may once someone says that it ended."""
        for rank in self.ranks:
            rank.code = 0
        if self.store.get(self.job.id).state is State.QUEUED:  # no keeper has seen it run
            self.store.change(self.job.id, State.STARTING, "started")
        self.store.change(self.job.id, State.LOST, "someone else says so")
        self.store.remove(self.job.id)
        shutil.rmtree(self.job.run_dir.root)

    # -- what is seen ----------------------------------------------------------------------

    @property
    def sent(self) -> list[tuple[str, tuple[int, ...]]]:
        """The signals without their times."""
        return [(signal.name, signal.ranks) for signal in self.signals]

    @property
    def log(self) -> list[str]:
        """The lines that the supervisor has said."""
        out, err = self.capture.readouterr()
        self._log += [*out.splitlines(), *err.splitlines()]
        return self._log

    def lines(self, *words: str) -> list[str]:
        """The lines of the log that have any of these words."""
        return [line for line in self.log if any(word in line for word in words)]

    def note_signal(self, name: str, ranks: Sequence[Rank]) -> None:
        """Remember a signal, and what it does: only SIGKILL cannot be ignored."""
        got = tuple(rank.number for rank in ranks if rank.alive)
        last = self.signals[-1] if self.signals else None
        if last is not None and (last.at, last.name) == (self.clock.now, name):
            self.signals[-1] = last._replace(ranks=last.ranks + got)
        elif got:
            self.signals.append(Sent(self.clock.now, name, got))
        for number in got if name == "KILL" else ():
            self.die(number, -signal.SIGKILL)

    # -- processes -------------------------------------------------------------------------

    def launcher_code(self) -> int | None:
        """The exit status of what launched the ranks; None while it runs."""
        if self.launcher_killed:
            return -signal.SIGKILL
        codes = [rank.code for rank in self.ranks]
        if None in codes:
            return None
        return int(any(codes))

    def _take_over_popen(self) -> None:
        real = subprocess.Popen

        def start(command: Sequence[str], *words: Any, **more: Any) -> Any:
            if not self.clock.applies():
                return real(command, *words, **more)
            if "jobs.notify" in command:
                self.announced.append(more["env"]["FSDP_TUI_EVENT"])
                return None
            if command[0] == "git" or "jobs.hub.push" in command:
                raise FileNotFoundError(command[0])
            return self._launch()

        self.patch.setattr(subprocess, "Popen", start)

    def _launch(self) -> Child:
        self.launches += 1
        self.launcher_killed = False
        self.ranks = [Rank(number) for number in range(2)]
        for rank in self.ranks:
            self._start(rank)
        process = self.kernel.add(
            alive=lambda: self.launcher_code() is None,
            takes=self.signal_launcher,
            run_id=self.local_run_id,
        )
        return Child(self, process.pid)

    def _start(self, rank: Rank) -> None:
        process = self.kernel.add(
            alive=lambda: rank.alive,
            takes=lambda number: self.note_signal(number.name.removeprefix("SIG"), [rank]),
            run_id=self.local_run_id,
        )
        rank.pid = process.pid

    # -- what the two kinds differ in ------------------------------------------------------

    @property
    @abstractmethod
    def local_run_id(self) -> str:
        """What marks the processes of the run on the supervisor's machine; "" if none is there."""

    @property
    @abstractmethod
    def state(self) -> State:
        """The state of the job, as the supervisor reports it."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """The sentence beside it."""

    @abstractmethod
    def _supervise(self) -> object:
        """Be the supervisor, until the job has ended."""

    @abstractmethod
    def signal_launcher(self, number: signal.Signals) -> None:
        """Do what the launcher does when the supervisor sends it a signal."""

    @abstractmethod
    def person_stops(self, level: int) -> None:
        """Ask for a stop as a person does."""

    @abstractmethod
    def stop_from_outside(self) -> None:
        """Send SIGTERM as someone does who is not the person: `kill`, or `scancel`."""

    @abstractmethod
    def backend_away(self, away: bool) -> None:
        """Whether the kernel lists no processes, or Slurm's commands get no answer."""

    @abstractmethod
    def end_by_someone_else(self) -> None:
        """Record an end of the job behind the supervisor's back."""

    @abstractmethod
    def keep(self) -> None:
        """Look at the job as a process does that looks after it beside the supervisor."""
