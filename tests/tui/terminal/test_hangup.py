"""A dashboard whose terminal is gone ends, whether or not anything signals it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.containers import CONTAINER, has_namespaces
from tests.support.paths import ROOT
from tests.support.tui.terminal import Terminal
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from jobs.queue.store import Store


def test_a_terminal_that_is_not_its_own_goes_away(store: Store) -> None:
    env = os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
    shown = Terminal([sys.executable, "-m", "tui"], env, (80, 24))
    shown.wait_for(lambda text: "jobs" in text)
    shown.hang_up()
    assert shown.process.wait(timeout=PATIENCE) == -signal.SIGHUP


@pytest.mark.skipif(not has_namespaces(), reason="no pid namespaces for this user")
def test_the_first_process_of_a_container_ends_with_its_terminal() -> None:
    """No default action of a signal reaches it, as under `docker run -it`."""
    program = "import signal; from tui.app import start; start._hang_up()"
    done = subprocess.run([*CONTAINER, sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 128 + signal.SIGHUP
