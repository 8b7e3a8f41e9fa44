"""Watch all machines in one thread that reads their reports. Each machine keeps its own state."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from jobs.errors import UserError
from jobs.fleet.lines import LONGEST, ReportReader, UnreadableError
from jobs.fleet.ssh import FAILED, is_too_old, ssh_command, why_failed
from jobs.machine.child import end_child
from jobs.machine.processes import wait_for_by_hand
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.fleet.config import Box, Fleet
    from jobs.fleet.lines import Snapshot


# -- link -----------------------------------------------------------------------------------
# The connection to one machine: a long-lived ssh that runs `list --watch` there.


Status = Literal["connecting", "here", "silent", "away"]

_FIRST_REPORT_TIMEOUT: Final = 30.0  # seconds, including the start of ssh
_MAX_MISSED: Final = 6.0  # missed reports after which the connection is given up
ENDS_IN: Final = 2.0  # seconds for ssh to exit after SIGTERM, or after its output has ended
_RETRY_DELAYS: Final = (2.0, 4.0, 8.0, 15.0)  # seconds until the next attempt
# if ssh works and the problem on the machine will not go away by itself
_RETRY_PERMANENT: Final = 60.0
# If ssh works but the remote process hangs: each attempt may leave another process there, which
# ends once it is no longer stuck.
_RETRY_HUNG: Final = (2.0, 60.0, 300.0)
_SILENT_AFTER: Final = 2.0
_STDERR_TAIL: Final = 4096  # bytes
_READ_SIZE: Final = 1 << 16  # bytes


@dataclass(frozen=True)
class BoxView:
    """What is known about a machine at one moment.

    Attributes:
        box: The machine.
        status: Status of the connection; see `status_at`.
        why: Why it is away, or another problem; one sentence.
        snapshot: Its latest report; None before the first.
        heard: When that arrived, on our monotonic clock.
        received: Total bytes received from it.
    """

    box: Box
    status: Status = "connecting"
    why: str = ""
    snapshot: Snapshot | None = None
    heard: float | None = None
    received: int = 0

    def status_at(self, now: float) -> Status:
        """Return the status; a machine that has missed reports is silent.

        In that case ssh is running, but the machine or the connection hangs.
        """
        if self.status == "here" and self.snapshot is not None and self.heard is not None:
            late = now - self.heard > _SILENT_AFTER * self.snapshot.head.interval
            return "silent" if late else "here"
        return self.status


class Link:
    """Run ssh, parse its output, and restart it after it has ended. Not thread-safe."""

    def __init__(self, box: Box, interval: float) -> None:
        """Prepare a connection without starting it.

        Args:
            box: The machine.
            interval: Seconds between two of its reports.
        """
        self.view = BoxView(box)
        self._due = 0.0
        self._words = ["list", "--watch", "--json", "--machine", "--interval", f"{interval:g}"]
        self._asks_version = False
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = ReportReader()
        self._rest = self._errors = b""
        self._failures = 0
        self._patience = _FIRST_REPORT_TIMEOUT  # seconds of silence before giving up
        self._unshared = False  # avoid the shared connection, which may be what hangs
        self._ending: list[tuple[subprocess.Popen[bytes], float]] = []  # killed at the given time

    @property
    def due(self) -> float:
        """Return the monotonic time of the next action that needs no input."""
        return min([self._due, *(at for _, at in self._ending)])

    def files(self) -> Sequence[int]:
        """Return the file descriptors to wait for."""
        if self._process is None:
            return ()
        pipes = (self._process.stdout, self._process.stderr)
        return [pipe.fileno() for pipe in pipes if pipe is not None and not pipe.closed]

    def run_due(self, now: float) -> None:
        """Carry out everything that is due."""
        self._reap(now)
        if now < self._due:
            return
        if self._process is None:
            self._start(now)
        elif self._process.stdout is not None and self._process.stdout.closed:
            self._handle_exit(now)
        else:
            self._unshared = not self._unshared
            self._fail(now, f"no answer within {self._patience:.0f} s", _RETRY_HUNG)

    def retry_now(self, now: float) -> None:
        """Retry at once if the machine is away or silent."""
        if self._process is not None and self.view.status_at(now) == "silent":
            self._unshared = not self._unshared
            self._drop(now)
        if self._process is None:
            self._due, self._failures = 0.0, 0

    def read(self, file: int, now: float) -> None:
        """Read the available output."""
        assert self._process is not None
        out, errors = self._process.stdout, self._process.stderr
        assert out is not None
        assert errors is not None
        data = os.read(file, _READ_SIZE)
        if not errors.closed and file == errors.fileno():
            self._errors = (self._errors + data)[-_STDERR_TAIL:]
            if not data:
                errors.close()
        elif data:
            self.view = replace(self.view, received=self.view.received + len(data))
            self._consume(data, now)
        else:
            out.close()
            self._due = now + ENDS_IN
            with suppress(subprocess.TimeoutExpired):  # it has nearly always ended by now
                self._process.wait(0.02)
                self._handle_exit(now)

    def end(self) -> None:
        """Tell ssh to end, from any thread; `forget` waits for it."""
        process = self._process
        if process is not None:
            process.terminate()

    def forget(self, until: float) -> None:
        """Make sure that ssh has ended, killing it after the given time."""
        self._drop(until)
        for process, _ in self._ending:
            end_child(process, max(0.0, until - time.monotonic()))
        self._ending.clear()

    def _drop(self, now: float) -> None:
        """Let ssh end by itself; waiting for it would block the other machines."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        if process.poll() is None:
            self._ending.append((process, now + ENDS_IN))

    def _reap(self, now: float) -> None:
        for process, at in self._ending:
            if now >= at:
                process.kill()
        left = [(process, at) for process, at in self._ending if process.poll() is None]
        self._ending = [(process, at if now < at else now + ENDS_IN) for process, at in left]

    # # -- lifecycle -------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        words = ["--version"] if self._asks_version else self._words
        self._listener, self._rest, self._errors = ReportReader(), b"", b""
        self._patience = _FIRST_REPORT_TIMEOUT
        self._due = now + self._patience
        if self.view.status != "away":
            self.view = replace(self.view, status="connecting")
        try:
            self._process = subprocess.Popen(
                ssh_command(self.view.box, words, share=not self._unshared),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # shield it from Ctrl-C and Ctrl-Z in our terminal
            )
        except OSError as error:
            self._fail(now, f"cannot run ssh here ({error.strerror})", _RETRY_DELAYS)
        else:
            wait_for_by_hand(self._process.pid)  # its exit status is needed

    def _consume(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._asks_version:
            self._rest = data[:100]
            return
        try:
            for line in lines:
                _check_length(line)
                if (snapshot := self._listener.take(line)) is not None:
                    looks = _MAX_MISSED * snapshot.head.interval
                    self._patience = max(_FIRST_REPORT_TIMEOUT, looks)
                    self._failures, self._due = 0, now + self._patience
                    self.view = replace(
                        self.view, status="here", why=snapshot.problem, snapshot=snapshot, heard=now
                    )
            _check_length(self._rest)
        except UserError as error:
            self._fail(now, str(error), (_RETRY_PERMANENT,))

    def _handle_exit(self, now: float) -> None:
        """Determine why ssh has closed its output."""
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            self._process.kill()
            status = self._process.wait()
        self._read_last_errors()
        self._unshared = False  # avoid the shared connection, which may be what hangs
        errors = self._errors.decode(errors="replace")
        if self._asks_version and status != FAILED:
            self._asks_version = False
            version = self._rest.decode(errors="replace").rpartition(" ")[2].strip() or "unknown"
            why = f"its fsdp-tui is {version}, too old for this; update it there"
            self._fail(now, why, (_RETRY_PERMANENT,))
        elif is_too_old(status, errors):
            self._asks_version = True
            self._fail(now, "its fsdp-tui is too old for this; update it there", (0.0,))
        else:
            again = _RETRY_DELAYS if status == FAILED or status <= 0 else (_RETRY_PERMANENT,)
            self._fail(now, why_failed(self.view.box, status, errors), again)

    def _read_last_errors(self) -> None:
        """Read the remaining stderr without waiting: other processes may hold the pipe open."""
        errors = self._process.stderr if self._process is not None else None
        if errors is None or errors.closed:
            return
        os.set_blocking(errors.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(errors.fileno(), _READ_SIZE):
                self._errors = (self._errors + data)[-_STDERR_TAIL:]

    def _fail(self, now: float, why: str, again: Sequence[float]) -> None:
        self._drop(now)
        self._due = now + again[min(self._failures, len(again) - 1)]
        self._failures += 1
        self.view = replace(self.view, status="away", why=one_line(why))


def _check_length(line: bytes) -> None:
    if len(line) > LONGEST:
        raise UnreadableError(f"it sent a line of more than {LONGEST >> 10} KiB")


# -- watch ----------------------------------------------------------------------------------


# Pause between two reads, so that a burst of reports is published once and an endless stream does
# not occupy a core.
_READ_PAUSE: Final = 0.05


class FleetWatch:
    """The connections to all machines, and what is known about each."""

    def __init__(self, fleet: Fleet) -> None:
        self.links = [Link(box, fleet.interval) for box in fleet.machines]
        self._retry_requested = threading.Event()
        self._closed = threading.Event()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def views(self) -> tuple[BoxView, ...]:
        return tuple(link.view for link in self.links)

    def run(self, publish: Callable[[tuple[BoxView, ...]], None]) -> None:
        """Call `publish` after each change, until `close`."""
        shown: tuple[BoxView, ...] = ()
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                if self._retry_requested.is_set():
                    self._retry_requested.clear()
                    for link in self.links:
                        link.retry_now(now)
                for link in self.links:
                    link.run_due(now)
                if self.views != shown:
                    shown = self.views
                    publish(shown)
                self._wait()
        finally:
            for link in self.links:
                link.end()
            until = time.monotonic() + ENDS_IN
            for link in self.links:
                link.forget(until)
            os.close(self._woken)

    def _wait(self) -> None:
        """Wait until there is input or an action is due."""
        due = min((link.due for link in self.links), default=float("inf"))
        left = None if due == float("inf") else max(0.0, due - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for link in self.links:
                for file in link.files():
                    selector.register(file, selectors.EVENT_READ, link)
            for key, _ in selector.select(left):
                if key.data is None:
                    os.read(self._woken, 4096)
                # otherwise the link has failed while handling its other descriptor
                elif key.fd in key.data.files():
                    key.data.read(key.fd, time.monotonic())
        if not self._retry_requested.is_set():
            self._closed.wait(_READ_PAUSE)

    def retry(self) -> None:
        """Retry the machines that are away or silent now. Thread-safe."""
        self._retry_requested.set()
        self._wake()

    def close(self) -> None:
        """End everything, including every ssh, whatever the thread is doing.

        Thread-safe; call once.
        """
        self._closed.set()
        for link in self.links:
            link.end()
        self._wake()
        os.close(self._wakes)

    def _wake(self) -> None:
        try:
            os.write(self._wakes, b".")
        except OSError:  # full or closed
            return
