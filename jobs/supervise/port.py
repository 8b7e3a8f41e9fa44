"""What a supervisor needs from the place where its ranks run, and from what it reports to.

Each folder of `jobs.backends` does both in its own way.
"""

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


class AwayError(Exception):
    """The place did not answer, or not in words that say anything about the job."""


@dataclass(frozen=True)
class Outcome:
    """The state after an attempt, the reason, and whether a restart could help."""

    state: State
    reason: str
    worth_retrying: bool = False
    failure: Failure | None = None


@dataclass
class Attempt:
    """One launch of a job's ranks.

    Attributes:
        spec: The job as it runs.
        command: The launcher's command line.
        launcher: The launcher's process; None when it could not be identified.
        child: The launcher if it is our child; None if an earlier supervisor started it: its exit
            status is then unknown.
        events_offset: Where in the event stream this attempt begins.
        restarts: How often the job was restarted after a failure before this attempt.
        oom_kills: The kernel's count of processes killed for memory, at the launch.
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
        """Whether the launcher still runs."""
        if self.child is not None:
            self.exit_code = self.child.poll()
            return self.exit_code is None
        return self.launcher is not None and self.launcher.alive()


class Ranks(Protocol):
    """The ranks of one job, as its supervisor controls them.

    A method that acts raises `AwayError` or `OSError` if it cannot tell which processes to act on;
    the supervisor retries at its next poll.
    """

    def adopt(self) -> Attempt | None:
        """Find the attempt that an earlier supervisor launched; None if there is none."""

    def launch(self, restarts: int) -> Attempt:
        """Start all ranks and their trackers."""

    def rest(self, attempt: Attempt) -> None:
        """Sleep until the next poll; less if the launcher ends."""

    def leave_if_replaced(self) -> None:
        """End the ranks and raise `SystemExit` if another supervisor has the job by now."""

    def gone(self, statuses: Sequence[RankStatus]) -> set[int]:
        """List the ranks whose processes are known to have ended."""

    def dump_stacks(self, statuses: Sequence[RankStatus]) -> None:
        """Make every rank write its stacks to its log."""

    def terminate(self, attempt: Attempt) -> None:
        """Send SIGTERM to the ranks, which save if they can; the launcher stays."""

    def kill(self, attempt: Attempt, ranks: Collection[int] | None = None) -> None:
        """Kill everything, or at least these ranks."""

    def clean_up(self, attempt: Attempt, *, healthy: bool, wish: Callable[[], int]) -> bool:
        """End what the launcher left; return whether healthy ranks had lost their launcher."""

    def end_all(self) -> None:
        """End whatever is left of the job, which has failed."""

    def must_end(self) -> str:
        """Say why the place is about to end the job, as "the time limit is near: "; "" if not."""

    def reconsider(self, outcome: Outcome, give_up: Callable[[], bool]) -> Outcome | None:
        """Return how an attempt ended; None to try again, if the place gave its ranks no resources.

        Args:
            outcome: What the attempt left behind says.
            give_up: Called about twice a second while it waits for room; whether to wait no longer.
        """

    def conclude(self, outcome: Outcome) -> Outcome:
        """Return what the end of the last attempt means in this place."""


class Report(Protocol):
    """Where a supervisor says what it sees, and reads what a person wants."""

    def wish(self) -> int:
        """Return how urgently the user asked the job to stop; 0 if not at all."""

    def say(self, state: State, reason: str) -> None:
        """Bring the job into a state."""

    def warn(self, text: str) -> None:
        """Show a warning for as long as the state stays."""

    def look(self, ranks: Sequence[Stillness]) -> None:
        """Pass on that the supervisor lives, and how long ranks have stood still."""

    def end(self, outcome: Outcome) -> None:
        """Record the end, however long that takes; a recorded end is final."""

    def log(self, text: str) -> None:
        """Write a line of the supervisor's log."""
