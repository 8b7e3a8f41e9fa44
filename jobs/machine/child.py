"""Processes of our own that end with whoever asks them: one way to start them, and one to end."""

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
    """Run a module of ours: no folder of its name in some working directory shadows it.

    Args:
        command: Its words.
        variables: In its environment, beside ours.
        more: As `subprocess.Popen` has it.
    """
    environment = (
        os.environ | {"PYTHONSAFEPATH": "1"} | bytecode_variables() | dict(variables or {})
    )
    with _interrupt_noted() as interrupted:
        child = subprocess.Popen(list(command), env=environment, **more)
    if interrupted:
        end_child(child)
        raise KeyboardInterrupt
    wait_for_by_hand(child.pid)
    return child


def end_child(
    child: subprocess.Popen[bytes], grace: float = 0.0, patience: float | None = None
) -> None:
    """Make sure that it runs no longer.

    Args:
        child: Which.
        grace: Seconds to end after SIGTERM; 0 sends SIGKILL at once.
        patience: Seconds to wait after SIGKILL; what the driver holds longer is left behind.
    """
    if grace and child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(patience)


@contextmanager
def _interrupt_noted() -> Iterator[list[int]]:
    """Note a Ctrl-C instead of raising it: `Popen` would forget a child that it has just forked."""
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
