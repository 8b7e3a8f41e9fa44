"""What a rank says of itself: a status file about once a second, and rank 0's event stream."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

import psutil

from engine.ranks.progress import Progress
from jobs.machine.procfs import started_at
from jobs.run.events import PhaseEvent, Warned
from jobs.run.fence import FENCE_VARIABLE, taken_over
from jobs.run.rundir import FLIGHT, PHASES, RankStatus, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.ranks.peaks import Peaks
    from jobs.run.events import Event
    from jobs.run.rundir import RunDir

_STATUS_EVERY: Final = 1.0  # seconds
_GAVE_WAY: Final = 1  # exit status
# Phases whose peak memory is recorded. The others hold nothing, or contain other phases.
_MEASURED: Final = ("encode", "latents", "load", "sample", "copy", "save", "export")


class Telemetry:
    """Owned by one rank. Everything but `close` may be called before torch is imported."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.phase_name = "start"
        self.step = 0
        self.total_steps: int | None = None  # until the data is counted
        self.done: int | None = None  # of the phase's shared work
        self.device = "cpu"
        self.device_uuid: str | None = None
        self.gpu: str | None = None  # its name
        self.gpu_memory: int | None = None  # bytes
        self.peaks: Peaks | None = None  # until torch and the device are known
        self.record_flight: Callable[[], None] | None = None  # the same
        self._process = psutil.Process()
        self._started = started_at(os.getpid()) or 0.0
        self._progressed = time.time()
        self._shared = FENCE_VARIABLE in os.environ  # machines share the run directory
        self._ended = threading.Event()
        self._one_at_a_time = threading.Lock()
        # Line-buffered, so that each event is one write and a reader sees whole lines.
        self._events = (
            open(run_dir.events, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - for life
            if rank == 0
            else None
        )
        self._thread = threading.Thread(target=self._keep_writing, name="status", daemon=True)
        self._write_status()
        self._thread.start()

    # -- events ----------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Append an event (rank 0; on other ranks nothing happens)."""
        with self._one_at_a_time:  # caches are filled, and data read, by several threads
            if self._events is not None:
                with suppress(OSError):  # a full disk must not end the training
                    self._events.write(event.line())

    def say(self, text: str) -> None:
        """Write a line to this rank's log."""
        with suppress(OSError):  # as above
            print(time.strftime("%H:%M:%S"), text, flush=True)

    def warn(self, text: str) -> None:
        """Write a line to the log, and emit an event that the dashboard shows."""
        self.say(f"WARNING {text}")
        self.emit(Warned(text))

    def moved(self, step: int | None = None) -> None:
        """Record progress: a step, a file, a tensor."""
        self._progressed = time.time()
        if step is not None:
            self.step = step

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, *, shared: bool = False
    ) -> Iterator[Progress]:
        """Run a phase; yields a function to call with the number of things done.

        Args:
            name: A key of `jobs.run.rundir.PHASES`.
            total: What is counted up to, if known.
            shared: Whether ranks share the work and each counts its own part.
        """
        assert name in PHASES, name
        before, self.phase_name = self.phase_name, name
        begun = time.time()
        self.done = 0 if shared else None
        self.moved()
        self._write_status()
        self.emit(PhaseEvent(name, "begin", total=total))
        progress = Progress(self, name, total, shared=shared)
        measured = self.peaks.phase(name) if self.peaks and name in _MEASURED else nullcontext()
        with measured:
            yield progress
        seconds = round(time.time() - begun, 3)
        self.emit(PhaseEvent(name, "end", total or 0, total, seconds=seconds, ranks=progress.ranks))
        self.done = None
        self.phase_name = before
        self.moved()

    # -- status ----------------------------------------------------------------------------

    def status(self) -> RankStatus:
        """Return this rank's current status."""
        return RankStatus(
            rank=self.rank,
            pid=os.getpid(),
            started=self._started,
            host=socket.gethostname(),
            device=self.device,
            device_uuid=self.device_uuid,
            gpu=self.gpu,
            gpu_memory=self.gpu_memory,
            phase=self.phase_name,
            step=self.step,
            total_steps=self.total_steps,
            heartbeat=time.time(),
            progressed=self._progressed,
            rss=self._process.memory_info().rss,
            done=self.done,
            peaks=dict(self.peaks.phases) if self.peaks else None,
            **(self.peaks.memory() if self.peaks else {}),
        )

    def close(self) -> None:
        """Write the last status and stop."""
        self._ended.set()
        self._thread.join(timeout=5)
        self._write_status()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _keep_writing(self) -> None:
        while not self._ended.wait(_STATUS_EVERY):
            self._give_way()
            self._write_status()
            if self.rank == 0:
                self._pass_on()
                self._sync()
            if self.record_flight is not None and self.run_dir.requested(FLIGHT):
                with suppress(OSError, ValueError):
                    self.record_flight()
                self.record_flight = None  # once: the job is about to be ended

    def _give_way(self) -> None:
        """End at once, without a word to other ranks, if another allocation has the run now.

        This node was cut off, and Slurm has started the job elsewhere: what this rank wrote would
        mix with what the new ranks write. No collective, no save: the others may be gone.
        """
        if self._shared and (other := taken_over(self.run_dir.root)):
            self.say(f"allocation {other} of this job has taken over; exiting")
            os._exit(_GAVE_WAY)

    def _pass_on(self) -> None:
        """Report the trackers' warnings: only rank 0 writes events."""
        with suppress(OSError, ValueError):
            for path in self.run_dir.tracking.glob("*.warning"):
                text = path.read_text(encoding="utf-8").strip()
                path.unlink()
                self.warn(text)

    def _sync(self) -> None:
        """Let other machines see the events: an open file's bytes may stay here for a minute."""
        if self._shared and self._events is not None:
            with suppress(OSError, ValueError):
                os.fsync(self._events.fileno())

    def _write_status(self) -> None:
        try:
            write_atomic(self.run_dir.rank_file(self.rank), self.status().to_json() + "\n")
        except OSError as error:  # a full disk must not end the training
            print(f"could not write the status file: {error}", flush=True)
