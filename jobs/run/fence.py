"""Fence off stale allocations: only a job's newest allocation may complete checkpoints.

A node that lost its network keeps computing while Slurm has already started the job elsewhere.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from jobs.errors import UserError
from jobs.run.rundir import read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

FENCE_VARIABLE: Final = "FSDP_TUI_FENCE"


def raise_fence(run: Path, allocation: str) -> None:
    """Allow only this allocation to complete checkpoints of the run from now on."""
    write_atomic(_file(run), json.dumps({"allocation": allocation}) + "\n", durable=True)


def taken_over(run: Path, own: str | None = None) -> str:
    """Return the allocation that has taken over a run.

    "" if it is our own, or if this process belongs to no allocation.

    Args:
        run: The run directory.
        own: Our allocation (default: that of this process).
    """
    own = own or os.environ.get(FENCE_VARIABLE)
    if not own:
        return ""
    current = str((read_json(_file(run)) or {}).get("allocation", own))
    return "" if current == own else current


def check_fence(run: Path) -> None:
    """Refuse to complete a checkpoint of a run that another allocation has taken over.

    Does nothing in a process that belongs to no allocation.

    Raises:
        UserError: Another allocation has taken over.
    """
    if other := taken_over(run):
        own = os.environ[FENCE_VARIABLE]
        raise UserError(
            f"allocation {other} of this job has taken over from {own}; this checkpoint is dropped"
        )


def _file(run: Path) -> Path:
    return run / "fence.json"
