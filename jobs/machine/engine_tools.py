"""Run tools of the engine, each in a process that ends with its caller.

They are part of the engine because they share code with training; nothing here imports it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UserError
from jobs.machine.child import end_child, start_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import IO

Progress = Callable[[int, int], None]  # done, total

_POLL_INTERVAL: Final = 0.1  # seconds between two checks for cancellation
_GRACE: Final = 2.0  # seconds to end after SIGTERM
_PREFIX: Final = "fsdp-tui: "


class ToolError(Exception):
    """A tool failed in a way that the user cannot fix; one line."""


class Cancelled(Exception):
    """The caller no longer needs the answer."""


def ask(
    module: str,
    arguments: Sequence[str],
    answer: Path,
    on_line: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> dict[str, Any]:
    """Run a tool and parse the JSON object in the last line of its output.

    The answer goes to a file, so that the tool never blocks on us. Its progress goes through a
    pipe, so that it ends when we are killed and the pipe breaks.
    """
    last_line = ""
    with open(answer, "wb") as out:
        process = start_child(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
        )
    assert process.stderr is not None
    try:
        with process.stderr:
            for line in _lines(process.stderr, cancelled):
                on_line(line)
                last_line = line.strip() or last_line
        status = process.wait()
    finally:
        end_child(process, _GRACE)
    if status == 2 and last_line.startswith(_PREFIX):
        raise UserError(last_line.removeprefix(_PREFIX))
    if status != 0:
        what = f"it was killed by {signal.Signals(-status).name}" if status < 0 else last_line
        raise ToolError(f"python -m {module} failed: {what or f'exit status {status}'}")
    try:
        result: dict[str, Any] = json.loads(answer.read_bytes().splitlines()[-1])
    except (ValueError, IndexError):
        raise ToolError(f"python -m {module} failed: its answer is not a JSON object") from None
    return result


def _lines(pipe: IO[bytes], cancelled: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of a pipe until it is closed."""
    rest = b""
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        while True:
            if cancelled():
                raise Cancelled
            if not waiting.select(_POLL_INTERVAL):
                continue
            data = os.read(pipe.fileno(), 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else [rest]:
                yield line.decode(errors="replace")
            if not data:
                return
