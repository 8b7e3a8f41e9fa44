"""The protocol that a backend implements for the queue.

`jobs.backends.local` and `jobs.backends.slurm` implement it. Another backend is another folder
here, named like its value of a job's `launcher` key. The protocols for controlling ranks are in
`jobs.supervise.port`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec


class Backend(Protocol):
    """A backend as the queue sees it.

    Attributes:
        name: Its value of the `launcher` key.
        title: The name shown to users.
        hold_hint: How the user holds a job that waits in the backend's own queue.
        lock: File name of the keeper's lock, in the state directory.
        log: File name of the keeper's log, in the state directory.
    """

    name: str
    title: str
    hold_hint: str
    lock: str
    log: str

    def request(self, spec: JobSpec) -> int | list[str] | None:
        """Check what a job needs of this machine, and return its `wanted` (`jobs.queue.job`).

        Raises:
            UserError: The job can never run here.
        """

    def warnings(self, spec: JobSpec) -> list[str]:
        """Return what may go wrong with a job here, one line each."""

    def keeper(self, store: Store) -> Callable[[], bool]:
        """Return a function that advances all jobs of this backend; it returns whether there are
        any.
        """

    def holds(self, job: Job) -> str:
        """Return whose queue holds a waiting job; "" if it is only ours."""

    def stop(self, store: Store, job: Job, *, now: bool) -> str:
        """Stop an active or waiting job more firmly than before; return what happens now, in one
        line.
        """

    def facts(self, store: Store, job: Job) -> dict[str, Any]:
        """Return additional facts about a job, for `show --json`."""

    def restore(self, run_dir: RunDir) -> Mapping[str, object]:
        """Return columns of a job whose row was lost; {} if the backend knows nothing about it."""

    def by_hand(self, spec: JobSpec) -> str:
        """Export a job in a form that the user can submit without the queue."""
