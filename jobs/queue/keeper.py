"""The queue keeper: one process per state directory that looks after all jobs.

Queueing a job starts it; it exits when there is nothing left to do. It only calls `dispatch`, as
every command does, so nothing is lost without it: it covers the times when no command runs.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from jobs.machine import file_lock
from jobs.machine.start_detached import leave_starter, start_detached

if TYPE_CHECKING:
    from jobs.queue.store import Store

LOOK_EVERY: Final = 1.0  # seconds
IDLE_SECONDS: Final = 60.0


def ensure_runner(store: Store) -> None:
    """Start the runner unless one is running. Returns within about 50 ms."""
    with open(store.home / "runner.lock", "a") as lock:
        if not file_lock.take(lock):
            return
    start_detached(
        "jobs.queue.keeper", home=store.home, cwd=store.home, log=store.home / "runner.log"
    )


def keep(store: Store, idle_seconds: float = IDLE_SECONDS) -> None:
    """Run the queue until there has been nothing to do for `idle_seconds`.

    Returns at once if another runner holds the lock.
    """
    from jobs.queue.dispatch import dispatch, has_work
    from jobs.slurm.rows import look_after_slurm_jobs

    with open(store.home / "runner.lock", "a") as lock:
        if not file_lock.take(lock):
            return
        _say("started")
        busy_at = time.monotonic()
        while store.path.exists():
            work = False
            try:
                if work := has_work(store):
                    dispatch(store)
                    look_after_slurm_jobs(store)
            except Exception as error:  # one bad look must not end the keeping
                _say(f"{type(error).__name__}: {error}")
            # After a look: a process that was paused for longer may have work all the same.
            if work:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= idle_seconds:
                break
            time.sleep(LOOK_EVERY)
        _say("nothing left to do; exiting")


def _say(text: str) -> None:
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), f"[{os.getpid()}]", text, flush=True)


def main() -> None:
    """Leave the starter's process and session, then keep the queue."""
    leave_starter()
    import signal

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from jobs.queue.store import SERVICE, Store

    keep(Store(patience=SERVICE), float(os.environ.get("FSDP_TUI_RUNNER_IDLE", IDLE_SECONDS)))


if __name__ == "__main__":
    main()
