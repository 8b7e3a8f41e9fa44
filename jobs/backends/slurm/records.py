"""Read and write the files that only a Slurm job has in its run directory.

    slurm.json      written by the queue: the Slurm job
    warden.json     written by the warden every five seconds: its view of the job
    outcome.json    written by the warden once: how the job ended
    fence.json      written by the warden first: which allocation may write checkpoints

The warden is the supervisor that runs in the batch step. Slurm requeues a job under the same id, so
the pair (id, restart count) identifies an allocation.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from jobs.queue.states import State
from jobs.run.rundir import read_json, write_atomic
from jobs.untrusted.text import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from jobs.queue.store import Job, Store
    from jobs.run.rundir import RunDir

NAME: Final = "slurm"  # the backend's name, as in `launcher`
STOPS: Final = (1, 2, 3)  # stop levels


@dataclass(frozen=True)
class Submission:
    """The Slurm job of a job.

    Attributes:
        name: Unique name of the Slurm job.
        attempt: The job's attempt that was submitted.
        id: Slurm's job id; "" until the answer of `sbatch` is recorded.
        step: Step of the newest checkpoint at submission.
    """

    name: str
    attempt: int
    id: str = ""
    step: int = 0


@dataclass(frozen=True)
class Allocation:
    """An allocation: a Slurm job id and how often the job was requeued before."""

    id: str
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.id}.{self.restart}"


@dataclass(frozen=True)
class WardenReport:
    """A warden's report: its current view of the job, or the outcome.

    Attributes:
        allocation: The warden's allocation.
        state: The job's state.
        reason: One line.
        host: Host name of the warden.
        beat: Heartbeat counter.
        worth_retrying: For an outcome, whether another attempt could help.
        still: Seconds in which no rank has made progress.
    """

    allocation: Allocation
    state: State
    reason: str
    host: str = ""
    beat: int = 0
    worth_retrying: bool = False
    still: float = 0.0


def submission_file(run_dir: RunDir) -> Path:
    return run_dir.root / "slurm.json"


def warden_file(run_dir: RunDir) -> Path:
    return run_dir.root / "warden.json"


def outcome_file(run_dir: RunDir) -> Path:
    return run_dir.root / "outcome.json"


def read_submission(run_dir: RunDir, attempt: int | None = None) -> Submission | None:
    """Read the Slurm job; None if there is none, or only one of another attempt."""
    values = read_json(submission_file(run_dir)) or {}
    try:
        record = Submission(
            str(values["name"]), int(values["attempt"]), str(values["id"]), int(values["step"])
        )
    except (LookupError, TypeError, ValueError):
        return None
    return record if attempt in (None, record.attempt) else None


def write_submission(run_dir: RunDir, record: Submission) -> None:
    write_atomic(submission_file(run_dir), json.dumps(asdict(record)) + "\n", durable=True)


def read_warden_report(path: Path) -> WardenReport | None:
    """Read a warden's report; None if it is missing or unreadable."""
    values = read_json(path) or {}
    try:
        return WardenReport(
            Allocation(str(values["slurm_id"]), int(values["restart"])),
            State(values["state"]),
            one_line(str(values["reason"])),
            one_line(str(values.get("host", ""))),
            int(values.get("beat", 0)),
            bool(values.get("worth_retrying", False)),
            float(values.get("still", 0.0)),
        )
    except (LookupError, TypeError, ValueError):
        return None


def write_warden_report(path: Path, report: WardenReport, *, durable: bool = False) -> None:
    values: dict[str, Any] = asdict(replace(report)) | {
        "slurm_id": report.allocation.id,
        "restart": report.allocation.restart,
        "state": str(report.state),
    }
    del values["allocation"]
    write_atomic(path, json.dumps(values) + "\n", durable=durable)


def request_stop(run_dir: RunDir, attempt: int, level: int) -> None:
    """Leave a stop request for the warden of this attempt, whichever allocation it runs in."""
    run_dir.control.mkdir(parents=True, exist_ok=True, mode=0o700)
    for lower in range(1, level + 1):
        (run_dir.control / _request_name(attempt, lower)).touch()


def requested_stop(run_dir: RunDir, attempt: int) -> int:
    """Return the stop level requested for this attempt; 0 if none.

    Lists the directory instead of checking for files: a network file system may cache for a minute
    that a file which another host has just created does not exist.
    """
    try:
        there = set(os.listdir(run_dir.control))
    except OSError:
        return 0
    return max((level for level in STOPS if _request_name(attempt, level) in there), default=0)


def clear_stop_requests(run_dir: RunDir) -> None:
    """Remove the stop requests of earlier attempts."""
    for path in run_dir.control.glob("slurm-stop-*"):
        path.unlink(missing_ok=True)


def _request_name(attempt: int, level: int) -> str:
    return f"slurm-stop-{attempt}-{level}"


KEPT: Final = "slurm-answer.json"
_SHOWN: Final = ("state", "reason", "nodes", "starts", "restarts", "place")


def slurm_facts(store: Store, job: Job) -> dict[str, Any]:
    """Return a Slurm job's id, its place in the queue, and the age of that information.

    {} if the job has not been submitted.
    """
    record = read_submission(job.run_dir, job.attempt)
    if record is None:
        return {}
    kept = read_json(store.home / KEPT) or {}
    jobs, asked = kept.get("jobs"), kept.get("t")
    listed = jobs.get(record.id) if isinstance(jobs, dict) else None
    warden = read_warden_report(warden_file(job.run_dir))
    mine = warden is not None and warden.allocation.id == record.id
    if not isinstance(listed, dict) or listed.get("name") != record.name:
        listed = {}
    facts = {name: listed[name] for name in _SHOWN if name in listed}
    age = max(0.0, time.time() - asked) if isinstance(asked, float) else None
    host = warden.host if mine and warden is not None else None
    return {"slurm": {"job": record.id, "name": record.name, **facts, "age": age, "host": host}}
