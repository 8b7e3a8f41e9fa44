"""Protocols that a backend implements for the supervisor: control of ranks, and reporting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Collection, Sequence

    from jobs.machine.processes import ProcessId
    from jobs.queue.states import State
    from jobs.run.failure import Failure
    from jobs.run.hang import Stillness
    from jobs.run.rundir import RankStatus
    from jobs.spec.job_spec import JobSpec


class UnreachableError(Exception):
    """The backend did not answer, or its answer says nothing about the job."""


@dataclass(frozen=True)
class Outcome:
    """The state after an attempt, the reason, and whether a restart could help.

    `by_rule`: a rule that the user set has stopped it.
    """

    state: State
    reason: str
    worth_retrying: bool = False
    failure: Failure | None = None
    by_rule: bool = False


@dataclass
class Attempt:
    """One launch of a job's ranks.

    Attributes:
        spec: The job as it runs.
        command: The launcher's command line.
        launcher: The launcher's process; None when it could not be identified.
        child: The launcher if it is our child. None if an earlier supervisor started it; its exit
            status is unknown then.
        events_offset: Where this attempt starts in the event stream.
        restarts: Number of restarts after a failure before this attempt.
        oom_kills: The kernel's count of out-of-memory kills at the launch.
    """

    spec: JobSpec
    command: str
    launcher: ProcessId | None
    child: subprocess.Popen[bytes] | None
    events_offset: int
    restarts: int
    oom_kills: int
    exit_code: int | None = None

    def alive(self) -> bool:
        """Return whether the launcher is still running."""
        if self.child is not None:
            self.exit_code = self.child.poll()
            return self.exit_code is None
        return self.launcher is not None and self.launcher.alive()


class Ranks(Protocol):
    """A job's ranks, as its supervisor controls them.

    Methods that act raise `UnreachableError` or `OSError` if they cannot tell which processes to
    act on; the supervisor retries at its next poll.
    """

    def adopt(self) -> Attempt | None:
        """Find the attempt that an earlier supervisor launched; None if there is none."""

    def launch(self, restarts: int) -> Attempt:
        """Start all ranks and their trackers."""

    def rest(self, attempt: Attempt) -> None:
        """Sleep until the next poll, or until the launcher ends if that is earlier."""

    def leave_if_replaced(self) -> None:
        """End the ranks and raise `SystemExit` if another supervisor has taken over the job."""

    def gone(self, statuses: Sequence[RankStatus]) -> set[int]:
        """Return the ranks whose processes are known to have ended."""

    def dump_stacks(self, statuses: Sequence[RankStatus]) -> None:
        """Make every rank write its stacks to its log."""

    def terminate(self, attempt: Attempt) -> None:
        """Send SIGTERM to the ranks, which save if they can. The launcher keeps running."""

    def kill(self, attempt: Attempt, ranks: Collection[int] | None = None) -> None:
        """Kill the given ranks or, if None, every process of the job.

        May kill more than was asked.
        """

    def clean_up(self, attempt: Attempt, *, healthy: bool, stop_request: Callable[[], int]) -> bool:
        """End the processes the launcher left; return whether healthy ranks had lost their
        launcher.
        """

    def end_all(self) -> None:
        """End all remaining processes of a failed job."""

    def must_end(self) -> str:
        """Return why the backend is about to end the job, as "the time limit is near: "; "" if it
        is not.
        """

    def reconsider(self, outcome: Outcome, give_up: Callable[[], bool]) -> Outcome | None:
        """Return how an attempt ended; None to try again, if its ranks were given no resources.

        Args:
            outcome: The outcome according to the run directory.
            give_up: Polled about twice a second while waiting for resources; True ends the wait.
        """

    def conclude(self, outcome: Outcome) -> Outcome:
        """Adjust the outcome of the last attempt to this backend."""


class Report(Protocol):
    """Where a supervisor reports what it sees and reads stop requests."""

    def stop_request(self) -> int:
        """Return the requested stop level; 0 if no stop was requested."""

    def set_state(self, state: State, reason: str) -> None:
        """Record the job's state and the reason."""

    def warn(self, text: str) -> None:
        """Show a warning until the state changes."""

    def heartbeat(self, ranks: Sequence[Stillness]) -> None:
        """Report that the supervisor is alive, and how long ranks have made no progress."""

    def end(self, outcome: Outcome) -> None:
        """Record the end, retrying for as long as it takes. A recorded end is final."""

    def log(self, text: str) -> None:
        """Write a line to the supervisor's log."""
