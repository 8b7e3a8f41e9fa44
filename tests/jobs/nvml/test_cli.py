"""The command line on a machine that shows eight GPUs: in processes of their own, but for refusals.

What is refused takes several commands each, and the rule is the same in this process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support import nvml_stub
from tests.support.nvml_stub.stub import GIB, gpu, start_holder, uuid
from tests.support.tui.shell import Shell
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.nvml_stub.stub import StubNvml

    Tui = Callable[..., subprocess.CompletedProcess[str]]

pytest_plugins = ["tests.support.nvml_stub.fixture"]

PLAY = Path(nvml_stub.__file__).with_name("play.py")


@pytest.fixture
def tui(home: Path, nvml_stub: StubNvml) -> Tui:
    """Runs `fsdp-tui …` beside the stub: `tui("gpus", "--json", CUDA_VISIBLE_DEVICES="0")`."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = nvml_stub.environment
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        return subprocess.run(
            [sys.executable, "-m", "tui", *words],
            env=inherited | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    return run


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_gpus_as_json(tui: Tui, nvml_stub: StubNvml, tmp_path: Path) -> None:
    other = start_holder(tmp_path)
    try:
        nvml_stub.write(
            [
                gpu(
                    index,
                    pci=[0, 0x90 - 0x10 * index, 0],
                    utilisation=10 * index,
                    processes=[{"pid": other.pid, "memory": GIB}] if index == 6 else [],
                )
                for index in range(8)
            ]
        )
        found = rows(tui("gpus", "--json"))
    finally:
        other.kill()
        other.wait()
    assert [row["index"] for row in found] == list(range(8))
    assert [row["uuid"] for row in found] == [uuid(index) for index in reversed(range(8))]
    assert [row["utilisation"] for row in found] == [70, 60, 50, 40, 30, 20, 10, 0]
    assert [process["pid"] for process in found[1]["processes"]] == [other.pid]


def test_gpus_as_a_table_with_a_lost_and_a_silent_one(tui: Tui, nvml_stub: StubNvml) -> None:
    nvml_stub.write(
        [{}, gpu(1, errors={"*": "GPU_IS_LOST"}), gpu(2, temperature=None, power=None), {}]
    )
    done = tui("gpus")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 5
    assert "31 °C" in done.stdout.splitlines()[1]
    assert "31 °C" not in done.stdout.splitlines()[3]


def test_no_gpus_and_no_driver(tui: Tui, nvml_stub: StubNvml) -> None:
    nvml_stub.write(0)
    assert rows(tui("gpus", "--json")) == []
    nvml_stub.state.unlink()
    assert rows(tui("gpus", "--json")) == []


def test_an_inherited_choice_hides_gpus(tui: Tui, nvml_stub: StubNvml) -> None:
    nvml_stub.write(8)
    shown = rows(tui("gpus", "--json", CUDA_VISIBLE_DEVICES=f"5,{uuid(2)[:10]}"))
    assert [(row["index"], row["uuid"]) for row in shown] == [(2, uuid(2)), (5, uuid(5))]


@pytest.fixture
def job_file(job_values: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    del job_values["device"], job_values["num_processes"]
    path.write_text(yaml.safe_dump(job_values))
    return path


@pytest.fixture
def shell(
    home: Path,
    nvml: StubNvml,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Shell:
    nvml.write(8)
    return Shell(monkeypatch, capsys)


def test_more_gpus_than_there_are_is_refused_in_one_line(
    shell: Shell, job_file: Path, home: Path
) -> None:
    assert shell("submit", str(job_file), "--dry-run", "--gpus=8")[0] == 0
    status, out, err = shell("submit", str(job_file), "--dry-run", "--gpus=9")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "9 GPUs" in err
    assert "has 8" in err
    status, out, _ = shell("submit", str(job_file), "--gpus=9")
    assert (status, out) == (2, "")
    assert not list(home.glob("runs/*"))


def test_a_gpu_that_is_not_there_is_refused(shell: Shell, job_file: Path) -> None:
    assert shell("submit", str(job_file), "--dry-run", "--gpus=[7,0]")[0] == 0
    for name in ("8", "GPU-ffffffff"):
        status, _, err = shell("submit", str(job_file), "--dry-run", f"--gpus=[0,{name}]")
        assert status == 2
        assert len(err.splitlines()) == 1
        assert f"no GPU {name}" in err


LATE = """\
import shutil, sys
from jobs.machine import devices
before = len(devices.gpus())
shutil.copy(sys.argv[1], sys.argv[2])
soon = len(devices.gpus())
devices._driver.retry_at = 0.0  # half a minute later
print(before, soon, len(devices.gpus()))
"""


def test_a_driver_that_is_installed_later_is_found(nvml_stub: StubNvml, tmp_path: Path) -> None:
    nvml_stub.write(8)
    empty = tmp_path / "lib"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(nvml_stub.library), str(empty)],
        env=nvml_stub.environment | {"LD_LIBRARY_PATH": str(empty)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    if done.stdout.startswith("0"):
        assert done.stdout == "0 0 8\n"
    else:
        pytest.skip("this machine has a driver of its own")


def test_the_command_for_people(home: Path) -> None:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("no C compiler (cc) on this machine")
    words = ["--gpus", "4", "--busy", "0-2", "--foreign", "1"]
    command = [sys.executable, "-m", "tui", "gpus", "--json"]
    done = subprocess.run(
        [sys.executable, str(PLAY), *words, "--", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    found = rows(done)
    assert [row["utilisation"] > 80 for row in found] == [True, False, True, False]
    assert [len(row["processes"]) for row in found] == [0, 1, 0, 0]
    assert all((row["memory_used"] > 2**30) == (row["index"] < 3) for row in found)
    failed = [sys.executable, str(PLAY), "--", sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(failed, check=False, timeout=PATIENCE).returncode == 7
