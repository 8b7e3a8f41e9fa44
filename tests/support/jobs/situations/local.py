"""A job whose ranks are processes of this machine, and whose sink is the database."""

from __future__ import annotations

import errno
import os
import signal
from typing import TYPE_CHECKING, Any

from jobs.backends.local.ranks import LocalRanks
from jobs.backends.local.report import DatabaseReport
from jobs.queue.states import State
from jobs.supervise.supervisor import Supervisor
from tests.support.jobs.situations.rig import Rig, add_job

if TYPE_CHECKING:
    import pytest

    from jobs.queue.store import Store

_SIGNALED = "torch.distributed.elastic.SignalException: Process 7 got signal: 15\n"


class LocalRig(Rig):
    """The supervisor of a local job."""

    no_answer = os.strerror(errno.EMFILE)

    @classmethod
    def make(
        cls,
        store: Store,
        values: dict[str, Any],
        patch: pytest.MonkeyPatch,
        capture: pytest.CaptureFixture[str],
    ) -> LocalRig:
        """Submit a job that nobody supervises yet."""
        job = add_job(store, values, wanted=None)
        assert store.claim(job.id, [], "starting")
        return cls(store, job, patch, capture)

    def _supervise(self) -> None:
        with self.store.held_open():
            job = self.store.get(self.job.id)
            report = DatabaseReport(self.store, job)
            Supervisor(job.run_dir, LocalRanks(job, report), report).run()

    @property
    def local_run_id(self) -> str:
        return self.job.run_id

    @property
    def state(self) -> State:
        return self.store.get(self.job.id).state

    @property
    def reason(self) -> str:
        return self.store.get(self.job.id).reason

    def signal_launcher(self, number: signal.Signals) -> None:
        """Note any but SIGKILL: the launcher would end ranks that are to save."""
        if number is signal.SIGKILL:
            self.launcher_killed = True
        else:
            self.note_signal(f"{number.name} from the launcher", self.ranks)

    def person_stops(self, level: int) -> None:
        self.store.raise_stop_level(self.job.id, level)

    def stop_from_outside(self) -> None:
        """Have the launcher say that it got SIGTERM; it passes it on and waits for the ranks."""
        with open(self.job.run_dir.launcher_log, "a") as log:
            log.write(_SIGNALED)

    def backend_away(self, away: bool) -> None:
        self.kernel.lists_none = away

    def end_by_someone_else(self) -> None:
        self.store.change(self.job.id, State.LOST, "someone else says so")

    def keep(self) -> None:
        """Do nothing: no other process looks after a local job."""
