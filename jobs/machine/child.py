"""Start and end our own processes that live only as long as the caller needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from jobs.machine.bytecode import bytecode_variables
from jobs.machine.processes import wait_for_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def start_child(
    command: Sequence[str], variables: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[bytes]:
    """Run one of our modules such that no folder in the working directory shadows it.

    Args:
        command: The command line.
        variables: Environment variables to add to ours.
        more: Further arguments of `subprocess.Popen`.
    """
    environment = (
        os.environ | {"PYTHONSAFEPATH": "1"} | bytecode_variables() | dict(variables or {})
    )
    with _deferred_interrupt() as interrupted:
        child = subprocess.Popen(list(command), env=environment, **more)
    if interrupted:
        end_child(child)
        raise KeyboardInterrupt
    wait_for_by_hand(child.pid)
    return child


def end_child(
    child: subprocess.Popen[bytes], grace: float = 0.0, patience: float | None = None
) -> None:
    """Make sure that a child has ended.

    Args:
        child: The process.
        grace: Seconds to end after SIGTERM; 0 sends SIGKILL at once.
        patience: Seconds to wait after SIGKILL; a process that the driver holds longer is
            abandoned.
    """
    if grace and child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(patience)


@contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Record a Ctrl-C instead of raising it; `Popen` would lose a child that it has just forked."""
    noted: list[int] = []
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield noted
        return
    signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
