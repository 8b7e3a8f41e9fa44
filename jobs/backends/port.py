"""What a place to run jobs must do for the queue.

`jobs.backends.local` and `jobs.backends.slurm` do it; another place is another folder here, named
as `launcher` of a job names it. What it must do beside the ranks is in `jobs.supervise.port`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec


class Backend(Protocol):
    """A place as the queue sees it.

    Attributes:
        name: As `launcher` of a job has it.
        title: For people.
        hold_hint: How a person holds a job that waits in the place's own queue.
        lock: The lock of its keeper, a file in the state directory.
        log: The log of its keeper.
    """

    name: str
    title: str
    hold_hint: str
    lock: str
    log: str

    def request(self, spec: JobSpec) -> int | list[str] | None:
        """Check what a job needs of this machine, and return its `wanted` (`jobs.queue.job`).

        Raises:
            UserError: It can never run here.
        """

    def warnings(self, spec: JobSpec) -> list[str]:
        """List what may go wrong with a job here, a line each."""

    def keeper(self, store: Store) -> Callable[[], bool]:
        """Return what moves all its jobs on when it is called; it says whether there are any."""

    def holds(self, job: Job) -> str:
        """Name whose queue has a job that waits; "" if it is ours alone."""

    def stop(self, store: Store, job: Job, *, now: bool) -> str:
        """Stop an active or waiting job more firmly than before; what happens now, in one line."""

    def facts(self, store: Store, job: Job) -> dict[str, Any]:
        """Return what else there is to know of a job, for `show --json`."""

    def restore(self, run_dir: RunDir) -> Mapping[str, object]:
        """Return columns of a job whose row was lost; {} if the place knows nothing of it."""

    def by_hand(self, spec: JobSpec) -> str:
        """Write a job as what a person hands to this place without a queue."""
