"""Start processes and end them, without ever waiting forever."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from jobs.machine.child import end_child, start_child
from jobs.machine.processes import RUN_ID_VARIABLE, ProcessId, end, with_run_id

_GONE_WITHIN: Final = 3.0  # seconds after SIGKILL; what the driver holds longer is left behind
_SWEEPS: Final = 3  # a launcher may start another rank while it is killed


@dataclass(frozen=True)
class Said:
    """What a helper printed.

    Attributes:
        facts: Its lines of JSON, put together.
        status: Its exit status; None when it was killed because it did not end.
        last_line: The last one of its standard error.
    """

    facts: dict[str, Any]
    status: int | None
    last_line: str


def run_helper(module: str, *arguments: str, run_id: str, seconds: float) -> Said:
    """Run `python -m module` for at most `seconds`."""
    # As ranks number GPUs.
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", RUN_ID_VARIABLE: run_id}
    # Files, not pipes: a helper that cannot be killed would hold a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_child(
            [sys.executable, "-m", module, *arguments],
            variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_child(process, patience=_GONE_WITHIN)
        out.seek(0)
        err.seek(0)
        words = err.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        return Said(_facts(out.read()), status, last)


def end_all(run_id: str) -> tuple[int, ...]:
    """Kill every process with this run id; returns the pids that do not go."""
    left: list[ProcessId] = []
    for _ in range(_SWEEPS):
        processes = with_run_id(run_id)
        left = end(processes, grace=0, timeout=_GONE_WITHIN) if processes else []
        if left or not processes:
            break
    return tuple(process.pid for process in left)


def _facts(text: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in text.splitlines():
        with suppress(ValueError):  # something a library printed, or a line cut short
            value = json.loads(line)
            facts |= value if isinstance(value, dict) else {}
    return facts
