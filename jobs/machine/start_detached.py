"""Start our own processes detached from the starter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def start_detached(module: str, *arguments: str, home: Path, cwd: Path, log: Path) -> None:
    """Run `python -m module`, which must first call `leave_starter`.

    Args:
        module: One of our modules.
        arguments: Its command line.
        home: Its state directory.
        cwd: Its working directory, which it keeps busy.
        log: The file for its output.
    """
    with open(log, "ab") as output:
        subprocess.run(
            [sys.executable, "-m", module, *arguments],
            # A folder called jobs/ in some working directory must not shadow ours.
            env=os.environ | {"PYTHONSAFEPATH": "1", "FSDP_TUI_HOME": str(home)},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=True,
        )


def leave_starter() -> None:
    """Continue in a child with its own session; this process exits at once.

    Afterwards the starter has no child to wait for, and a closing terminal does not reach the
    child. Call this before heavy imports, because the starter waits for it.
    """
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
