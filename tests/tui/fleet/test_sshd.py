"""Three homes behind a real sshd: the first word, a box that dies, hangs and comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from jobs import service
from jobs.fleet.config import config_file, read_fleet
from jobs.queue.store import Store
from tests.support.fleet import Watching
from tests.support.paths import ROOT
from tests.support.sshd import SSHD, Sshd
from tests.support.tui.made_up_runs import add_job
from tests.support.tui.terminal import terminal
from tests.support.waiting import PATIENCE, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None, reason="no sshd is installed"),
]


@pytest.fixture
def sshd(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    root = Path(tempfile.mkdtemp(dir="/tmp", prefix="sshd-"))
    server = Sshd(root)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    machines = []
    for name in ("one", "two", "three"):
        (root / name).mkdir(mode=0o700)
        variables = f"FSDP_TUI_HOME={root / name} PYTHONPATH={ROOT} FSDP_TUI_HOST=box-{name}"
        variables += " FSDP_TUI_PICTURES=blocks"  # a late answer would be taken for keys
        command = f"cd {root} && exec env {variables} {sys.executable} -m tui"
        machines.append({"name": name, "command": command})
    path = config_file()
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump({"machines": machines, "interval": 1}), encoding="utf-8")
    server.start()
    yield server
    server.stop()
    eventually(
        lambda: not _left_of(root), told=lambda: _left_of(root)
    )  # with its connection, each ssh and each watch ends
    shutil.rmtree(root)


def _left_of(root: Path) -> list[str]:
    """Processes of a box, or of a connection to one."""
    listed = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=False).stdout
    signs = (f"FSDP_TUI_HOME={root}", f"{root}/fsdp-tui", f"{root}/sshd_config")
    return [line for line in listed.splitlines() if any(sign in line for sign in signs)]


def test_three_homes(sshd: Sshd) -> None:
    store = Store(sshd.root / "two")
    add_job(store, "cats")
    service.stop(store, 1)  # else a queue keeper would wait for its turn
    fleet = read_fleet()
    with Watching(fleet) as watching:
        for which in range(3):
            view = watching.until(lambda view: view.status == "here", which)
            assert view.snapshot is not None
            assert [job.name for job in view.snapshot.jobs] == (["cats"] if which == 1 else [])
        on = [sys.executable, "-m", "tui", "--on"]
        words = ["list", "--json"]
        told = subprocess.run([*on, "two", *words], capture_output=True, check=True, cwd=ROOT)
        assert json.loads(told.stdout)[0]["state"] == "stopped"
        assert len(sshd.sessions()) == 3, "the connection of the screen is shared"

        sshd.signal_sessions(signal.SIGSTOP)
        eventually(lambda: watching.watch.views[0].status_at(time.monotonic()) == "silent")
        hung = watching.watch.views[0]
        assert hung.snapshot is not None
        sshd.signal_sessions(signal.SIGCONT)
        watching.until(lambda view: (view.heard or 0) > (hung.heard or 0))

        sshd.stop()
        for which in range(3):
            view = watching.until(lambda view: view.status == "away", which)
            assert view.snapshot is not None
        watching.watch.retry()
        watching.until(lambda view: "Connection refused" in view.why)
        away = subprocess.run([*on, "one", "list"], capture_output=True, check=False, cwd=ROOT)
        assert away.returncode == 1
        assert b"one is away: " in away.stderr
        sshd.start()
        watching.watch.retry()
        watching.until(lambda view: view.status == "here", 1)


def test_a_visit_to_a_box_and_back(sshd: Sshd) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FSDP_TUI_HOST": "here"}
    with terminal([sys.executable, "-m", "tui"], environment, (100, 30)) as dashboard:
        dashboard.wait_for(lambda text: "here" in text)
        dashboard.press("F")
        dashboard.wait_for(lambda text: "3 machines" in text)
        dashboard.forget()
        dashboard.press("\r")
        dashboard.wait_for(lambda text: "box-one" in text)
        dashboard.forget()
        dashboard.press("q")
        dashboard.wait_for(lambda text: "3 machines" in text)
        assert dashboard.process.poll() is None
        dashboard.forget()
        dashboard.press("\x1b")
        dashboard.wait_for(lambda text: "here" in text)


def test_ctrl_c_ends_what_goes_on_there(sshd: Sshd) -> None:
    command = [sys.executable, "-m", "tui", "--on", "two", "list", "--watch"]
    with terminal(command, os.environ | {"PYTHONPATH": str(ROOT)}) as watching:
        watching.wait_for(lambda text: "no jobs" in text)
        watching.press("\x03")
        assert watching.process.wait(PATIENCE) == 0
    eventually(lambda: "list --watch" not in "".join(_left_of(sshd.root)))
