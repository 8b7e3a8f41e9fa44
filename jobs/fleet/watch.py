"""All boxes at once: one thread reads what they say. It holds no truth; each box does of itself."""

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
from jobs.fleet.lines import LONGEST, Listener, UnreadableError
from jobs.fleet.ssh import FAILED, is_too_old, ssh_command, why_failed
from jobs.machine.child import end_child
from jobs.machine.processes import wait_for_by_hand
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobs.fleet.config import Box, Fleet
    from jobs.fleet.lines import Snapshot


# -- link -----------------------------------------------------------------------------------
# The connection to one box: a long-lived ssh with `list --watch` at its other end.


Status = Literal["connecting", "here", "silent", "away"]

_FIRST_WORD: Final = 30.0  # seconds from the start of ssh to the end of the box's first look
_MOST_MISSED: Final = 6.0  # looks, after which the connection is given up
ENDS_IN: Final = 2.0  # seconds that ssh has to end after SIGTERM, or its end of output
_AGAIN: Final = (2.0, 4.0, 8.0, 15.0)  # seconds until the next try
_AGAIN_SETTLED: Final = 60.0  # where ssh works, and what it finds there will not pass by itself
# Where ssh works, and what it started there hangs: each try may leave one more process there, which
# ends once it is no longer stuck.
_AGAIN_HUNG: Final = (2.0, 60.0, 300.0)
_LOOKS_MISSED: Final = 2.0
_KEPT_ERRORS: Final = 4096  # bytes
_AT_ONCE: Final = 1 << 16  # bytes


@dataclass(frozen=True)
class BoxView:
    """What is known about a box at one moment.

    Attributes:
        box: Which.
        status: Of the connection; see `status_at`.
        why: Why it is away, or what else is wrong, a sentence.
        snapshot: Its last report; None before the first.
        heard: When that arrived, by our own monotonic clock.
        received: Bytes received from it in total.
    """

    box: Box
    status: Status = "connecting"
    why: str = ""
    snapshot: Snapshot | None = None
    heard: float | None = None
    received: int = 0

    def status_at(self, now: float) -> Status:
        """Return the status: a box that has missed refreshes is silent.

        Its ssh is alive, but the box or the connection hangs.
        """
        if self.status == "here" and self.snapshot is not None and self.heard is not None:
            late = now - self.heard > _LOOKS_MISSED * self.snapshot.head.interval
            return "silent" if late else "here"
        return self.status


