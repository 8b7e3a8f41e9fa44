"""Tools of the engine that answer a question: each a process of its own, which ends with its asker.

They stand in the engine because they share code with training; nothing here imports it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.bytecode import bytecode_variables
from jobs.cascade import settle
from jobs.errors import UserError
from jobs.preflight import check_dataset
from jobs.processes import wait_for_by_hand
from jobs.specfile import dump_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from jobs.spec import JobSpec

Progress = Callable[[int, int], None]  # looked at, of so many

_NOTICE_WITHIN: Final = 0.1  # seconds in which it is noticed that nobody wants the answer any more
_GRACE: Final = 2.0  # seconds to end after SIGTERM
_PREFIX: Final = "fsdp-tui: "


class ToolError(Exception):
    """A tool failed in a way that the person cannot put right; one line."""


class Cancelled(Exception):
    """The asker does not want the answer any more."""


@dataclass(frozen=True)
class DataLook:
    """What a look at a job's data found.

    Attributes:
        report: The fields of `engine.data.report.DataReport`, as JSON values.
        strips: For each bucket of the report a PNG: some of its samples in a row, cut as they are
            trained on. Empty when they were not asked for.
    """

    report: dict[str, Any]
    strips: tuple[bytes, ...] = ()


def look_at_data(
    spec: JobSpec,
    progress: Progress = lambda done, total: None,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    sheet: Path | None = None,
    strips: bool = False,
) -> DataLook:
    """Look at every sample of a job. Takes minutes for a large dataset that was never looked at.

    Args:
        spec: The job.
        progress: Told how far the look has come.
        cancelled: Asked many times a second, in the thread of the caller.
        sheet: Where to write a contact sheet of all buckets, as PNG.
        strips: Whether to return some pictures of each bucket.

    Raises:
        UserError: There is nothing usable where the job says its data is.
        ToolError: Looking failed for another reason.
        Cancelled: `cancelled` said so.
    """
    check_dataset(spec)
    with tempfile.TemporaryDirectory(prefix="fsdp-tui-") as name:
        job, folder = Path(name, "job.yaml"), Path(name, "strips")
        job.write_text(dump_spec(settle(spec)), encoding="utf-8")
        arguments = [str(job)]
        arguments += ["--sheet", str(sheet)] if sheet else []
        arguments += ["--strips", str(folder)] if strips else []

        def told(line: str) -> None:
            match line.split():
                case ["looked", done, total] if done.isdigit() and total.isdigit():
                    progress(int(done), int(total))

        report = ask("engine.data", arguments, Path(name, "answer"), told, cancelled)
        names = report.pop("strips", [])
        return DataLook(report, tuple((folder / one).read_bytes() for one in names))


def ask(
    module: str,
    arguments: Sequence[str],
    answer: Path,
    told: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> dict[str, Any]:
    """Run a tool and read the JSON object that it prints.

    Its answer goes to a file, so that it never waits for us; what it says of its progress goes
    through a pipe, so that it ends when we are killed and the pipe breaks.
    """
    said = ""
    with open(answer, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONSAFEPATH": "1"} | bytecode_variables(),
        )  # fmt: skip
    wait_for_by_hand(process.pid)
    assert process.stderr is not None
    try:
        with process.stderr:
            for line in _lines(process.stderr, cancelled):
                told(line)
                said = line.strip() or said
        status = process.wait()
    finally:
        _end(process)
    if status == 2 and said.startswith(_PREFIX):
        raise UserError(said.removeprefix(_PREFIX))
    if status != 0:
        what = f"it was ended by {signal.Signals(-status).name}" if status < 0 else said
        raise ToolError(f"python -m {module} failed: {what or f'exit status {status}'}")
    try:
        found: dict[str, Any] = json.loads(answer.read_bytes())
    except ValueError:
        raise ToolError(f"python -m {module} failed: its answer is no JSON object") from None
    return found


def _lines(pipe: IO[bytes], cancelled: Callable[[], bool]) -> Iterator[str]:
    """The lines of a pipe until it is closed."""
    rest = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        while True:
            if cancelled():
                raise Cancelled
            if not waiting.select(_NOTICE_WITHIN):
                continue
            data = os.read(pipe.fileno(), 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else [rest]:
                yield line.decode(errors="replace")
            if not data:
                return


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that it runs no longer."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
