"""Shared code of the engine's commands (`python -m engine.…`)."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line on standard error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fsdp-tui: {message}\n")


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command as this process, and end the process with the status it returns.

    Threads are joined, exit handlers run and output is flushed, as at the end of any Python
    process. Only the teardown of the interpreter and its libraries is skipped, since the kernel
    frees their memory anyway: the destructors of torch built for CUDA read another 125 MiB of its
    libraries and take 0.4 s of processor time (torch 2.13).
    """
    status: int | None = None

    def leave() -> None:
        if status is None:  # Python reports the exception that ends the process
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)  # registered first, so that it runs after libraries' handlers
    status = main()
    sys.exit(status)
