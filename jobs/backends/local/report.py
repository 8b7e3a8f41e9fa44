"""Record a local supervisor's reports in the database."""

from __future__ import annotations

import sqlite3
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobs.errors import NotFoundError, StateError
from jobs.memory.calibration import record
from jobs.notify import Announcer
from jobs.queue.job_list import keep_summary
from jobs.queue.states import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.queue.store import Job, Store
    from jobs.run.hang import Stillness
    from jobs.supervise.port import Outcome

_UP: Final = frozenset({State.STARTING, State.RUNNING, State.SAVING})


@dataclass
class DatabaseReport:
    """Implement `jobs.supervise.port.Report` for a job in the database."""

    store: Store
    job: Job
    announcer: Announcer = field(init=False)
    _stop_request: int = 0

    def __post_init__(self) -> None:
        self.announcer = Announcer(self.job, self.log)

    def stop_request(self) -> int:
        try:
            self._stop_request = self.store.get(self.job.id).stop_level
        except sqlite3.OperationalError as error:  # for example a database that stays locked
            self.log(f"cannot read what a person wants: {error}")
        return self._stop_request

    def set_state(self, state: State, reason: str) -> None:
        before = _UP if state is State.STARTING else _UP - {state}  # a restart is a transition, too
        if not self.store.change(self.job.id, state, reason, only_from=before):
            # for example because the job is stopping
            if self.store.get(self.job.id).state is not state:
                return
            self.store.explain(self.job.id, reason, state)
        self.log(f"{state}: {reason}")

    def warn(self, text: str) -> None:
        self.store.explain(self.job.id, text, State.RUNNING)

    def heartbeat(self, ranks: Sequence[Stillness]) -> None:
        if ranks:
            self.announcer.check_stall(min(rank.still for rank in ranks))

    def end(self, outcome: Outcome) -> None:
        with suppress(Exception):  # a failing calibration record must not lose the job's end
            record(self.job.run_dir)
        self.announcer.announce_end(outcome.state, outcome.reason)
        while self.store.path.exists():
            try:
                self.store.change(self.job.id, outcome.state, outcome.reason)
            except (StateError, NotFoundError) as error:  # another process has recorded an end
                self.log(f"not recorded: {error}")
                break
            # full disk: retry, otherwise the state stays wrong
            except sqlite3.OperationalError as error:
                self.log(f"could not record the end: {error}")
                time.sleep(1.0)
            else:
                break
        with suppress(Exception):  # readers build a missing summary themselves
            keep_summary(self.store, self.store.get(self.job.id))

    def log(self, text: str) -> None:
        """Print a line to standard error, which is logs/supervisor.log."""
        with suppress(OSError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)
