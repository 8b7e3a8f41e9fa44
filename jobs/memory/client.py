"""The one warm process that predicts: started when it is first needed, ended with its owner.

It ends when its standard input does, so that it cannot outlive us however we end.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import SpecError
from jobs.machine.child import end_child, start_child
from jobs.machine.engine_tools import Cancelled, ToolError
from jobs.memory.cache import forget_old

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import IO

COMMAND: Final = (sys.executable, "-m", "engine.memory")
PATIENCE: Final = 180.0  # seconds for an answer; a large model on a busy login node takes 20
_NOTICE_WITHIN: Final = 0.1  # seconds in which it is noticed that nobody wants the answer any more
_NICE: Final = 10  # it computes beside training and beside what others do on a login node
_GRACE: Final = 2.0  # seconds to end after its input has ended
_LAST_WORDS: Final = 2000  # bytes of its standard error that are read


class Gone(ToolError):
    """The process ended instead of answering."""


class Server:
    """Asks `python -m engine.memory`, one question at a time. Threads may share it.

    A question that nobody waits for any more is not sent; the answer to one that was sent already
    is dropped when it comes.

    Args:
        command: What is started.
        patience: Seconds to wait for an answer.
    """

    def __init__(self, command: Sequence[str] | None = None, patience: float = PATIENCE) -> None:
        self._command = command
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._rest = b""
        self._outstanding = 0  # questions that were sent and not answered; answers come in order
        self._numbers = itertools.count(1)
        self._talking = threading.Lock()
        self._starting = threading.Lock()  # `close` ends what is being started, too
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def ask(
        self, request: dict[str, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Return the answer to a request (see `engine.memory`), without its `id`.

        Args:
            request: Without an `id`.
            cancelled: Asked many times a second, in the thread of the caller.

        Raises:
            SpecError: The request cannot be answered: a bad job, or an unknown model.
            ToolError: The process failed, twice, or takes too long.
            Cancelled: `cancelled` said so.
        """
        deadline = time.monotonic() + self._patience
        while not self._talking.acquire(timeout=_NOTICE_WITHIN):
            _go_on(cancelled, deadline)
        try:
            try:
                answer = self._ask(request, cancelled, deadline)
            except Gone:  # killed from outside, perhaps; a new one may do
                answer = self._ask(request, cancelled, deadline)
        finally:
            self._talking.release()
        if "error" in answer:
            raise SpecError(str(answer["error"]), answer.get("hint"))
        return answer

    def close(self) -> None:
        """End the process, and start none any more."""
        self._closed = True
        with self._starting:
            self._end()

    def _ask(
        self, request: dict[str, Any], cancelled: Callable[[], bool], deadline: float
    ) -> dict[str, Any]:
        process = self._running()
        while self._outstanding:  # what it computes now is wanted no more, and keeps it busy
            self._read(process, cancelled, deadline)
            self._outstanding -= 1
        line = json.dumps(request | {"id": next(self._numbers)}) + "\n"
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode())
            process.stdin.flush()
        except OSError:
            raise self._gone() from None
        self._outstanding += 1
        answer = self._read(process, cancelled, deadline)
        self._outstanding -= 1
        answer.pop("id", None)
        return answer

    def _read(
        self, process: subprocess.Popen[bytes], cancelled: Callable[[], bool], deadline: float
    ) -> dict[str, Any]:
        """Read the next line; skip lines that are not JSON objects."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._rest.partition(b"\n")
                if newline:
                    self._rest = rest
                    with suppress(ValueError):
                        if isinstance(answer := json.loads(line), dict):
                            return answer
                    continue
                try:
                    _go_on(cancelled, deadline)
                except ToolError:
                    self._end()  # whatever it does there, it does not come back
                    raise
                if not waiting.select(_NOTICE_WITHIN):
                    continue
                if not (data := os.read(process.stdout.fileno(), 1 << 16)):
                    raise self._gone()
                self._rest += data

    # -- the process -----------------------------------------------------------------------

    def _running(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._closed:
                raise ToolError("prediction cancelled: the dashboard is closing")
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._end()
            self._rest, self._outstanding = b"", 0
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
            process = self._process = start_child(
                self._command or COMMAND,
                {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for whoever asks
            )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
        forget_old()  # while it imports torch
        return process

    def _gone(self) -> Gone:
        last_line = ""
        if self._errors is not None:
            end = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, end - _LAST_WORDS))
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            last_line = lines[-1] if lines else ""
        self._end()
        return Gone(f"python -m engine.memory failed: {last_line or 'it exited without an answer'}")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        end_child(process, _GRACE)
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _go_on(cancelled: Callable[[], bool], deadline: float) -> None:
    if cancelled():
        raise Cancelled
    if time.monotonic() > deadline:
        raise ToolError("the memory prediction timed out; try again")


_shared: list[Server] = []
_SHARED_LOCK: Final = threading.Lock()


def shared() -> Server:
    """Return the server of this process; all callers share it."""
    with _SHARED_LOCK:
        if not _shared:
            _shared.append(Server())
            atexit.register(_shared[0].close)
        return _shared[0]
