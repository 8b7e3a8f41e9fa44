"""Report a rank's status: a status file about once a second, and rank 0's event stream."""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import torch

from jobs.machine.procfs import started_at
from jobs.run.events import PhaseEvent, Warned
from jobs.run.fence import FENCE_VARIABLE, taken_over
from jobs.run.rundir import FLIGHT, PHASES, RankStatus, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.run.events import Event
    from jobs.run.rundir import RunDir


# -- peaks ----------------------------------------------------------------------------------
# Measure the peak memory of each phase on this rank.


_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")


class Peaks:
    """Measures phases, one after another.

    On a GPU, this is the peak of torch's allocator. On CPU ranks, it is the peak resident set of
    the process, which the kernel tracks and lets a process reset.

    Attributes:
        phases: Bytes per phase, the largest of all its runs.
        doing: The phase that is running or has failed, else None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = 0
        self.phases: dict[str, int] = {}
        self.doing: str | None = None

    @property
    def measure(self) -> str:
        """Return what is measured: `allocated` on a GPU, `rss` on CPU ranks."""
        return "allocated" if self._device.type == "cuda" else "rss"

    @contextmanager
    def phase(self, name: str, *, measured: bool = True) -> Iterator[None]:
        """Measure a phase, or only record its name. Phases must not be nested."""
        self.doing = name
        if measured:
            self._reset()
        try:
            yield
            self.doing = None
        finally:
            if measured:
                self.phases[name] = max(self.phases.get(name, 0), self._peak())

    def memory(self) -> dict[str, int | None]:
        """Return the bytes that torch holds on this rank's GPU, now and at peak; empty on CPU."""
        if self._device.type != "cuda":
            return {}
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "peak": max(self._highest, torch.cuda.max_memory_allocated(self._device)),
        }

    def _reset(self) -> None:
        if self._device.type == "cuda":
            self._highest = max(self._highest, torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # not allowed in some containers: then the peak is the run's
                _CLEAR.write_text("5")  # resets the high-water mark of the resident set

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with suppress(OSError, ValueError, IndexError):
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# -- progress -------------------------------------------------------------------------------
# Report the progress of a phase, on one rank or over all ranks that share its work.


_EVERY: Final = 0.5  # seconds


class Progress:
    """Called with the number of finished items; reports it in the events, a few times a second.

    Attributes:
        total: Total number of items, if known; may be set later.
        ranks: Finished items of each rank in shared work, as far as known.

    Args:
        telemetry: The rank's telemetry.
        name: The phase.
        total: Total number of items over all ranks, if known.
        shared: Whether ranks share the work, so that each counts its own part.
    """

    def __init__(self, telemetry: Telemetry, name: str, total: int | None, *, shared: bool) -> None:
        self._telemetry = telemetry
        self._name = name
        self.total = total
        self._shared = shared
        self._last_event = 0.0
        self._first: tuple[float, int] | None = None
        self.ranks: list[int] | None = None

    def __call__(self, done: int) -> None:
        """Report the finished items (in shared work: of this rank), and record progress."""
        self._telemetry.moved()
        if self._shared:
            self._telemetry.done = done
        self.say(done)

    def say(self, done: int) -> None:
        """Report the progress of all ranks while this rank waits for the others.

        Waiting is not recorded as progress: the other ranks record their own, and if none of them
        does, the job makes no progress.
        """
        if time.monotonic() - self._last_event < _EVERY:
            return
        self._last_event = time.monotonic()
        if self._shared and self._telemetry.rank == 0:
            self.ranks = self._done_by_rank(done)
            done = sum(self.ranks)
        self._telemetry.emit(
            PhaseEvent(
                self._name,
                "progress",
                done,
                self.total,
                seconds_left=self._seconds_left(done),
                ranks=self.ranks,
            )
        )

    def _done_by_rank(self, mine: int) -> list[int]:
        """Return the count of each rank; the others report theirs about once a second."""
        others = {
            status.rank: status.done or 0
            for status in self._telemetry.run_dir.rank_statuses()
            if status.phase == self._name
        }
        return [mine] + [others.get(rank, 0) for rank in range(1, max(others, default=0) + 1)]

    def _seconds_left(self, done: int) -> float | None:
        """Return the estimated seconds left, at the pace since the first item was finished.

        The time before that is ignored, since it includes loading a model.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done) if done else None
            return None
        begun, at = self._first
        if self.total is None or done <= at:
            return None
        return round((self.total - done) * (now - begun) / (done - at), 1)


# -- telemetry ------------------------------------------------------------------------------


_STATUS_EVERY: Final = 1.0  # seconds
_REPLACED: Final = 1  # exit status
_OF_A_RANK: Final = "rank-"  # begins the name of what a rank leaves for rank 0
# Phases whose peak memory is recorded. The others hold nothing, or contain other phases.
_MEASURED: Final = ("encode", "latents", "load", "sample", "score", "copy", "save", "export")


class Telemetry:
    """Telemetry of one rank. All methods except `close` may be called before torch is imported."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.phase_name = "start"
        self.step = 0
        self.total_steps: int | None = None  # None until the data is counted
        self.steps_per_epoch: float | None = None  # likewise
        self.done: int | None = None  # finished items of the phase's shared work
        self.device = "cpu"
        self.device_uuid: str | None = None
        self.gpu: str | None = None  # its name
        self.gpu_memory: int | None = None  # bytes
        self.peaks: Peaks | None = None  # None until torch and the device are known
        self.record_flight: Callable[[], None] | None = None  # likewise
        self._process = psutil.Process()
        self._started = started_at(os.getpid()) or 0.0
        self._progressed = time.time()
        self._shared = FENCE_VARIABLE in os.environ  # several machines share the run directory
        self._ended = threading.Event()
        self._passed_on: set[str] = set()
        self._lock = threading.Lock()
        # Buffer by line, so that each event is one write and readers see complete lines.
        self._events = (
            open(run_dir.events, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - for life
            if rank == 0
            else None
        )
        self._thread = threading.Thread(target=self._write_periodically, name="status", daemon=True)
        self._write_status()
        self._thread.start()

    # -- events ----------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Append an event on rank 0; do nothing on other ranks."""
        with self._lock:  # caches are filled, and data read, by several threads
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

    def pass_on(self, text: str) -> None:
        """Warn of what may happen on any rank, once: others leave it for rank 0, which emits it."""
        self.say(f"WARNING {text}")
        if self.rank == 0:
            self._emit_once(text)
            return
        name = f"{_OF_A_RANK}{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        with suppress(OSError):  # as above
            self.run_dir.tracking.mkdir(mode=0o700, exist_ok=True)
            write_atomic(self.run_dir.tracker_warning(name), text)

    def _emit_once(self, text: str) -> None:
        if text not in self._passed_on:
            self._passed_on.add(text)
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
        """Run a phase; yields a callable that takes the number of finished items.

        Args:
            name: A key of `jobs.run.rundir.PHASES`.
            total: Total number of items, if known.
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
            steps_per_epoch=self.steps_per_epoch,
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

    def _write_periodically(self) -> None:
        while not self._ended.wait(_STATUS_EVERY):
            self._exit_if_replaced()
            self._write_status()
            if self.rank == 0:
                self._emit_warnings()
                self._sync()
            if self.record_flight is not None and self.run_dir.requested(FLIGHT):
                with suppress(OSError, ValueError):
                    self.record_flight()
                self.record_flight = None  # only once: the job is about to be ended

    def _exit_if_replaced(self) -> None:
        """Exit at once, without notifying other ranks, if another allocation now owns the run.

        In that case, this node was cut off and Slurm has started the job elsewhere, so anything
        this rank writes would mix with the output of the new ranks. Run no collective and save
        nothing, since the other ranks may be gone.
        """
        if self._shared and (other := taken_over(self.run_dir.root)):
            self.say(f"allocation {other} of this job has taken over; exiting")
            os._exit(_REPLACED)

    def _emit_warnings(self) -> None:
        """Emit warnings of trackers and of other ranks, since only rank 0 writes events."""
        with suppress(OSError, ValueError):
            for path in self.run_dir.tracking.glob("*.warning"):
                text = path.read_text(encoding="utf-8").strip()
                path.unlink()
                if path.name.startswith(_OF_A_RANK):
                    self._emit_once(text)
                else:
                    self.warn(text)

    def _sync(self) -> None:
        """Flush events to other machines, since an open file's data may stay local for a minute."""
        if self._shared and self._events is not None:
            with suppress(OSError, ValueError):
                os.fsync(self._events.fileno())

    def _write_status(self) -> None:
        try:
            write_atomic(self.run_dir.rank_file(self.rank), self.status().to_json() + "\n")
        except OSError as error:  # a full disk must not end the training
            print(f"could not write the status file: {error}", flush=True)
