"""Keepers: one process for each backend of a state directory moves that backend's jobs on.

A process of its own, since a cluster may take seconds to answer. Queueing a job starts it, and it
exits when there is nothing left to do. Nothing is lost while it does not run: what it knows stands
in the database and in the run directories.
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

LOOK_EVERY: Final = 1.0  # seconds
IDLE_SECONDS: Final = 60.0
_CODE_EVERY: Final = 30.0  # seconds


def ensure(store: Store, place: Backend) -> None:
    """Start a backend's keeper unless it runs. Returns within about 50 ms."""
    with open(store.home / place.lock, "a") as lock:
        if not file_lock.take(lock):
            return
    module = "jobs.backends.keeper"
    start_detached(module, place.name, home=store.home, cwd=store.home, log=store.home / place.log)


def ensure_keepers(store: Store, running: str = "") -> bool:
    """Start the keepers of all backends that have jobs; whether there are any jobs.

    The keeper of this machine's jobs always runs then, since it calls this once a second.

    Args:
        store: The jobs.
        running: The backend whose keeper this process is.
    """
    from jobs.queue.job import LOCAL  # not at the top: it is slow, and a starter waits for `main`

    owners = store.unended_backends()
    if not owners:
        return False
    for name in ({LOCAL, *owners} - {running}).intersection(names()):  # or of a newer version
        ensure(store, backend(name))
    return True


def keep(store: Store, place: Backend, idle_seconds: float = IDLE_SECONDS) -> None:
    """Run a backend's keeper until it has had no jobs for `idle_seconds`.

    Returns at once if another keeper of it holds the lock.
    """
    from jobs.queue.job import LOCAL

    with open(store.home / place.lock, "a") as lock:
        if not file_lock.take(lock):
            return
        _say(f"started by process {os.getppid()}")
        look, code = place.keeper(store), newest_code()
        newest = code
        busy_at = looked_at = time.monotonic()
        updated = False
        while store.path.exists():
            if time.monotonic() - looked_at >= _CODE_EVERY:
                looked_at, before = time.monotonic(), newest
                newest = newest_code()
                if updated := newest == before != code:  # complete: unchanged for half a minute
                    _say("fsdp-tui was updated; exiting for a newer one")
                    break
            work = True
            try:
                work = look()
                if place.name == LOCAL:
                    work = ensure_keepers(store, running=LOCAL) or work
            except Exception as error:  # one bad look must not end the keeping
                _say(f"{type(error).__name__}: {error}")
            # After a look: a process that was paused for longer may have work all the same.
            if work:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= idle_seconds:
                break
            time.sleep(LOOK_EVERY)
        if not updated:
            _say("nothing left to do; exiting")
    if updated:  # newer commands may disagree with this process
        ensure(store, place)


def newest_code() -> float:
    """When a file of the core was last changed, in Unix seconds."""
    newest = 0.0
    for path in Path(jobs.__file__).parent.rglob("*.py"):
        with suppress(OSError):  # it vanishes while it is replaced
            newest = max(newest, path.stat().st_mtime)
    return newest


def _say(text: str) -> None:
    with suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), f"[{os.getpid()}]", text, flush=True)


def main() -> None:
    """Leave the starter's process and session, then keep the jobs of the named backend."""
    leave_starter()
    # After leaving: this import takes longer than the starter should wait.
    import signal

    from jobs.queue.store import SERVICE, Store

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    idle = float(os.environ.get("FSDP_TUI_RUNNER_IDLE", IDLE_SECONDS))
    keep(Store(patience=SERVICE), backend(sys.argv[1]), idle)


if __name__ == "__main__":
    main()
