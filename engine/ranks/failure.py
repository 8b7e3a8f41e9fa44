"""Record a failing rank's traceback in its log, and one record for the supervisor."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch._C._distributed_c10d as c10d

from jobs.errors import DiskFullError, NotFiniteError, UserError
from jobs.run.events import Failed
from jobs.run.failure import Cause
from jobs.run.fence import FENCE_VARIABLE, taken_over
from jobs.run.rundir import write_atomic

if TYPE_CHECKING:
    from engine.ranks.telemetry import Telemetry
    from jobs.run.rundir import RunDir


def cause_of(error: BaseException | None) -> Cause:
    """Classify a failure by its type, or by the type of an error that caused it."""
    while error is not None:
        if isinstance(error, DiskFullError):
            return Cause.DISK_FULL
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Cause.DISK_FULL
        if isinstance(error, NotFiniteError):
            return Cause.NOT_FINITE
        error = error.__cause__
    return Cause.OTHER


def record_failure(run_dir: RunDir, rank: int, error: BaseException, telemetry: Telemetry) -> None:
    """Write `ranks/<r>.error.json`, an `error` event, and the traceback to standard error.

    Never starts a collective, since other ranks may be inside one.
    """
    kind = "UserError" if isinstance(error, UserError) else type(error).__name__
    text = "".join(traceback.format_exception(error))
    record = {
        "t": time.time(),
        "rank": rank,
        "type": kind,
        "cause": cause_of(error),
        "message": str(error) or kind,
        "phase": telemetry.phase_name,
        "step": telemetry.step,
        "traceback": str(run_dir.rank_log(rank)),
    }
    with suppress(OSError):  # the log may be on a full disk
        print(text, file=sys.stderr, flush=True)
    if taken_over(run_dir.root):  # the failure does not concern the ranks that now own the run
        return
    try:
        write_atomic(run_dir.rank_error(rank), json.dumps(record | {"trace": text}) + "\n")
        # Appending is atomic only on one machine. On several, the batch-step supervisor adds the
        # event later.
        if rank == 0 or FENCE_VARIABLE not in os.environ:
            with open(run_dir.events, "a", encoding="utf-8") as file:
                file.write(Failed.read(record).line())
    except OSError as problem:  # a full disk must not hide the first failure
        with suppress(OSError):
            print(f"could not record the failure: {problem}", flush=True)
    telemetry.close()


# -- flight dump ----------------------------------------------------------------------------
# Dump torch's record of this rank's collectives, while the rank may be waiting in one.


# Recorders of NCCL and of gloo. Torch (2.11 to 2.13) has no public names for them, and its CPU
# build has no NCCL recorder.
_RECORDERS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def write_flight(run_dir: RunDir, rank: int) -> None:
    """Write each recorder's content to `logs/flight_<rank>.json`. Not a collective."""
    recorders: list[Any] = [getattr(c10d, name, lambda: "{}") for name in _RECORDERS]
    dumps = [json.loads(dump()) for dump in recorders]
    write_atomic(run_dir.flight(rank), json.dumps(dumps) + "\n")
