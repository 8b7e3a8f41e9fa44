"""Store in the run directory why a job failed."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir


class Cause(StrEnum):
    """The kind of failure. The values are stored in run directories."""

    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    DISK_FULL = "disk_full"
    NOT_FINITE = "not_finite"
    HANG = "hang"
    COMMUNICATION = "communication"
    KILLED = "killed"
    MISSING_PACKAGE = "missing_package"
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.OTHER  # written by an older or newer version


@dataclass(frozen=True)
class Failure:
    """Why a job failed.

    Attributes:
        text: One line for users.
        cause: The kind of failure.
        rank: The rank at fault, if there is one.
        phase: What that rank was doing: a key of `PHASES`, or a part of a step.
    """

    text: str
    cause: Cause = Cause.OTHER
    rank: int | None = None
    phase: str = ""


def keep_failure(run_dir: RunDir, failure: Failure | None) -> None:
    """Record why the latest attempt failed; if it did not, delete the record of an earlier one."""
    with suppress(OSError):
        if failure is None:
            run_dir.failure_file.unlink(missing_ok=True)
        else:
            write_atomic(run_dir.failure_file, json.dumps(asdict(failure)) + "\n")


def read_failure(run_dir: RunDir) -> Failure | None:
    """Read why a job failed; None if unrecorded, as in run directories of older versions."""
    values = read_json(run_dir.failure_file)
    if values is None:
        return None
    rank, phase = values.get("rank"), str(values.get("phase", ""))
    cause = Cause(str(values.get("cause")))
    return Failure(str(values.get("text", "")), cause, rank if type(rank) is int else None, phase)
