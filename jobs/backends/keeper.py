"""Run a keeper: the process that advances all jobs of one backend of a state directory.

It is a separate process because a cluster may take seconds to answer. Queueing a job starts it, and
it exits when no jobs are left. Nothing is lost while it is not running: all its state is in the
database and in the run directories.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import jobs
from jobs.backends import backend, names
from jobs.machine import file_lock
from jobs.machine.start_detached import leave_starter, start_detached

if TYPE_CHECKING:
    from jobs.backends.port import Backend
    from jobs.queue.store import Store

POLL_INTERVAL: Final = 1.0  # seconds
IDLE_SECONDS: Final = 60.0
_CODE_INTERVAL: Final = 30.0  # seconds


def ensure(store: Store, place: Backend) -> None:
    """Start a backend's keeper unless it is running. Returns within about 50 ms."""
    with open(store.home / place.lock, "a") as lock:
        if not file_lock.acquire(lock):
            return
    module = "jobs.backends.keeper"
    start_detached(module, place.name, home=store.home, cwd=store.home, log=store.home / place.log)


def ensure_keepers(store: Store, running: str = "") -> bool:
    """Start the keepers of all backends that have jobs; return whether there are any jobs.

    The local backend's keeper is always running then, since it calls this once a second.

    Args:
        store: The jobs.
        running: The backend whose keeper is this process.
    """
    # imported here because it is slow, and the starter waits for `main`
    from jobs.queue.job import LOCAL

    owners = store.unended_backends()
    if not owners:
        return False
    # skip backends of a newer version
    for name in ({LOCAL, *owners} - {running}).intersection(names()):
        ensure(store, backend(name))
    return True


def keep(store: Store, place: Backend, idle_seconds: float = IDLE_SECONDS) -> None:
    """Run a backend's keeper until it has had no jobs for `idle_seconds`.

    Returns at once if another keeper of the backend holds the lock.
    """
    from jobs.queue.job import LOCAL

    with open(store.home / place.lock, "a") as lock:
        if not file_lock.acquire(lock):
            return
        _say(f"started by process {os.getppid()}")
        look, code = place.keeper(store), newest_code()
        newest = code
        busy_at = looked_at = time.monotonic()
        updated = False
        while store.path.exists():
            if time.monotonic() - looked_at >= _CODE_INTERVAL:
                looked_at, before = time.monotonic(), newest
                newest = newest_code()
                # an update is complete if nothing changed for half a minute
                if updated := newest == before != code:
                    _say("fsdp-tui was updated; exiting for a newer one")
                    break
            work = True
            try:
                work = look()
                if place.name == LOCAL:
                    work = ensure_keepers(store, running=LOCAL) or work
            except Exception as error:  # one failed poll must not end the keeper
                _say(f"{type(error).__name__}: {error}")
            # Check after polling: a process that was suspended past the idle time may still have
            # work.
            if work:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= idle_seconds:
                break
            time.sleep(POLL_INTERVAL)
        if not updated:
            _say("nothing left to do; exiting")
    if updated:  # newer commands may be incompatible with this process
        ensure(store, place)


def newest_code() -> float:
    """Return the time when a file of this package was last changed, in Unix seconds."""
    newest = 0.0
    for path in Path(jobs.__file__).parent.rglob("*.py"):
        with suppress(OSError):  # deleted while it is being replaced
            newest = max(newest, path.stat().st_mtime)
    return newest


def _say(text: str) -> None:
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), f"[{os.getpid()}]", text, flush=True)


def main() -> None:
    """Detach from the starter's process and session, then run the keeper of the named backend."""
    leave_starter()
    # After detaching: this import takes longer than the starter should wait.
    import signal

    from jobs.queue.store import SERVICE, Store

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    idle = float(os.environ.get("FSDP_TUI_RUNNER_IDLE", IDLE_SECONDS))
    keep(Store(patience=SERVICE), backend(sys.argv[1]), idle)


if __name__ == "__main__":
    main()
