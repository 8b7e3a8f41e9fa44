"""This machine as a backend of the queue."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from jobs.backends.local import dispatch
from jobs.backends.local.ranks import beats
from jobs.preflight.check_job import check_here
from jobs.preflight.versions import check_versions
from jobs.queue.job import LOCAL
from jobs.queue.states import ACTIVE, State
from jobs.spec.file.load import dump_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir
    from jobs.spec.job_spec import JobSpec

_STOPS: Final = {
    1: "stops after the current step, with a checkpoint",
    2: "gets SIGTERM; it saves if it can",
    3: "is killed; steps since its last checkpoint are lost",
}


class Local:
    """Implement `jobs.backends.port.Backend` for this machine."""

    name = LOCAL
    title = "this machine"
    hold_hint = "`fsdp-tui hold` keeps it there"
    lock = "runner.lock"
    log = "runner.log"

    def request(self, spec: JobSpec) -> int | list[str] | None:
        return check_here(spec)

    def warnings(self, spec: JobSpec) -> list[str]:
        """Warn about untested versions of libraries."""
        return check_versions(spec)

    def keeper(self, store: Store) -> Callable[[], bool]:
        """Dispatch while no command is running; every command dispatches, too."""
        return lambda: dispatch.look(store)

    def holds(self, job: Job) -> str:
        """Return "": only our own queue knows the job."""
        return ""

    def stop(self, store: Store, job: Job, *, now: bool) -> str:
        if job.elsewhere and now and not beats(job.run_dir):
            reason = f"given up; it ran in another container or machine ({job.elsewhere})"
            store.change(job.id, State.LOST, reason, only_from=ACTIVE)
            return f"job {job.id} was {reason}, and none of its ranks responds"
        level = store.raise_stop_level(job.id, 3 if now else job.stop_level + 1)
        # best effort: the request is recorded, and the keeper polls every second
        with suppress(OSError, sqlite3.Error):
            dispatch.dispatch(store)  # if its supervisor is gone, a new one must carry this out
        words = f"job {job.id} {_STOPS[min(level, 3)]}"
        if job.elsewhere:
            words += (
                f"; {job.elsewhere}, where it runs, carries that out. If that is gone, "
                f"`fsdp-tui stop --now {job.id}` gives the job up"
            )
        return words

    def facts(self, store: Store, job: Job) -> dict[str, Any]:
        """Return {}: everything is in the database."""
        return {}

    def restore(self, run_dir: RunDir) -> Mapping[str, object]:
        """Return {}: everything is in the run directory and the process table."""
        return {}

    def by_hand(self, spec: JobSpec) -> str:
        return dump_spec(spec)


BACKEND: Final = Local()
