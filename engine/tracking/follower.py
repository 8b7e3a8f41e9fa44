"""Follow a run's events and send them to a tracker, without delaying the run."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
import uuid
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard, get_args

from engine.tracking.client import TAKES_BACK, open_client
from jobs.machine.procfs import started_at
from jobs.run.judging import Score
from jobs.run.rundir import read_json, write_atomic
from jobs.run.samples import Samples
from jobs.spec.file.load import load_spec
from jobs.spec.job_spec import is_public
from jobs.untrusted.secrets import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from engine.tracking.client import Client
    from jobs.run.rundir import RankStatus, RunDir
    from jobs.spec.job_spec import JobSpec


# -- values ---------------------------------------------------------------------------------
# Convert events to the values that a tracker gets. Pure.


_GIB: Final = 1 << 30
# Field of a step's event → name in trackers.
_OF_STEP: Final = {
    "loss": "train/loss",
    "base_loss": "train/base_loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "epoch": "train/epoch",
    "seconds": "speed/seconds_per_step",
    "data_seconds": "speed/seconds_for_data",
    "images_per_second": "speed/images_per_second",
}


def step_values(event: dict[str, Any]) -> dict[str, float]:
    """Return the scalars of a step."""
    values = {name: event[key] for key, name in _OF_STEP.items() if _is_number(event.get(key))}
    peak = event.get("peak_bytes")
    if _is_number(peak):
        values["memory/peak_gib"] = peak / _GIB
    return values


def validation_values(event: dict[str, Any]) -> dict[str, float]:
    """Return the validation loss, in total and per noise level, from 0 (clean) to 1."""
    losses = {"validation/loss": event.get("loss")}
    for level, loss in event.get("levels") or ():
        losses[f"validation/loss_at_{level:.3f}"] = loss
    return {name: loss for name, loss in losses.items() if _is_number(loss)}


def score_values(event: dict[str, Any]) -> dict[str, float]:
    """Return the scores of a step's samples."""
    scores = {f"validation/{name}": event.get(name) for name in get_args(Score)}
    return {name: score for name, score in scores.items() if _is_number(score)}


def memory_values(ranks: Iterable[RankStatus]) -> dict[str, float]:
    """Return the memory of each rank, in GiB: allocated on its GPU, or resident on CPU ranks."""
    sizes = {status.rank: status.allocated or status.rss for status in ranks}
    return {f"memory/rank{rank}_gib": size / _GIB for rank, size in sizes.items() if size}


def config_values(spec: JobSpec) -> dict[str, bool | int | float | str]:
    """Return the job's public keys in types that trackers accept.

    Lists become JSON text; keys that are not set are skipped.
    """
    return {
        key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
        for key, value in spec.to_dict().items()
        if value is not None and is_public(key)
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- follower -------------------------------------------------------------------------------


POLL_EVERY: Final = 2.0  # seconds
STUCK: Final = 60.0  # seconds in one call after which a warning is sent
FLUSH: Final = 120.0  # seconds after the run's end for sending the rest
_GRACE: Final = 5.0  # seconds without a process of the run before giving up on a restart
_CHUNK: Final = 1 << 18  # bytes of events between two saves of the position
_SAME_START: Final = 0.005  # seconds


@dataclass
class Cursor:
    """Position of a tracker in the event stream, saved in the run directory for the next attempt.

    Attributes:
        offset: Bytes of the event stream that were sent.
        run_id: The tracker's id of the run.
        begun: Whether the tracker has started the run.
        last: The last step that was sent, per kind of event.
    """

    offset: int = 0
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: bool = False
    last: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, kept: dict[str, Any] | None) -> Cursor:
        """Parse the saved position; return the start of the stream if it is invalid."""
        try:
            return cls(
                max(0, int((kept or {})["offset"])),
                str((kept or {})["run_id"]),
                bool((kept or {})["begun"]),
                {str(kind): int(step) for kind, step in (kept or {})["last"].items()},
            )
        except (LookupError, TypeError, ValueError, AttributeError):
            return cls()


class Follower:
    """Sends a run's events to one tracker, in order, until the run has ended."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        self.run_dir = run_dir
        self.name = name
        self.spec = load_spec(run_dir.job_file)
        self.cursor = Cursor.read(read_json(run_dir.tracker_place(name)))
        self.client: Client | None = None
        self.ended = False  # rank 0 reported the end
        self.warned = False
        self._done = threading.Event()
        self._call_started: float | None = None  # when the current call started
        self._pictures = Samples(run_dir)

    def run(self) -> int:
        """Follow until the end, and return the exit status."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        unseen = 0.0  # since when no process of the run was seen
        try:
            while True:
                unseen = 0.0 if self._is_alive() else unseen or time.monotonic()
                gone = unseen and time.monotonic() - unseen > _GRACE
                while self._read():
                    pass
                if self.ended or gone:
                    break
                time.sleep(POLL_EVERY)
            if self.client is not None:
                with self._call():
                    self.client.finish()
        except Exception as error:
            self._fail("stopped", error)
            return 1
        finally:
            self._done.set()
        return 0

    # -- events ----------------------------------------------------------------------------

    def _read(self) -> bool:
        """Send the next part of the stream; return whether there was any."""
        try:
            with open(self.run_dir.events, "rb") as file:
                file.seek(self.cursor.offset)
                data = file.read(_CHUNK)
        except OSError:
            return False
        end = data.rfind(b"\n") + 1  # an incomplete last line waits for the rest
        steps = []
        for line in data[:end].splitlines(keepends=True):
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    steps += self._handle(event, self.cursor.offset)
            self.cursor.offset += len(line)
        if steps:
            ranks = self.run_dir.rank_statuses()
            self._log(memory_values(ranks), steps[-1])
        if end:
            self._save_cursor()
        return end > 0

    def _handle(self, event: dict[str, Any], offset: int) -> list[int]:
        """Send an event; return its step in a list if it is a step."""
        kind, step = event.get("kind"), event.get("step")
        if not isinstance(step, int):  # irrelevant, or from another version
            return []
        match kind:
            case "start":
                self._resume(step)
            case "step" if self._is_new(kind, step):
                self._log(step_values(event), step)
                return [step]
            case "validation" if self._is_new(kind, step):
                self._log(validation_values(event), step)
            case "scores" if self._is_new(kind, step):
                self._log(score_values(event), step)
            case "sample" if self._is_new(kind, step):
                self._log_samples(step)
            case "end":
                launched = read_json(self.run_dir.launch_file) or {}
                self.ended = offset >= launched.get("events_offset", 0)
        return []

    def _resume(self, step: int) -> None:
        """Start an attempt: replace data of later steps, if the tracker supports that."""
        if self.client is not None and self.name in TAKES_BACK:
            with self._call():
                self.client.finish()
            self.client = None
        if self.name in TAKES_BACK:
            self.cursor.last = {kind: min(last, step) for kind, last in self.cursor.last.items()}
        self._open(step)

    def _is_new(self, kind: str, step: int) -> bool:
        """Return whether the tracker lacks this kind of event at this step, and mark it as sent."""
        new = step > self.cursor.last.get(kind, -1)
        if new:
            self.cursor.last[kind] = step
        return new

    # -- sending ---------------------------------------------------------------------------

    def _open(self, resumed: int | None) -> Client:
        if self.client is None:
            with self._call():
                self.client = open_client(
                    self.name,
                    self.spec,
                    self.run_dir,
                    run_id=self.cursor.run_id,
                    again=self.cursor.begun,
                    resumed=resumed,
                )
            if self.client.offline:
                self._warn("no login or no network: recording offline; later run wandb sync")
            self._send("configure", config_values(self.spec), again=self.cursor.begun)
            self.cursor.run_id = self.client.run_id or self.cursor.run_id
            self.cursor.begun = True
            self._save_cursor()
        return self.client

    def _log(self, scalars: dict[str, float], step: int) -> None:
        self._open(None)
        if scalars:
            self._send("log", scalars, step)

    def _log_samples(self, step: int) -> None:
        self._open(None)
        pictures = {
            f"samples/{sample.number}": sample.picture
            for sample in self._pictures.look()
            if sample.step == step
        }
        self._send("log_images", pictures, step)

    def _send(self, what: str, *arguments: Any, **more: Any) -> None:
        """Call the tracker. The first error is reported, and the follower continues."""
        try:
            with self._call():
                getattr(self.client, what)(*arguments, **more)
        except Exception as error:
            self._fail("did not take an event", error)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._call_started = time.monotonic()
        try:
            yield
        finally:
            self._call_started = None

    # -- trouble ---------------------------------------------------------------------------

    def _fail(self, what: str, error: Exception) -> None:
        if not self.warned:
            print(without_secrets(traceback.format_exc()), flush=True)
        why = str(error).strip().splitlines() or [""]
        self._warn(f"{what}: {type(error).__name__}: {why[0]}")

    def _warn(self, text: str) -> None:
        """Leave a warning for rank 0 to report. Only the first warning is kept."""
        if self.warned:
            return
        self.warned = True
        text = without_secrets(f"{self.name} {text}; training is not affected")
        print(text, flush=True)
        with suppress(OSError):
            write_atomic(self.run_dir.tracker_warning(self.name), text + "\n")

    def _watch(self) -> None:
        """Warn about a call that does not return, and exit some time after the run ends."""
        unseen = 0.0
        while not self._done.wait(1.0):
            now = time.monotonic()
            if self._call_started is not None and now - self._call_started > STUCK:
                self._warn(f"has not responded for {STUCK:.0f} s")
            unseen = 0.0 if self._is_alive() else unseen or now
            if unseen and now - unseen > FLUSH:
                self._warn(f"did not finish within {FLUSH:.0f} s of the end of the run")
                _leave()
                return

    def _is_alive(self) -> bool:
        """Return whether the launcher or a rank of the latest attempt is alive."""
        launched = read_json(self.run_dir.launch_file) or {}
        processes = [launched.get("launcher")]
        processes += [[status.pid, status.started] for status in self.run_dir.rank_statuses()]
        return any(process and _is_process(process) for process in processes)

    def _save_cursor(self) -> None:
        with suppress(OSError):
            text = json.dumps(asdict(self.cursor))
            write_atomic(self.run_dir.tracker_place(self.name), text + "\n")


def _leave() -> None:
    """Exit the process immediately, even while it is blocked."""
    os._exit(1)


def _is_process(identity: list[Any]) -> bool:
    """Return whether a pid with this start time since boot is alive."""
    try:
        started = started_at(int(identity[0]))
        return started is not None and abs(started - float(identity[1])) < _SAME_START
    except (IndexError, TypeError, ValueError):
        return False
