"""Examine a machine in a separate process, and never wait for it forever."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import uuid
from typing import TYPE_CHECKING, Final

from jobs.doctor.agreed import END
from jobs.doctor.child_processes import end_all
from jobs.doctor.finding import Finding, fail
from jobs.machine.child import end_child, start_child

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path
    from typing import IO

_SILENT: Final = 240.0  # seconds; longer than any check may take
_GONE_WITHIN: Final = 3.0  # seconds


def find(
    job: Path | None = None,
    gpus: tuple[str, ...] = (),
    *,
    quick: bool = False,
    silent: float = _SILENT,
) -> Generator[Finding, None, None]:
    """Yield findings as they arrive. Everything started has ended when this ends.

    Args:
        job: A job file, to look at what it needs too.
        gpus: GPUs to measure, by index or UUID.
        quick: Leave the all-reduce out.
        silent: Seconds without a word after which the process is given up.
    """
    run_id = f"doctor-{uuid.uuid4().hex}"
    words = [f"--run-id={run_id}", f"--gpus={','.join(gpus)}"]
    words += [f"--job={job}"] if job is not None else []
    words += ["--quick"] if quick else []
    with tempfile.TemporaryFile() as errors:
        process = start_child(
            [sys.executable, "-m", "jobs.doctor", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        try:
            ended = yield from _findings(process.stdout, silent)
        finally:
            end_child(process, patience=_GONE_WITHIN)
            end_all(run_id)  # what it started; what the driver holds is left behind
        if not ended:
            yield _broken_off(errors, silent, process.returncode)


def _findings(pipe: IO[bytes], silent: float) -> Generator[Finding, None, bool]:
    """Findings until the process says that it is done; returns whether it did."""
    # Read by a thread, because a pipe that a stuck process holds never ends.
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, lines), name="doctor", daemon=True).start()
    while True:
        try:
            values = json.loads(lines.get(timeout=silent) or "null")
        except (queue.Empty, ValueError):
            return False
        if values is None:
            return False
        if END in values:
            return True
        yield Finding.from_dict(values)


def _read(pipe: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _broken_off(errors: IO[bytes], silent: float, status: int | None) -> Finding:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    word = lines[-1] if lines else f"no answer for {silent:g} s" if status is None else str(status)
    return fail(
        "doctor", f"stopped: {word}", "try again with --quick, and report it if that fails too"
    ).plain("doctor")
