"""Start our own processes so that nothing ties them to whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def start_detached(module: str, *arguments: str, home: Path, cwd: Path, log: Path) -> None:
    """Run `python -m module`, which begins with `leave_starter`.

    Args:
        module: One of ours.
        arguments: Its command line.
        home: The state directory it works for.
        cwd: Its working directory, which it keeps busy.
        log: Takes what it prints.
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
    """Continue in a child that leads its own session; this process exits at once.

    The starter has then no child to wait for, and no closing terminal reaches the child. To be
    called before heavy imports, since the starter waits for it.
    """
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
