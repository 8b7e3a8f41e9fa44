"""What the engine's own commands (`python -m engine.…`) have in common."""

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

    Threads are waited for, exit handlers run and output is flushed, as at the end of any Python
    process. Only the interpreter and its libraries are not taken apart, because the kernel frees
    all of it anyway: the destructors of torch built for CUDA read another 125 MiB of its libraries
    and take 0.4 s of processor time (torch 2.13).
    """
    status: int | None = None

    def leave() -> None:
        if status is None:  # an exception ends the process, and Python says which
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)  # before any library's handler, so that it runs after all of them
    status = main()
    sys.exit(status)
