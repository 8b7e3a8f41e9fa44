"""Forked ranks are, to whoever starts and watches them, what ranks that were not forked are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from jobs.machine.processes import ProcessId, with_run_id
from tests.support.forks import client

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE: Final = 400.0  # seconds; a slow machine under load, not an expectation


def start(python: str, tmp_path: Path, how: str, **environment: str) -> subprocess.Popen[str]:
    """As torch's launcher starts a rank."""
    (tmp_path / "input").write_text("given")
    with open(tmp_path / "input") as given:
        return subprocess.Popen(
            [python, "-u", "-m", "tests.support.forks.subject", str(tmp_path / "facts"), how],
            env=os.environ | environment,
            cwd=tmp_path,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def facts(tmp_path: Path) -> dict[str, Any]:
    """What it has written down, once it has."""
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "facts").exists():
        assert time.monotonic() < deadline, "it never started"
        time.sleep(0.01)
    found: dict[str, Any] = json.loads((tmp_path / "facts").read_text())
    return found


@pytest.mark.parametrize("how", ["0", "7", "a reason", "raise", "SIGKILL", "SIGSEGV", "SIGTERM"])
def test_it_says_and_ends_as_a_python_of_its_own_does(tmp_path: Path, how: str) -> None:
    ends = []
    for python in (sys.executable, client.python()):
        process = start(python, tmp_path, how)
        out, err = process.communicate(timeout=PATIENCE)
        ends.append((process.returncode, out, err.splitlines()[0], err.splitlines()[-1]))
    assert ends[0] == ends[1]


def test_what_it_is_given_is_what_it_has_and_what_is_seen_of_it(tmp_path: Path) -> None:
    mark = f"run-of-forks-{os.getpid()}"
    variables = {"FSDP_TUI_RUN_ID": mark, "LONG": "x" * 5000}
    process = start(client.python(), tmp_path, "wait", **variables)
    found = facts(tmp_path)
    assert (found["leads"], found["cwd"], found["input"]) == (True, str(tmp_path), "given")
    assert found["environment"].items() >= variables.items()
    assert sorted(found["seen"]) == sorted(f"{n}={v}" for n, v in found["environment"].items())
    assert "PADDING" not in found["environment"], "nothing of the server's"
    words = ["-u", "-m", "tests.support.forks.subject", str(tmp_path / "facts"), "wait", ""]
    assert os.path.samefile(found["line"][0], sys.executable)
    assert found["line"][1:] == words
    assert {one.pid for one in with_run_id(mark)} == {process.pid, found["pid"]}
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_pid_that_the_launcher_knows_ends_it(tmp_path: Path, number: int) -> None:
    process = start(client.python(), tmp_path, "wait")
    rank = ProcessId.of(facts(tmp_path)["pid"])
    assert rank is not None
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -number
    deadline = time.monotonic() + PATIENCE
    while rank.alive():
        assert time.monotonic() < deadline, "it outlived who stands for it"
        time.sleep(0.01)


def test_a_rank_that_is_killed_looks_killed_to_its_launcher(tmp_path: Path) -> None:
    process = start(client.python(), tmp_path, "wait")
    os.kill(facts(tmp_path)["pid"], signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL


def test_a_hang_up_that_the_launcher_ignores_is_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(client.python(), tmp_path, "wait")
    finally:
        signal.signal(signal.SIGHUP, before)
    found = facts(tmp_path)
    assert found["ignores_hangup"]
    os.kill(found["pid"], signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGTERM
