"""Define the run directory: all its paths and file formats.

It is the contract between the ranks that write it and all readers. Whole files are replaced
atomically. Streams are append-only with one JSON object per line; readers tolerate a partial last
line and unknown kinds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from jobs.untrusted.files import LARGEST_JSON, read_regular
from jobs.untrusted.text import harmless_value, one_line

if TYPE_CHECKING:
    from pathlib import Path

REQUESTS: Final = ("stop", "save_now", "sample_now")
# Request for each rank's flight record (`jobs.run.why_failed`), which it writes within a second.
FLIGHT: Final = "flight"
MANIFEST: Final = "manifest.json"
_FOREVER: Final = 1e12  # seconds; larger than any valid time

# The phases of a rank and the text shown for them. Only `train` has steps. A rank is not up until
# `start`, which includes `import`, has ended.
PHASES: Final = {
    "start": "starting",
    "import": "importing libraries",
    "index": "reading the data",
    "check": "checking the caches",
    "encode": "encoding captions",
    "latents": "caching latents",
    "sounds": "caching sounds",
    "masks": "caching masks",
    "load": "loading weights",
    "resume": "reading the checkpoint",
    "train": "training",
    "sample": "sampling",
    "score": "scoring the samples",
    "validate": "measuring the validation loss",
    "copy": "copying the checkpoint",
    "save": "saving",
    "export": "exporting",
    "end": "ending",
}


def write_atomic(path: Path, text: str, *, durable: bool = False, private: bool = False) -> None:
    """Replace a file atomically; readers see either the old or the new text.

    Args:
        path: The file; its directory must exist.
        text: The new content, written as UTF-8.
        durable: Also wait until it is on disk.
        private: Only the user may read it, whatever the umask says.
    """
    # Use a unique name for each write: a rank writes its status from two threads.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=_private if private else None) as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing or is not (yet) a JSON object."""
    try:
        data = json.loads(read_regular(path, LARGEST_JSON))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def read_tail(path: Path, size: int = 64 << 10) -> str:
    """Return the last bytes of a text file, however large it is; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class RankStatus:
    """A rank's status, written about once a second. Sizes in bytes, times in Unix seconds.

    Only `started` counts from the machine's boot, as in `jobs.machine.procfs`. `heartbeat` changes
    while the process lives, `progressed` only when its work progresses. The torch sizes are None on
    CPU ranks, which have `rss` instead. `done` counts this rank's own part of a phase whose work is
    shared. `peaks` has the peak memory of each phase so far: allocated on a GPU, resident on CPU
    ranks. `gpu` is the GPU's name, `gpu_memory` its total. `total_steps` and `steps_per_epoch`
    are set once the data is known.
    """

    rank: int
    pid: int
    started: float
    host: str
    device: str
    phase: str
    step: int
    heartbeat: float
    progressed: float
    device_uuid: str | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    rss: int | None = None
    done: int | None = None
    peaks: dict[str, int] | None = None
    gpu: str | None = None
    gpu_memory: int | None = None
    total_steps: int | None = None
    steps_per_epoch: float | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, data: Any) -> RankStatus:
        """Parse a rank's status, ignoring unknown fields.

        Raises:
            ValueError: A field is missing or has the wrong type; the message says which.
        """
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        for field in fields(cls):
            if field.name not in data and field.default is MISSING:
                raise ValueError(f"{field.name} is missing")
            if field.name in data and not _fits(data[field.name], str(field.type)):
                raise ValueError(f"{field.name} is {data[field.name]!r:.60}, not {field.type}")
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})


def _fits(value: Any, kind: str) -> bool:
    """Return whether a parsed value matches the type of a field of `RankStatus`."""
    if value is None:
        return kind.endswith("| None")
    match kind.removesuffix(" | None"):
        case "int":  # all of them are counts
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
        case "float":
            return type(value) in (int, float) and -_FOREVER < value < _FOREVER
        case "str":
            return isinstance(value, str)
        case "dict[str, int]":
            return isinstance(value, dict) and all(_fits(size, "int") for size in value.values())
        case _:
            raise AssertionError(kind)


@dataclass(frozen=True)
class RunDir:
    """The paths of one run. Creating the object does not access the disk."""

    root: Path

    @property
    def job_file(self) -> Path:
        return self.root / "job.yaml"

    def job_value(self, key: str) -> str:
        """Read one plain value of the job file, without parsing all of it; "" if it is not set.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not text.
        """
        text = self.job_file.read_text(encoding="utf-8")
        match = re.search(rf"^{key}:[ \t]+['\"]?([^\s'\"]+)", text, re.MULTILINE)
        return match[1] if match is not None and match[1] not in ("null", "~") else ""

    @property
    def launch_file(self) -> Path:
        return self.root / "launch.json"

    @property
    def accelerate_file(self) -> Path:
        return self.root / "accelerate.yaml"

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def data_report(self) -> Path:
        """Rank 0's report on the data."""
        return self.root / "data_report.json"

    @property
    def tracking(self) -> Path:
        """Files of experiment trackers, including each one's position in the event stream."""
        return self.root / "tracking"

    def tracker_place(self, name: str) -> Path:
        return self.tracking / f"{name}.json"

    def tracker_warning(self, name: str) -> Path:
        """Return the file of a tracker's warning, which rank 0 reports and removes."""
        return self.tracking / f"{name}.warning"

    def tracker_log(self, name: str) -> Path:
        return self.logs / f"tracker-{name}.log"

    @property
    def ranks(self) -> Path:
        return self.root / "ranks"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def export(self) -> Path:
        return self.root / "export"

    def create(self) -> None:
        """Create the directories (0700)."""
        for path in (self.root, self.control, self.ranks, self.logs):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def rank_file(self, rank: int) -> Path:
        return self.ranks / f"{rank}.json"

    @property
    def failure_file(self) -> Path:
        return self.root / "failure.json"

    def rank_error(self, rank: int) -> Path:
        """Written once by a rank that fails: type, message, phase, step, traceback."""
        return self.ranks / f"{rank}.error.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.log"

    @property
    def flight_prefix(self) -> Path:
        """Prefix of torch's flight records; torch appends the rank."""
        return self.logs / "flight_"

    def flight(self, rank: int) -> Path:
        """Return the file of a rank's flight record as JSON, written on request."""
        return self.logs / f"flight_{rank}.json"

    @property
    def launcher_log(self) -> Path:
        return self.logs / "launcher.log"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    # -- requests --------------------------------------------------------------------------

    def request(self, name: str) -> None:
        """Make a request to the ranks, which see it at the next step boundary."""
        if name not in (*REQUESTS, FLIGHT):
            raise ValueError(f"unknown request {name!r}")
        self.control.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.control / name).touch()

    def requested(self, name: str) -> bool:
        """Return whether a request is pending.

        Lists the directory instead of checking for the file: a network file system may cache for a
        minute that a file which another machine has just created does not exist.
        """
        try:
            return name in os.listdir(self.control)
        except OSError:
            return False

    def clear_request(self, name: str) -> None:
        (self.control / name).unlink(missing_ok=True)

    def keep(self) -> None:
        """Mark files that stay when the job is forgotten, so that they do not count as orphaned."""
        self._kept.touch()

    @property
    def is_kept(self) -> bool:
        return self._kept.exists()

    @property
    def _kept(self) -> Path:
        return self.root / ".kept"

    @property
    def has_run(self) -> bool:
        return any(path.exists() for path in (self.launch_file, self.events, self.checkpoints))

    def set_aside(self) -> bool:
        """Move away what a killed submit left; return False if anything has run here."""
        if self.has_run:
            return False
        self.root.rename(self.root.with_name(f".{self.root.name}.{time.time_ns()}"))
        return True

    # -- ranks -----------------------------------------------------------------------------

    def rank_statuses(self) -> list[RankStatus]:
        """Return the ranks' latest statuses, by rank, skipping unreadable files."""
        return self.read_ranks()[0]

    def read_ranks(self) -> tuple[list[RankStatus], dict[str, str]]:
        """Return the ranks' latest statuses, by rank, and file name → why it is unreadable."""
        statuses, unreadable = [], {}
        for path in self.ranks.glob("[0-9]*.json"):
            number = path.name.removesuffix(".json")
            if not (number.isascii() and number.isdecimal()):
                continue
            try:
                status = RankStatus.from_dict(json.loads(read_regular(path, LARGEST_JSON)))
                if status.rank != int(number):
                    raise ValueError(f"it belongs to rank {status.rank}")
                status = replace(
                    status,
                    host=one_line(status.host),
                    device=one_line(status.device),
                    phase=one_line(status.phase),
                )
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError) as error:
                unreadable[one_line(f"ranks/{path.name}")] = (
                    one_line(str(error)) or type(error).__name__
                )
            else:
                statuses.append(status)
        return sorted(statuses, key=lambda status: status.rank), unreadable

    def rank_errors(self) -> list[dict[str, Any]]:
        """Return the errors that ranks wrote, earliest first.

        In each, `rank` and `t` are numbers, `type` and `message` strings.
        """
        errors = []
        for path in self.ranks.glob("[0-9]*.error.json"):
            number = path.name.removesuffix(".error.json")
            data = read_json(path) if number.isascii() and number.isdecimal() else None
            if data:
                data, t = harmless_value(data), data.get("t")
                errors.append(
                    data
                    | {
                        "rank": int(number),
                        "t": t if _fits(t, "float") else 0.0,
                        "type": str(data.get("type")),
                        "message": str(data.get("message", "")),
                    }
                )
        return sorted(errors, key=lambda data: float(data["t"]))

    def forget_attempt(self) -> None:
        """Remove files that only concern an earlier attempt: requests, rank files, flight files."""
        for name in (*REQUESTS, FLIGHT):
            self.clear_request(name)
        flights = self.logs.glob(f"{self.flight_prefix.name}*")
        warnings = self.tracking.glob("*.warning")
        for path in (self.failure_file, *self.ranks.glob("*.json"), *flights, *warnings):
            path.unlink(missing_ok=True)

    # -- checkpoints -----------------------------------------------------------------------

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    def forget_unfinished(self) -> None:
        """Remove incomplete checkpoints. Call only while no rank is alive."""
        for path in self.checkpoints.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Return `(step, path)` of every complete checkpoint, oldest first.

        A checkpoint is renamed into place only after its manifest and all its files are on disk, so
        a directory with a readable manifest is complete.
        """
        complete = []
        for path in self.checkpoints.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isascii() and number.isdecimal() and read_json(path / MANIFEST) is not None:
                complete.append((int(number), path))
        return sorted(complete)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        complete = self.complete_checkpoints()
        return complete[-1] if complete else None


def event(kind: str, **values: Any) -> str:
    """Return one line of the event stream, with its newline."""
    return json.dumps({"t": round(time.time(), 3), "kind": kind, **values}) + "\n"
