"""What torch remembers of this rank's collectives, written while the rank may wait in one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch._C._distributed_c10d as c10d

from jobs.run.rundir import write_atomic

if TYPE_CHECKING:
    from jobs.run.rundir import RunDir

# Of NCCL's groups and of gloo's. Torch (2.11 to 2.13) has no public names for them, and no recorder
# of NCCL in its CPU build.
_RECORDERS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def write_flight(run_dir: RunDir, rank: int) -> None:
    """Write `logs/flight_<rank>.json`, a list with what each recorder holds. No collective."""
    recorders: list[Any] = [getattr(c10d, name, lambda: "{}") for name in _RECORDERS]
    dumps = [json.loads(dump()) for dump in recorders]
    write_atomic(run_dir.flight(rank), json.dumps(dumps) + "\n")
