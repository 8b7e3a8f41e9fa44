"""`python -m jobs.backends.slurm.warden RUNDIR`: the batch step supervises the job.

It reports through files in the run directory, never opens the database, and needs no process on the
login node.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.backends.slurm.ranks import SlurmRanks
from jobs.backends.slurm.records import (
    Allocation,
    WardenReport,
    outcome_file,
    read_submission,
    requested_stop,
    warden_file,
    write_warden_report,
)
from jobs.errors import UserError
from jobs.queue.states import State
from jobs.run.fence import raise_fence
from jobs.run.rundir import RunDir
from jobs.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobs.run.hang import Stillness
    from jobs.supervise.port import Outcome

BEAT_EVERY: Final = 5.0  # seconds between two heartbeats
_RETRY_INTERVAL: Final = 5.0  # seconds
_GONE_AFTER: Final = 5  # attempts to write into a run directory that does not exist


@dataclass
class WardenFile:
    """Implement `jobs.supervise.port.Report` with files in the run directory, for the keeper.

    Attributes:
        run_dir: The run directory.
        allocation: Slurm's job id and restart count.
        attempt: The job's attempt, part of the stop requests' names; None for a job submitted by
            hand.
    """

    run_dir: RunDir
    allocation: Allocation
    attempt: int | None = None
    _reported: tuple[State, str] = (State.STARTING, "starting ranks")
    _still: float = 0.0
    _beat: int = 0
    _last_beat: float = float("-inf")
    _failing: bool = False

    def stop_request(self) -> int:
        return requested_stop(self.run_dir, self.attempt) if self.attempt is not None else 0

    def set_state(self, state: State, reason: str) -> None:
        if (state, reason) != self._reported:
            self.log(f"{state}: {reason}")
        self._reported = state, reason
        self._write()

    def warn(self, text: str) -> None:
        if self._reported[0] is State.RUNNING:
            self.set_state(State.RUNNING, text)

    def heartbeat(self, ranks: Sequence[Stillness]) -> None:
        """Write a heartbeat when due."""
        self._still = min((rank.still for rank in ranks), default=0.0)
        if time.monotonic() - self._last_beat >= BEAT_EVERY:
            self._write()

    def end(self, outcome: Outcome) -> None:
        report = self._report(outcome.state, outcome.reason, worth_retrying=outcome.worth_retrying)
        missing = 0
        while missing < _GONE_AFTER:
            try:
                write_warden_report(outcome_file(self.run_dir), report, durable=True)
            except FileNotFoundError:  # the run was removed, or its file system is unavailable
                missing += 1
                time.sleep(_RETRY_INTERVAL)
            except OSError as error:  # full disk: retry, otherwise the state stays wrong
                self.log(f"could not record the end: {error}")
                time.sleep(_RETRY_INTERVAL)
            else:
                break

    def log(self, text: str) -> None:
        """Print a line to the batch script's log."""
        with suppress(OSError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)

    def _write(self) -> None:
        self._last_beat = time.monotonic()
        self._beat += 1
        try:
            write_warden_report(warden_file(self.run_dir), self._report(*self._reported))
        except OSError as error:  # full disk; the next heartbeat retries
            if not self._failing:
                self.log(f"cannot write {warden_file(self.run_dir).name}: {error}")
            self._failing = True
        else:
            self._failing = False

    def _report(self, state: State, reason: str, *, worth_retrying: bool = False) -> WardenReport:
        host = socket.gethostname()
        return WardenReport(
            self.allocation, state, reason, host, self._beat, worth_retrying, self._still
        )


def supervisor_of(run_dir: RunDir, environment: Mapping[str, str]) -> Supervisor:
    """Build the supervisor of this process's allocation.

    Raises:
        UserError: There is no allocation, or the run belongs to another Slurm job.
    """
    try:
        allocation = Allocation(
            environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT") or 0)
        )
    except (KeyError, ValueError):
        raise UserError("not in a Slurm job; hand it in with sbatch") from None
    record = read_submission(run_dir)
    attempt = record.attempt if record is not None else None
    if record is not None and (
        environment.get("SLURM_JOB_NAME") != record.name or record.id not in ("", allocation.id)
    ):
        raise UserError(f"{run_dir.root} belongs to Slurm job {record.name} ({record.id})")
    report = WardenFile(run_dir, allocation, attempt)
    return Supervisor(run_dir, SlurmRanks(run_dir, allocation, report), report)


def main() -> int:
    """Supervise the run directory on the command line; return the batch script's exit status."""
    run_dir = RunDir(Path(sys.argv[1]).absolute())
    try:
        supervisor = supervisor_of(run_dir, os.environ)
    except UserError as error:
        print(f"fsdp-tui: {error}", file=sys.stderr)
        return 2
    ranks = supervisor.ranks
    assert isinstance(ranks, SlurmRanks)
    run_dir.create()

    def note_limit(*_: object) -> None:
        ranks.time_up = True

    def note_end(*_: object) -> None:
        ranks.sigterm_received = True

    # A cancellation sends SIGTERM. Only USR2, which the script requests, may lead to a requeue.
    signal.signal(signal.SIGUSR2, note_limit)
    signal.signal(signal.SIGTERM, note_end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_fence(run_dir.root, str(ranks.allocation))
    outcome = supervisor.run()
    return int(outcome.state not in (State.COMPLETED, State.STOPPED))


if __name__ == "__main__":
    sys.exit(main())
