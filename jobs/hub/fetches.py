"""Start downloads from the hub or a store, read their progress, and end them.

This module neither imports `huggingface_hub` nor accesses the network.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from jobs.errors import UserError
from jobs.machine import file_lock
from jobs.machine.engine_tools import ask
from jobs.machine.processes import ProcessId
from jobs.machine.residence import residence
from jobs.machine.start_detached import start_detached
from jobs.paths import ensure_private_dir, ensure_state_home, state_home
from jobs.run.rundir import read_json, write_atomic
from jobs.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.spec.values.hub_names import HubName

Stage = Literal["fetching", "waiting", "failed", "done"]
_STARTS_WITHIN: Final = 20.0  # seconds
_AGAIN_AFTER: Final = 60.0  # seconds between two automatic starts


@dataclass(frozen=True)
class Fetch:
    """Progress of a download.

    Attributes:
        state: `waiting` means waiting for the network.
        done: Downloaded bytes.
        total: Bytes of all files; 0 if not yet known.
        reason: What it waits for, why it failed, or how a store's data differs from before.
        path: The downloaded folder, once it is complete.
        pid: The downloading process.
        started: Start of that process, in seconds since the boot.
        boot: Residence of that process; see `jobs.machine.residence`.
    """

    state: Stage
    done: int = 0
    total: int = 0
    reason: str = ""
    path: str = ""
    pid: int = 0
    started: float = 0.0
    boot: str = ""

    def of(self, done: int, total: int) -> Fetch:
        """Return a copy with these numbers."""
        return replace(self, done=done, total=total)

    def write(self, name: HubName) -> None:
        """Store the progress for other processes."""
        me = ProcessId.of(os.getpid())
        assert me is not None
        values = asdict(self) | {"pid": me.pid, "started": me.started, "boot": str(residence())}
        write_atomic(_file_of(name), json.dumps(values) + "\n")

    @property
    def alive(self) -> bool:
        """Return whether its process is running here; False for a process elsewhere."""
        return self.boot == str(residence()) and ProcessId(self.pid, self.started).alive()

    def __str__(self) -> str:
        """Format the progress, as in `12.4 GiB of 31.4 GiB`."""
        far = f"{size(self.done)} of {size(self.total)}" if self.total else "listing its files"
        return f"{far}; {self.reason}" if self.state == "waiting" else far


def look_at(name: HubName) -> Fetch | None:
    """Read the progress of a download, running or ended; None if there never was one."""
    values = read_json(_file_of(name))
    try:
        return Fetch(**values) if values else None
    except TypeError:  # written by another version
        return None


def is_cut_off(name: HubName) -> bool:
    """Return whether it was started here and is not complete."""
    fetch = look_at(name)
    return fetch is not None and fetch.state != "done"


def is_under_way(name: HubName) -> bool:
    """Return whether a process downloads it, on any machine that shares the state directory."""
    fetch = look_at(name)
    return (fetch is not None and fetch.alive) or _is_locked(lock_of(name))


def forget_ended(name: HubName) -> None:
    """Forget a download's end: a license may have been accepted since, or the cache deleted."""
    fetch = look_at(name)
    if fetch is not None and fetch.state in ("failed", "done"):
        _file_of(name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        os.utime(lock_of(name), (0, 0))


def forget_start(name: HubName) -> None:
    """Allow an immediate restart. Called by the downloading process before it exits."""
    _file_of(name).unlink(missing_ok=True)
    os.utime(lock_of(name), (0, 0))


def has_just_started(name: HubName) -> bool:
    """Return whether it was started so recently that a restart would likely end the same way."""
    try:
        return abs(time.time() - lock_of(name).stat().st_mtime) < _AGAIN_AFTER
    except FileNotFoundError:
        return False


def start(name: HubName) -> None:
    """Download it in a process that outlives this one, unless a process already does.

    Raises:
        UserError: The state directory is not writable, or the process does not start.
    """
    ensure_state_home()
    place = ensure_private_dir(_home())
    _end_of(name).unlink(missing_ok=True)
    if is_under_way(name):
        return
    _file_of(name).unlink(missing_ok=True)  # it may hold the failure of the previous download
    lock_of(name).touch()
    log = log_of(name)
    try:
        start_detached(
            "jobs.hub.fetch", name.kind, str(name), home=state_home(), cwd=place, log=log
        )
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"the fetch of {name} cannot start (exit status {error.returncode})", f"see {log}"
        ) from error


def end(name: HubName) -> bool:
    """End a download on this machine; return whether there was one. Complete files stay.

    A download that is still starting has not recorded its pid yet, so it checks `is_to_end` itself.
    """
    if lock_of(name).exists():  # before reading the pid, or a starting download may be missed
        with suppress(OSError):  # the download may have filled the disk
            _end_of(name).touch()
    fetch = look_at(name)
    if fetch is None or not fetch.alive:
        return False
    return ProcessId(fetch.pid, fetch.started).signal(signal.SIGTERM)


def is_to_end(name: HubName) -> bool:
    """Return whether `end` was called during the start. Check this after recording the pid."""
    return _end_of(name).exists()


def wait(name: HubName, tell: Callable[[Fetch], None], every: float = 0.25) -> Fetch:
    """Wait until a started download completes or its process ends."""
    until = time.monotonic() + _STARTS_WITHIN
    while True:
        now = look_at(name)
        if now is not None:
            tell(now)
            if now.state in ("done", "failed"):
                return now
        if now is None or now.alive or is_under_way(name):
            until = max(until, time.monotonic() + (1.0 if now else 0.0))
        if time.monotonic() > until:
            return replace(now or Fetch("failed"), state="failed", reason="its process was ended")
        time.sleep(every)


def ask_size(name: HubName, cancelled: Callable[[], bool] = lambda: False) -> tuple[int, int]:
    """Query the hub, in a separate process, for the size of a download.

    Returns:
        Missing bytes, and bytes of all files.

    Raises:
        UserError: It cannot be downloaded; one sentence.
        ToolError: The process failed.
        Cancelled: `cancelled` returned True.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as folder:
        answer: dict[str, Any] = ask(
            "jobs.hub.listing",
            [name.kind, str(name)],
            Path(folder, "answer"),
            lambda line: None,
            cancelled,
        )
    return int(answer["missing"]), sum(answer["files"].values())


@contextmanager
def waiting_for(name: HubName) -> Iterator[None]:
    """Keep others from ending a download while someone waits for it in the foreground."""
    ensure_state_home()
    ensure_private_dir(_home())
    # readable, because NFS requires that for shared locks
    with open(_waiting_file(name), "a+") as file:
        file_lock.acquire_shared(file)
        yield


def is_waited_for(name: HubName) -> bool:
    """Return whether someone waits for it in the foreground."""
    return _is_locked(_waiting_file(name))


def log_of(name: HubName) -> Path:
    """Return the log file of its downloads."""
    return _home() / f"{name.slug}.log"


def lock_of(name: HubName) -> Path:
    """Return the lock held by the downloading process; its mtime is the start of the download."""
    return _home() / f"{name.slug}.lock"


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "r+") as file:
            return not file_lock.acquire(file)
    except FileNotFoundError:  # never locked
        return False


def _home() -> Path:
    return state_home() / "fetches"


def _waiting_file(name: HubName) -> Path:
    return _home() / f"{name.slug}.waiting"


def _end_of(name: HubName) -> Path:
    return _home() / f"{name.slug}.end"


def _file_of(name: HubName) -> Path:
    return _home() / f"{name.slug}.json"