class Link:
    """Starts ssh, reads what comes, and starts it again when it has ended. For one thread."""

    def __init__(self, box: Box, interval: float) -> None:
        """
        Args:
            box: To which.
            interval: Seconds between two looks there.
        """
        self.view = BoxView(box)
        self._due = 0.0
        self._words = ["list", "--watch", "--json", "--machine", "--interval", f"{interval:g}"]
        self._asks_version = False
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = Listener()
        self._rest = self._errors = b""
        self._failures = 0
        self._patience = _FIRST_WORD  # seconds until a box that says nothing is given up
        self._alone = False  # the connection that is shared may be what hangs
        self._ending: list[tuple[subprocess.Popen[bytes], float]] = []  # killed when it is time

    @property
    def due(self) -> float:
        """When something is to be done even if nothing comes, monotonic."""
        return min([self._due, *(at for _, at in self._ending)])

    def files(self) -> Sequence[int]:
        """Return the file descriptors to wait for."""
        if self._process is None:
            return ()
        pipes = (self._process.stdout, self._process.stderr)
        return [pipe.fileno() for pipe in pipes if pipe is not None and not pipe.closed]

    def tend(self, now: float) -> None:
        """Do what is due."""
        self._reap(now)
        if now < self._due:
            return
        if self._process is None:
            self._start(now)
        elif self._process.stdout is not None and self._process.stdout.closed:
            self._settle(now)
        else:
            self._alone = not self._alone
            self._fail(now, f"no answer within {self._patience:.0f} s", _AGAIN_HUNG)

    def hurry(self, now: float) -> None:
        """Try at once, if it is away or silent."""
        if self._process is not None and self.view.status_at(now) == "silent":
            self._alone = not self._alone
            self._drop(now)
        if self._process is None:
            self._due, self._failures = 0.0, 0

    def read(self, file: int, now: float) -> None:
        """Read what has come."""
        assert self._process is not None
        out, errors = self._process.stdout, self._process.stderr
        assert out is not None
        assert errors is not None
        data = os.read(file, _AT_ONCE)
        if not errors.closed and file == errors.fileno():
            self._errors = (self._errors + data)[-_KEPT_ERRORS:]
            if not data:
                errors.close()
        elif data:
            self.view = replace(self.view, received=self.view.received + len(data))
            self._take(data, now)
        else:
            out.close()
            self._due = now + ENDS_IN
            with suppress(subprocess.TimeoutExpired):  # it has nearly always ended by now
                self._process.wait(0.02)
                self._settle(now)

    def end(self) -> None:
        """Ask ssh to end, from any thread; `forget` waits for it."""
        process = self._process
        if process is not None:
            process.terminate()

    def forget(self, until: float) -> None:
        """Make sure that it has ended; it has until this time to do so by itself."""
        self._drop(until)
        for process, _ in self._ending:
            end_child(process, max(0.0, until - time.monotonic()))
        self._ending.clear()

    def _drop(self, now: float) -> None:
        """Let ssh end by itself: to wait for it would hold up the other boxes."""
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

    # -- its life --------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        words = ["--version"] if self._asks_version else self._words
        self._listener, self._rest, self._errors = Listener(), b"", b""
        self._patience = _FIRST_WORD
        self._due = now + self._patience
        if self.view.status != "away":
            self.view = replace(self.view, status="connecting")
        try:
            self._process = subprocess.Popen(
                ssh_command(self.view.box, words, share=not self._alone),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C and Ctrl-Z in our terminal are not for it
            )
        except OSError as error:
            self._fail(now, f"cannot run ssh here ({error.strerror})", _AGAIN)
        else:
            wait_for_by_hand(self._process.pid)  # its exit status says what has happened

    def _take(self, data: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._asks_version:
            self._rest = data[:100]
            return
        try:
            for line in lines:
                _check_length(line)
                if (snapshot := self._listener.take(line)) is not None:
                    looks = _MOST_MISSED * snapshot.head.interval
                    self._patience = max(_FIRST_WORD, looks)
                    self._failures, self._due = 0, now + self._patience
                    self.view = replace(
                        self.view, status="here", why=snapshot.problem, snapshot=snapshot, heard=now
                    )
            _check_length(self._rest)
        except UserError as error:
            self._fail(now, str(error), (_AGAIN_SETTLED,))

    def _settle(self, now: float) -> None:
        """ssh has closed its output: say why."""
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            self._process.kill()
            status = self._process.wait()
        self._read_last_errors()
        self._alone = False  # the shared one may be the one that needs no password
        errors = self._errors.decode(errors="replace")
        if self._asks_version and status != FAILED:
            self._asks_version = False
            version = self._rest.decode(errors="replace").rpartition(" ")[2].strip() or "unknown"
            why = f"its fsdp-tui is {version}, too old for this; update it there"
            self._fail(now, why, (_AGAIN_SETTLED,))
        elif is_too_old(status, errors):
            self._asks_version = True
            self._fail(now, "its fsdp-tui is too old for this; update it there", (0.0,))
        else:
            again = _AGAIN if status == FAILED or status <= 0 else (_AGAIN_SETTLED,)
            self._fail(now, why_failed(self.view.box, status, errors), again)

    def _read_last_errors(self) -> None:
        """Read the remaining stderr without waiting: other processes may hold the pipe open."""
        errors = self._process.stderr if self._process is not None else None
        if errors is None or errors.closed:
            return
        os.set_blocking(errors.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(errors.fileno(), _AT_ONCE):
                self._errors = (self._errors + data)[-_KEPT_ERRORS:]

    def _fail(self, now: float, why: str, again: Sequence[float]) -> None:
        self._drop(now)
        self._due = now + again[min(self._failures, len(again) - 1)]
        self._failures += 1
        self.view = replace(self.view, status="away", why=one_line(why))


def _check_length(line: bytes) -> None:
    if len(line) > LONGEST:
        raise UnreadableError(f"it sent a line of more than {LONGEST >> 10} KiB")


# -- watch ----------------------------------------------------------------------------------


# Between two reads: what a box says in a burst is shown once, and one that talks without end
# costs no core.
_REST: Final = 0.05


class FleetWatch:
    """Connections to the boxes, and what is known about each."""

    def __init__(self, fleet: Fleet) -> None:
        self.links = [Link(box, fleet.interval) for box in fleet.machines]
        self._retry_requested = threading.Event()
        self._closed = threading.Event()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def views(self) -> tuple[BoxView, ...]:
        return tuple(link.view for link in self.links)

    def run(self, publish: Callable[[tuple[BoxView, ...]], None]) -> None:
        """Call `publish` with each change, until `close`."""
        shown: tuple[BoxView, ...] = ()
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                if self._retry_requested.is_set():
                    self._retry_requested.clear()
                    for link in self.links:
                        link.hurry(now)
                for link in self.links:
                    link.tend(now)
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
        """Until something comes, or is due."""
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
                elif key.fd in key.data.files():  # else it has failed over the other one
                    key.data.read(key.fd, time.monotonic())
        if not self._retry_requested.is_set():
            self._closed.wait(_REST)

    def retry(self) -> None:
        """Try the boxes that are away or silent now. From any thread."""
        self._retry_requested.set()
        self._wake()

    def close(self) -> None:
        """End, with every ssh, whatever the thread does now. From any thread, once."""
        self._closed.set()
        for link in self.links:
            link.end()
        self._wake()
        os.close(self._wakes)

    def _wake(self) -> None:
        try:
            os.write(self._wakes, b".")
        except OSError:  # full, or over
            return
