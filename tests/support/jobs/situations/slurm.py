"""A job in an allocation: ranks that `srun` starts, and two files in the place of the database."""

from __future__ import annotations

import io
import signal
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from jobs.backends.slurm import commands
from jobs.backends.slurm.commands import Listed
from jobs.backends.slurm.keeper import Keeper
from jobs.backends.slurm.ranks import SlurmRanks
from jobs.backends.slurm.records import (
    Allocation,
    Submission,
    WardenReport,
    outcome_file,
    read_warden_report,
    request_stop,
    warden_file,
    write_submission,
    write_warden_report,
)
from jobs.backends.slurm.warden import WardenFile
from jobs.queue.states import State
from jobs.supervise.port import UnreachableError
from jobs.supervise.supervisor import Supervisor
from tests.support.jobs.situations.rig import Rig, add_job

if TYPE_CHECKING:
    import pytest

    from jobs.queue.store import Store

ID = "7"
ALLOCATION = Allocation(ID)


class SlurmRig(Rig):
    """The supervisor in an allocation, and the queue's keeper on the login node."""

    no_answer = "Unable to contact slurm controller"

    @classmethod
    def make(
        cls,
        store: Store,
        values: dict[str, Any],
        patch: pytest.MonkeyPatch,
        capture: pytest.CaptureFixture[str],
    ) -> SlurmRig:
        """Hand a job in that nobody supervises yet."""
        job = add_job(store, values | {"launcher": "slurm"}, wanted=["slurm"])
        write_submission(job.run_dir, Submission("ours", job.attempt, ID))
        return cls(store, job, patch, capture)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slurm_state, self.away = "RUNNING", False
        self._keeper = Keeper(self.store, ask_every=0.0)
        run_dir = self.job.run_dir
        report = WardenFile(run_dir, ALLOCATION, self.job.attempt)
        self._ranks = SlurmRanks(run_dir, ALLOCATION, report)
        self._supervisor = Supervisor(run_dir, self._ranks, report)
        for command in (self.queue, self.state_of, self.signal_steps, self.cancel):
            self.patch.setattr(commands, command.__name__, command)

    def _supervise(self) -> None:
        outcome = self._supervisor.run()
        if self.slurm_state == "RUNNING":
            self.slurm_state = "FAILED" if outcome.state is State.FAILED else "COMPLETED"

    @property
    def local_run_id(self) -> str:
        return ""

    @property
    def state(self) -> State:
        return self._report().state

    @property
    def reason(self) -> str:
        return self._report().reason

    def _report(self) -> WardenReport:
        run_dir = self.job.run_dir
        report = read_warden_report(outcome_file(run_dir)) or read_warden_report(
            warden_file(run_dir)
        )
        return report or WardenReport(ALLOCATION, State.QUEUED, "nothing was reported")

    # -- srun and Slurm's commands ---------------------------------------------------------

    def die(self, rank: int, code: int) -> None:
        """Have srun say how a task ended, unless it ended well."""
        super().die(rank, code)
        if code:
            words = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
            # On a full disk, srun goes on without its log.
            with suppress(OSError), open(self.job.run_dir.launcher_log, "a") as log:
                log.write(f"srun: error: n1: task {rank}: {words}\n")

    def signal_launcher(self, number: signal.Signals) -> None:
        """End all tasks, as srun does when it gets SIGTERM."""
        ends = number in (signal.SIGTERM, signal.SIGKILL)
        self.note_signal("KILL" if ends else f"{number.name} from srun", self.ranks)

    def queue(self) -> dict[str, Listed]:
        self._answer()
        return {ID: Listed(ID, "ours", self.slurm_state, nodes="n1")}

    def state_of(self, slurm_id: str) -> str:
        self._answer()
        return self.slurm_state

    def signal_steps(self, slurm_id: str, name: str) -> None:
        self._answer()
        self.note_signal(name, self.ranks)

    def cancel(self, slurm_id: str) -> None:
        self._answer()
        self.note_signal("CANCEL", self.ranks)

    def _answer(self) -> None:
        if self.away:
            raise UnreachableError(self.no_answer)

    # -- others ----------------------------------------------------------------------------

    def person_stops(self, level: int) -> None:
        request_stop(self.job.run_dir, self.job.attempt, level)

    def stop_from_outside(self) -> None:
        """Send SIGTERM to ranks and batch script, as Slurm does at a cancellation."""
        self._ranks.sigterm_received = True  # what the handler of `jobs.backends.slurm.warden` does
        self.slurm_state = "CANCELLED"

    def backend_away(self, away: bool) -> None:
        self.away = away

    def end_by_someone_else(self) -> None:
        report = WardenReport(ALLOCATION, State.LOST, "someone else says so")
        write_warden_report(outcome_file(self.job.run_dir), report)

    def keep(self) -> None:
        with redirect_stdout(io.StringIO()):  # it has a log of its own
            self._keeper.look()
