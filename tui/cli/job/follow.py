"""Follow a job in the foreground: its log on standard output, its states on standard error."""

from __future__ import annotations

import codecs
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jobs import service
from jobs.errors import StateError
from jobs.queue.states import State
from jobs.run.disk_space import find_cut
from jobs.run.eventlog import EventLog
from jobs.run.rundir import PHASES
from tui.cli.echo import Stream, echo, pause
from tui.text.format import state_text

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Job, Store
    from jobs.run.disk_space import Cut

_LOOK_EVERY = 0.25
_FINGERPRINT = 64  # bytes
_BLOCK = 64 << 10  # bytes to read at a time from the end of a log
EXIT_STATUS = {State.COMPLETED: 0, State.STOPPED: 3, State.FAILED: 1, State.LOST: 1}


def follow_job(store: Store, job_id: int) -> int:
    """Print rank 0's log and every change of state until the job ends.

    Ctrl-C requests a stop, escalating each time; the job is followed to its end.

    Returns:
        The exit status for how the job ended.
    """
    before = signal.signal(signal.SIGINT, lambda *_: _stop(store, job_id))
    try:
        job = store.get(job_id)
        _note(f"job {job_id} · {job.run_dir.root}")
        job = _follow(store, job, _Tail(job.run_dir.rank_log(0)), states=True)
    finally:
        signal.signal(signal.SIGINT, before)
    return EXIT_STATUS[job.state]


def follow_log(
    store: Store, job_id: int, path: Path, *, forever: bool, last: int | None = None
) -> None:
    """Print a log, starting with its last lines if their number is given.

    With `forever`, follow it until the job has ended.
    """
    tail = _Tail(path)
    if last is not None:
        tail.skip_to(last)
    if not forever:
        tail.copy_new()
        return
    _follow(store, store.get(job_id), tail, states=False)


def _follow(store: Store, job: Job, tail: _Tail, *, states: bool) -> Job:
    events = EventLog(job.run_dir.events)
    shown: Any = None
    phase: Any = None
    while True:
        service.refresh(store)
        job = store.get(job.id)
        # Read the state first: if the job has ended, the log copied below is complete.
        tail.copy_new()
        if states:
            if (job.state, job.reason) != shown:
                shown = (job.state, job.reason)
                _note(state_text(job.state, job.reason))
            events.poll()
            if events.phase is not None and events.phase.name != phase:
                phase = events.phase.name
                if events.phase.total:
                    _note(f"{PHASES.get(phase, phase)} (0 of {events.phase.total})")
        if job.state.ended:
            return job
        pause(_LOOK_EVERY)


class _Tail:
    """Copies what is appended to a file to standard output; keeps colors, drops other sequences."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._cut: Cut | None = None  # of the part that was read
        self._last = b""  # bytes before the offset
        # A multi-byte character may be split between two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = Stream()

    def skip_to(self, lines: int) -> None:
        """Skip all but the last lines; reads only the end of the file."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            self._cut = find_cut(file.fileno())
            at = end = file.seek(0, os.SEEK_END)
            tail = b""
            while at and tail.count(b"\n", 0, -1) < lines:
                at = max(0, at - _BLOCK)
                tail = os.pread(file.fileno(), end - at, at)
            begin = len(tail) - 1  # a final newline starts no line
            for _ in range(lines):
                begin = tail.rfind(b"\n", 0, max(0, begin))
            self._offset = at + begin + 1
            begin = max(0, self._offset - _FINGERPRINT)
            self._last = os.pread(file.fileno(), self._offset - begin, begin)

    def copy_new(self) -> None:
        try:
            with open(self._path, "rb") as file:
                self._notice_cut(file.fileno())
                file.seek(self._offset)
                while data := file.read(1 << 20):
                    self._offset += len(data)
                    self._last = (self._last + data[-_FINGERPRINT:])[-_FINGERPRINT:]
                    sys.stdout.write(self._text.take(self._decoder.decode(data)))
        except FileNotFoundError:
            return
        sys.stdout.flush()

    def _notice_cut(self, log: int) -> None:
        """Detect that a log was truncated or replaced, by comparing what was read last."""
        size = len(self._last)
        if self._offset and os.pread(log, size, self._offset - size) == self._last:
            return
        before, self._cut = self._cut, find_cut(log)
        self._offset = self._cut.now_at(self._offset, before) if self._offset and self._cut else 0
        self._last = os.pread(
            log, min(_FINGERPRINT, self._offset), max(0, self._offset - _FINGERPRINT)
        )


def _stop(store: Store, job_id: int) -> None:
    try:
        _note(service.stop(store, job_id))
    except StateError:
        return  # it has ended in the meantime


def _note(text: str) -> None:
    echo(f"fsdp-tui: {text}", err=True)
